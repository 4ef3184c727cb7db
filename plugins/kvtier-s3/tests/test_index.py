"""The index of known chunks: changes during a listing, and its bounds."""

from __future__ import annotations

from kvtier.tiers import Knowledge
from kvtier_s3._index import ChunkIndex
from kvtier_testing.tiers.rig import key, keys

P, U = Knowledge.PRESENT, Knowledge.UNKNOWN


def listed(index: ChunkIndex, numbers: range) -> list[bytes]:
    """Apply a listing of chunks; return those that are gone."""
    listing = index.start_listing()
    for number in numbers:
        listing.add(key(number), 10)
    return list(index.finish_listing(listing))


def test_changes_beat_a_listing() -> None:
    index = ChunkIndex(100, None)
    listing = index.start_listing()
    listing.add(key(1), 10)
    listing.add(key(2), 10)
    index.add(key(3))
    index.remove(keys([1]))  # listed earlier, but unknown
    index.remove(keys([2]))
    index.add(key(2))
    index.add(key(4))
    index.remove(keys([4]))
    assert index.finish_listing(listing) == []
    assert index.known(keys(range(1, 5))) == [U, P, P, U]


def test_stale_listing_counts_bytes_only() -> None:
    index = ChunkIndex(100, 30)
    listing = index.start_listing()
    listing.add(key(1), 10)
    index.clear()
    index.add(key(2))
    assert index.reserve(20) == "counting"
    assert index.finish_listing(listing) == []
    assert index.known(keys([1, 2])) == [U, P]
    assert index.reserve(21) == "max_bytes"
    assert index.reserve(20) is None


def test_remembered_keys_are_bounded() -> None:
    index = ChunkIndex(3, None)
    listing = index.start_listing()
    for number in range(10):
        listing.add(key(number), 10)
        index.add(key(100 + number))
    assert len(index) == 3
    index.finish_listing(listing)
    assert len(index) == 3
    assert index.usage() is not None


def test_excess_keys_are_not_gone() -> None:
    index = ChunkIndex(3, None)
    listed(index, range(3))
    assert listed(index, range(3, 9)) == []


def test_put_reserves_its_bytes() -> None:
    index = ChunkIndex(100, 30)
    assert index.reserve(10) == "counting"
    listed(index, range(1))
    assert [index.reserve(10) for _ in range(3)] == [None, None, "max_bytes"]
    index.end_reservation(10, added=False)
    assert index.reserve(10) is None
    index.end_reservation(10, added=True)
    index.end_reservation(10, added=True)
    assert index.reserve(10) == "max_bytes"
    index.remove(keys([0]), 10)
    assert index.reserve(10) is None
