"""Where the pages of a chunk lie in its slot."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class SlotLayout:
    """The place of each page of one worker in a slot.

    A slot holds the workers' areas in the order of their ranks, then padding to a multiple of the
    page size of the operating system. An area holds, for each tensor in order, the pages of the
    chunk's ``blocks_per_chunk`` blocks::

        | worker 0: tensor 0 [block 0, block 1, ...] tensor 1 [...] ... | worker 1: ... | padding |

    Attributes:
        page_bytes: bytes of one block in each tensor, padding of the tensor included.
        blocks_per_chunk: blocks of one chunk.
        rank: which worker this is, 0 to ``workers - 1``.
        workers: how many workers share a slot; all have the same ``page_bytes``.
    """

    page_bytes: tuple[int, ...]
    blocks_per_chunk: int
    rank: int
    workers: int

    @staticmethod
    def make(page_bytes: Sequence[int], blocks_per_chunk: int, rank: int = 0, workers: int = 1) -> SlotLayout:
        """Make the layout of one worker.

        Raises:
            ValueError: there is no tensor, a length or count is not positive, or the rank is out of range.
        """
        pages = tuple(int(size) for size in page_bytes)
        if not pages or min(pages) < 1:
            raise ValueError(f"page_bytes is {pages}; one positive length for each tensor is needed")
        if blocks_per_chunk < 1:
            raise ValueError(f"blocks_per_chunk is {blocks_per_chunk}; it must be at least 1")
        if not 0 <= rank < workers:
            raise ValueError(f"rank is {rank} of {workers} workers")
        return SlotLayout(pages, blocks_per_chunk, rank, workers)

    @cached_property
    def worker_bytes(self) -> int:
        """Bytes of one worker's area."""
        return sum(self.page_bytes) * self.blocks_per_chunk

    @cached_property
    def chunk_bytes(self) -> int:
        """Bytes of a slot: all areas, padded to a multiple of the operating system's page size."""
        return -(-self.worker_bytes * self.workers // mmap.PAGESIZE) * mmap.PAGESIZE

    @cached_property
    def tensor_offsets(self) -> tuple[int, ...]:
        """Offset in the slot of each tensor's first page of this worker."""
        sizes = (size * self.blocks_per_chunk for size in self.page_bytes[:-1])
        return tuple(accumulate(sizes, initial=self.rank * self.worker_bytes))

    def offset(self, tensor: int, sub_block: int) -> int:
        """Return the offset in the slot of the page of block ``sub_block`` of the chunk in ``tensor``.

        Raises:
            IndexError: there is no such tensor or block.
        """
        if not (0 <= tensor < len(self.page_bytes) and 0 <= sub_block < self.blocks_per_chunk):
            raise IndexError(f"no page for tensor {tensor}, block {sub_block} of the chunk")
        return self.tensor_offsets[tensor] + sub_block * self.page_bytes[tensor]
