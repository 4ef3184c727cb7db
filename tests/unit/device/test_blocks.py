"""Which chunks blocks belong to, and whether they fill them."""

from __future__ import annotations

import pytest

from kvtier.device.base import Blocks


def blocks(*groups: tuple[int, int]) -> Blocks:
    """Make blocks of groups of the given sizes and first indices."""
    sizes, firsts = [size for size, _ in groups], [first for _, first in groups]
    return Blocks.make(range(sum(sizes)), sizes, firsts)


@pytest.mark.parametrize(
    ("groups", "slots"),
    [
        ([(6, 0)], 2),
        ([(6, 3)], 2),
        ([(4, 2)], 2),  # only the first chunk lacks blocks, and only its first ones
        ([(1, 5)], 1),
        ([(0, 0), (3, 9), (0, 4)], 1),
        ([(3, 0), (2, 1)], 2),
    ],
)
def test_blocks_that_end_with_a_chunk_fill_it(groups: list[tuple[int, int]], slots: int) -> None:
    assert blocks(*groups).fill(slots, 3)


@pytest.mark.parametrize(
    ("groups", "slots"),
    [
        ([(5, 0)], 2),
        ([(2, 0)], 1),
        ([(3, 0)], 2),  # three of the blocks of two chunks are missing: as if it were one chunk
        ([(3, 0), (2, 0)], 2),
        ([(3, 1), (3, 0)], 3),
    ],
)
def test_blocks_that_leave_a_chunk_open_do_not(groups: list[tuple[int, int]], slots: int) -> None:
    assert not blocks(*groups).fill(slots, 3)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_chunks_of_one_block_are_always_filled(size: int) -> None:
    assert blocks((size, 7)).fill(size, 1)
    assert not blocks((size, 7)).fill(size + 1, 1)
