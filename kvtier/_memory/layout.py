"""The places of a chunk's pages in its slot."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Final

CHUNK_BYTES: Final = 512 * 1024
"""Default lower bound of a chunk's size: files of this size reach the limit of a disk."""

CHUNK_TOKENS: Final = 256
"""Default upper bound of a chunk's tokens: the tail of a prompt after its last chunk is computed."""


def default_blocks_per_chunk(block_bytes: int, block_tokens: int) -> int:
    """Return the least number of blocks that makes a chunk ``CHUNK_BYTES`` large, up to ``CHUNK_TOKENS``."""
    return min(-(-CHUNK_BYTES // block_bytes), max(1, CHUNK_TOKENS // block_tokens))


def whole_pages(nbytes: int) -> int:
    """Round up to a multiple of the operating system's page size."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


@dataclass(frozen=True)
class SlotLayout:
    """The place of each page of one worker in a slot.

    A slot holds areas of ``area_bytes`` each, then padding to a multiple of the page size of the
    operating system. An area holds, for each tensor in order, the pages of the chunk's
    ``blocks_per_chunk`` blocks::

        | area 0: tensor 0 [block 0, block 1, ...] tensor 1 [...] ... | area 1: ... | padding |

    Either each worker has its own area, in the order of the ranks, or the workers share one
    area of canonical pages, each of which holds what all workers have of a block in a tensor.
    """

    page_bytes: tuple[int, ...]  # bytes of one block in each tensor: its padded page, or the canonical page
    blocks_per_chunk: int
    rank: int  # index of the area with this worker's pages, 0 to ``workers - 1``
    workers: int  # number of areas of a slot
    area_bytes: int  # Workers with fewer layers leave the rest of their area unused.

    @staticmethod
    def make(
        page_bytes: Sequence[int],
        blocks_per_chunk: int,
        rank: int = 0,
        workers: int = 1,
        area_bytes: int | None = None,
    ) -> SlotLayout:
        """Make the layout of one worker, or raise ValueError; its pages fill an area by default."""
        pages = tuple(int(size) for size in page_bytes)
        if not pages or min(pages) < 1:
            raise ValueError(f"page_bytes is {pages}; one positive length for each tensor is needed")
        if blocks_per_chunk < 1:
            raise ValueError(f"blocks_per_chunk is {blocks_per_chunk}; it must be at least 1")
        if not 0 <= rank < workers:
            raise ValueError(f"rank is {rank} of {workers} workers")
        taken = sum(pages) * blocks_per_chunk
        if area_bytes is None:
            area_bytes = taken
        if taken > area_bytes:
            raise ValueError(f"a worker's pages take {taken} bytes of a slot, its area has {area_bytes}")
        return SlotLayout(pages, blocks_per_chunk, rank, workers, area_bytes)

    @cached_property
    def worker_bytes(self) -> int:
        return sum(self.page_bytes) * self.blocks_per_chunk

    @cached_property
    def chunk_bytes(self) -> int:
        """Bytes of a slot: all areas, padded to a multiple of the operating system's page size."""
        return whole_pages(self.area_bytes * self.workers)

    @cached_property
    def tensor_offsets(self) -> tuple[int, ...]:
        """Offset in the slot of each tensor's first page of this worker."""
        sizes = (size * self.blocks_per_chunk for size in self.page_bytes[:-1])
        return tuple(accumulate(sizes, initial=self.rank * self.area_bytes))
