"""What is known without asking: a listing takes time, and things change meanwhile."""

from __future__ import annotations

from kvtier.tiers.base import Knowledge
from kvtier_s3.holdings import Holdings
from kvtier_testing.tiers.rig import key, keys

P, U = Knowledge.PRESENT, Knowledge.UNKNOWN


def listed(holdings: Holdings, numbers: range, nbytes: int = 10) -> list[bytes]:
    """Let a listing find chunks; return what it says has gone."""
    listing = holdings.start_listing()
    for number in numbers:
        listing.add(key(number), nbytes)
    return list(holdings.end_listing(listing))


def test_a_listing_replaces_what_was_known_and_says_what_has_gone() -> None:
    holdings = Holdings(100, None)
    listed(holdings, range(4))
    assert sorted(listed(holdings, range(2, 6))) == sorted(keys([0, 1]))
    assert holdings.known(keys(range(6))) == [U, U, P, P, P, P]


def test_what_is_put_and_discarded_while_a_listing_runs_counts_more_than_the_listing() -> None:
    holdings = Holdings(100, None)
    listing = holdings.start_listing()
    listing.add(key(1), 10)
    listing.add(key(2), 10)
    holdings.found(key(3))
    holdings.lost(keys([1]))  # after it was listed, and nobody had known of it
    holdings.lost(keys([2]))
    holdings.found(key(2))
    holdings.found(key(4))
    holdings.lost(keys([4]))
    assert holdings.end_listing(listing) == []
    assert holdings.known(keys(range(1, 5))) == [U, P, P, U]


def test_a_listing_during_which_everything_was_forgotten_is_not_believed() -> None:
    holdings = Holdings(100, None)
    listing = holdings.start_listing()
    listing.add(key(1), 10)
    holdings.forget()
    assert holdings.end_listing(listing) == []
    assert holdings.known(keys([1])) == [U]


def test_no_more_keys_are_remembered_than_may_be() -> None:
    holdings = Holdings(3, None)
    listing = holdings.start_listing()
    for number in range(10):
        listing.add(key(number), 10)
        holdings.found(key(100 + number))
    assert len(holdings) == 3
    holdings.end_listing(listing)
    assert len(holdings) == 3
    assert holdings.usage() is not None


def test_keys_that_no_longer_fit_are_not_said_to_have_gone() -> None:
    holdings = Holdings(3, None)
    listed(holdings, range(3))
    assert listed(holdings, range(3, 9)) == []


def test_room_is_reserved_until_it_is_known_how_a_put_has_ended() -> None:
    holdings = Holdings(100, 30)
    assert holdings.reserve(10) == "counting"
    listed(holdings, range(1))
    assert [holdings.reserve(10) for _ in range(3)] == [None, None, "max_bytes"]
    holdings.settle(10, added=False)
    assert holdings.reserve(10) is None
    holdings.settle(10, added=True)
    holdings.settle(10, added=True)
    assert holdings.reserve(10) == "max_bytes"
    holdings.lost(keys([0]), 10)
    assert holdings.reserve(10) is None
