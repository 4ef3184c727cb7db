"""Segments read by the tools: what is in the file is not believed before it was looked at."""

from __future__ import annotations

import os

import pytest

from kvtier.keys import pack_key
from kvtier.tiers import seal
from kvtier.tiers.fs.layout import BLOCK_BYTES
from kvtier.tiers.fs.segments import layout
from kvtier.tiers.fs.segments.layout import Head, Kind, Record, Shape
from kvtier.tiers.fs.segments.scan import NoSegmentError, Segment

SHAPE = Shape(4 * BLOCK_BYTES, b"d" * 16)
MOST = 4096  # records: as many as one block of the map has bytes for
CAPACITY = MOST * 4 + 3


def record(block: int) -> Record:
    return Record(pack_key(b"k" * 32, 0), block, 0)


def head(map_blocks: int, capacity: int = CAPACITY) -> bytes:
    """The head of a segment and its map."""
    packed = layout.pack_head(Kind.SEGMENT, SHAPE, Head(map_blocks, 0, capacity, 0))
    return packed.ljust(BLOCK_BYTES * (1 + map_blocks), b"\0")


@pytest.fixture
def opened(tmp_path):
    """Write a segment, from parts at blocks, and open it."""
    root_fd = os.open(tmp_path, os.O_RDONLY)

    def write(parts):
        with (tmp_path / "x.seg").open("wb") as file:
            for block, content in parts.items():
                file.seek(block * BLOCK_BYTES)
                file.write(content)
        return Segment(root_fd, "x.seg")

    yield write
    os.close(root_fd)


@pytest.mark.parametrize("block", [0, 1, CAPACITY - 4, 2**63])
def test_a_footer_that_lists_a_chunk_where_none_can_be_has_a_torn_seal_there(opened, block):
    footer = layout.make_footer(SHAPE, 20, [record(3), record(block)])
    with opened({0: head(1), 20: footer}) as segment:
        assert segment.is_sealed
        assert list(segment.records()) == [record(3), seal.Verdict.TORN]
        assert list(segment.living()) == [record(3)]


def test_a_chunk_that_goes_beyond_the_end_of_its_segment_is_none(opened):
    at = CAPACITY - 6
    extent = layout.make_extent_head(SHAPE, at, [record(at + 1), record(at + 5)])
    with opened({0: head(1), at: extent}) as segment:
        assert not segment.is_sealed
        assert list(segment.records()) == [record(at + 1)]


@pytest.mark.parametrize("map_blocks", [0, 1, layout.MAX_MAP_BLOCKS + 1])
def test_a_segment_whose_map_is_too_short_or_too_long_is_none(opened, map_blocks):
    with pytest.raises(NoSegmentError) as error:
        opened({0: head(map_blocks, (MOST + 1) * 4)})
    assert error.value.is_torn


@pytest.mark.parametrize(
    ("first", "sealed", "living"),
    [(0, None, 0), (1, True, 1), (2, True, 2), (11, False, 2), (12, False, 2)],
    ids=["head", "map", "extent", "footer's entries", "footer's head"],
)
def test_any_byte_of_what_leads_to_chunks_may_be_another(opened, first, sealed, living):
    extent = layout.make_extent_head(SHAPE, 2, [record(3), record(7)])
    footer = layout.make_footer(SHAPE, 11, [record(3), record(7)])
    whole = (head(1, 100) + extent).ljust(11 * BLOCK_BYTES, b"\0") + footer
    for at in range(2 if first == 1 else layout.HEAD_BYTES):  # the map has two bytes in use
        harmed = bytearray(whole)
        harmed[first * BLOCK_BYTES + at] ^= 0xFF
        if sealed is None:
            with pytest.raises(NoSegmentError):
                opened({0: bytes(harmed)})
            continue
        with opened({0: bytes(harmed)}) as segment:
            assert segment.is_sealed is sealed
            assert len(list(segment.records())) == 2
            assert len(list(segment.living())) == living
