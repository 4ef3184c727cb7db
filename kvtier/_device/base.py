"""The KV tensors of an engine, blocks to copy between them and slots, and results of copies."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_Integers = npt.NDArray[np.int64]

DEADLINE_S = 60.0
"""Seconds that a copy may take by default: a thousand times what a large one needs."""


class CopyQueue(StrEnum):
    """The queues of transfers, each with its own thread; the value is the thread's name."""

    STORE = "kvtier-store"
    LOAD = "kvtier-load"
    EXPEDITED = "kvtier-expedited"


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of the device, of all KV cache groups, consecutive in their request within each group.

    Chunks of ``blocks_per_chunk`` blocks are aligned to the start of the request. The first chunk of a group
    lacks its first ``first_indices[g] % blocks_per_chunk`` blocks, and the last chunk may lack blocks at its
    end.
    """

    ids: _Integers  # rows of the tensors, group after group; shape (blocks,)
    group_sizes: tuple[int, ...]  # blocks of each group; they add up to ``len(ids)``
    first_indices: tuple[int, ...]  # index of each group's first block within its request

    def __post_init__(self) -> None:
        if self.ids.ndim != 1 or self.ids.dtype != np.int64:
            raise ValueError(f"ids must be int64 of one dimension, not {self.ids.dtype} of {self.ids.ndim}")
        if len(self.first_indices) != len(self.group_sizes):
            raise ValueError(
                f"{len(self.group_sizes)} group_sizes, but {len(self.first_indices)} first_indices"
            )
        if sum(self.group_sizes) != len(self.ids):
            raise ValueError(
                f"group_sizes add up to {sum(self.group_sizes)}, but there are {len(self.ids)} ids"
            )
        if min((*self.group_sizes, *self.first_indices), default=0) < 0:
            raise ValueError("group_sizes and first_indices must not be negative")

    @staticmethod
    def make(
        ids: Sequence[int] | npt.NDArray[np.integer[Any]],
        group_sizes: Sequence[int],
        first_indices: Sequence[int],
    ) -> Blocks:
        """Make blocks from any sequences; ``ids`` of another integer type are converted."""
        return Blocks(np.asarray(ids, dtype=np.int64), tuple(group_sizes), tuple(first_indices))

    def whole_chunks(
        self, chunks: Sequence[int], blocks_per_chunk: int, state_groups: Collection[int] = ()
    ) -> tuple[Blocks, list[bool]]:
        """Return the blocks of the chunks that may be stored, and for each chunk whether it may.

        ``chunks`` are the chunks of each group; groups at the end may be left out if they have none. An
        engine omits blocks that a window has lost, and passes only the index of a group's first block. If
        that index explains all missing blocks, the first chunk lacks them; else all chunks may.
        """
        parts, firsts, whole, start = [self.ids[:0]], [], [], 0
        counts = [*chunks, *[0] * len(self.group_sizes)]
        groups = enumerate(zip(self.group_sizes, self.first_indices, counts, strict=False))
        for group, (size, first, count) in groups:
            is_explained = count * blocks_per_chunk - size == first % blocks_per_chunk
            # blocks of a chunk that lacks its front
            cut = 0 if group in state_groups else -first % blocks_per_chunk
            parts.append(self.ids[start + (cut if is_explained else size) : start + size])
            firsts.append(first + cut)
            whole += [is_explained and not cut, *[is_explained] * count][:count]
            start += size
        return Blocks(np.concatenate(parts), tuple(map(len, parts[1:])), tuple(firsts)), whole

    def slots_needed(self, blocks_per_chunk: int) -> tuple[int, ...]:
        """Return how many slots each group needs. A group without blocks needs none."""
        return tuple(
            -(-(size + first % blocks_per_chunk) // blocks_per_chunk) if size else 0
            for size, first in zip(self.group_sizes, self.first_indices, strict=True)
        )


@dataclass(frozen=True, slots=True)
class PieceRun:
    """Equally long pieces of a page, and their places in the canonical page.

    Piece ``i`` of ``pieces`` has ``piece_bytes`` bytes. It starts at ``local_offset + i * local_stride`` in
    the worker's page and at ``canonical_offset + i * canonical_stride`` in the canonical page.
    """

    local_offset: int
    canonical_offset: int
    piece_bytes: int
    pieces: int = 1
    local_stride: int = 0
    canonical_stride: int = 0

    def __post_init__(self) -> None:
        numbers = (self.local_offset, self.canonical_offset, self.local_stride, self.canonical_stride)
        if min(numbers) < 0 or self.piece_bytes < 1 or self.pieces < 1:
            raise ValueError(f"a run needs a length of 1 or more and an offset of 0 or more: {self}")


@dataclass(frozen=True, slots=True)
class PageMapping:
    """The place of one worker's page in the canonical page, which is the page of a single worker.

    Workers that hold the same bytes share the writes: worker ``writer`` of ``writers`` writes every
    ``writers``-th canonical page, counted through all slots.

    Attributes:
        canonical_bytes: size of the canonical page.
        runs: the places of the worker's bytes; together they cover its page exactly.
        writers: number of workers that hold these bytes.
        writer: index of this worker among them.
    """

    canonical_bytes: int
    runs: tuple[PieceRun, ...]
    writers: int = 1
    writer: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.writer < self.writers:
            raise ValueError(f"writer is {self.writer} of {self.writers}")

    def pieces(self) -> _Integers:
        """Return the pieces to copy, with neighbours joined: int64, shape (pieces, 3).

        The columns are the offset in the worker's page, the offset in the canonical page, and the length.
        """
        spread = np.concatenate([_spread(run) for run in self.runs])
        spread = spread[np.argsort(spread[:, 0], kind="stable")]
        ends = spread[:-1, :2] + spread[:-1, 2:]
        first = np.append(True, np.any(spread[1:, :2] != ends, axis=1))
        starts = np.flatnonzero(first)
        lengths = np.add.reduceat(spread[:, 2], starts)
        return np.column_stack((spread[starts, :2], lengths))

    def require_cover(self, page_bytes: int) -> None:
        """Raise ValueError unless the runs cover each byte of a page exactly once, without overlap."""
        pieces = self.pieces()
        for column, what in ((0, "page"), (1, "canonical page")):
            ordered = pieces[np.argsort(pieces[:, column])]
            if np.any(ordered[:-1, column] + ordered[:-1, 2] > ordered[1:, column]):
                raise ValueError(f"runs overlap in the {what}")
        ends = pieces[:, :2] + pieces[:, 2:]
        if pieces[:, 2].sum() != page_bytes or ends[:, 0].max() > page_bytes:
            raise ValueError(f"the runs do not cover a page of {page_bytes} bytes exactly")
        if ends[:, 1].max() > self.canonical_bytes:
            raise ValueError(f"a run goes beyond the canonical page of {self.canonical_bytes} bytes")


def _spread(run: PieceRun) -> _Integers:
    steps = np.arange(run.pieces, dtype=np.int64)
    local = run.local_offset + steps * run.local_stride
    canonical = run.canonical_offset + steps * run.canonical_stride
    return np.column_stack((local, canonical, np.full_like(steps, run.piece_bytes)))


@dataclass(frozen=True, slots=True)
class PageRef:
    """The pages of a KV cache group in one tensor.

    Attributes:
        tensor: index of the tensor in ``KVCaches.tensors``.
        page_bytes: bytes of a page that the group uses, without padding. Only these are copied.
        mapping: their place in the canonical page; None if slots hold pages in the worker's layout.
    """

    tensor: int
    page_bytes: int
    mapping: PageMapping | None = None

    def __post_init__(self) -> None:
        if self.mapping is not None:
            self.mapping.require_cover(self.page_bytes)

    @property
    def is_whole(self) -> bool:
        """Whether this worker alone writes all bytes of the page in a slot."""
        return self.slot_bytes == self.page_bytes and (self.mapping is None or self.mapping.writers == 1)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot for this page; with a mapping it shares them with other workers."""
        return self.page_bytes if self.mapping is None else self.mapping.canonical_bytes


@dataclass(frozen=True, eq=False)
class KVCaches:
    """The engine's KV cache as tensors of pages.

    Attributes:
        tensors: int8, each of shape (num_blocks, page_bytes); a row's bytes are contiguous, rows can be
            further apart than ``page_bytes``.
        groups: for each KV cache group, the tensors that its blocks have pages in.
        state_groups: groups of recurrent states. Loads read only the last block of their chunks, so a chunk
            may be stored without its first blocks.
    """

    tensors: tuple[torch.Tensor, ...]
    groups: tuple[tuple[PageRef, ...], ...]
    state_groups: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for index, tensor in enumerate(self.tensors):
            if tensor.ndim != 2 or tensor.dtype != torch.int8 or tensor.stride(1) != 1:
                raise ValueError(
                    f"tensor {index} is not int8 of shape (num_blocks, page_bytes) with contiguous rows"
                )
        for ref in (ref for group in self.groups for ref in group):
            if not 0 <= ref.tensor < len(self.tensors):
                raise ValueError(f"a group refers to tensor {ref.tensor} of {len(self.tensors)}")
            if not 0 < ref.page_bytes <= self.tensors[ref.tensor].shape[1]:
                raise ValueError(
                    f"a group uses {ref.page_bytes} bytes of a page of tensor {ref.tensor}, which "
                    f"has {self.tensors[ref.tensor].shape[1]}"
                )

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Number of blocks of each KV cache group."""
        sizes = ([self.tensors[ref.tensor].shape[0] for ref in group] for group in self.groups)
        return tuple(min(tensors, default=0) for tensors in sizes)

    @property
    def page_bytes(self) -> tuple[int, ...]:
        """Bytes of one block of each tensor in a slot, as ``SlotLayout.make`` takes them."""
        refs = [ref for group in self.groups for ref in group]
        return tuple(
            _slot_bytes(tensor, [ref for ref in refs if ref.tensor == index])
            for index, tensor in enumerate(self.tensors)
        )


def _slot_bytes(tensor: torch.Tensor, refs: Sequence[PageRef]) -> int:
    if refs and all(ref.mapping is not None for ref in refs):
        return max(ref.slot_bytes for ref in refs)
    return max([int(tensor.shape[1])] + [ref.slot_bytes for ref in refs])


class Attempt(IntEnum):
    """The ways to make the copies of one transfer, tried in this order."""

    FIRST = 0
    RETRY = 1  # on a fresh stream
    STAGED = 2  # loads only: copy by copy, through memory that is neither shared nor pinned


@dataclass(frozen=True, slots=True)
class Finished:
    """How a transfer ended."""

    transfer_id: int
    nbytes: int  # its pages' bytes
    seconds: float  # duration of the copy, without time in the queue
    error: BaseException | None = None  # error of the final failure
    # The last way tried; None if none was tried, as on a lost device.
    attempt: Attempt | None = Attempt.FIRST


@dataclass(frozen=True, slots=True)
class Pinning:
    """The amount of the primary tier that is pinned, so that the device accesses it directly."""

    nbytes: int = 0
    failed: bool = False  # No more memory can be pinned, so copies of the remaining slots are slower.


@dataclass(frozen=True, slots=True)
class Audits:
    """Counts of the chunks audited so far."""

    chunks: int = 0
    failed: int = 0  # audits that found wrong bytes
