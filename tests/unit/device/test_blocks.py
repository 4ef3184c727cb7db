"""Whether blocks fill their chunks."""

from __future__ import annotations

import pytest

from kvtier._device.base import Blocks


@pytest.mark.parametrize(
    ("groups", "slots", "per_chunk", "answer"),
    [
        ([(6, 0)], 2, 3, True),
        ([(6, 3)], 2, 3, True),
        ([(4, 2)], 2, 3, True),  # only the first chunk lacks blocks, and only its first ones
        ([(1, 5)], 1, 3, True),
        ([(0, 0), (3, 9), (0, 4)], 1, 3, True),
        ([(3, 0), (2, 1)], 2, 3, True),
        ([(5, 7)], 5, 1, True),
        ([(5, 7)], 6, 1, False),
        ([(5, 0)], 2, 3, False),
        ([(2, 0)], 1, 3, False),
        ([(3, 0)], 2, 3, False),  # three of the blocks of two chunks are missing: as if it were one chunk
        ([(3, 0), (2, 0)], 2, 3, False),
        ([(3, 1), (3, 0)], 3, 3, False),
    ],
)
def test_blocks_fill_chunks_that_they_end_with(
    groups: list[tuple[int, int]], slots: int, per_chunk: int, answer: bool
) -> None:
    sizes, firsts = zip(*groups, strict=True)
    assert Blocks.make(range(sum(sizes)), sizes, firsts).fill(slots, per_chunk) is answer
