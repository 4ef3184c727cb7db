"""From blocks and slots to the list of copies: addresses and lengths, neighbours joined.

All arithmetic is numpy's over whole groups: no Python runs for each page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.device.base import Blocks, KVCaches, PageRef
from kvtier.memory.layout import SlotLayout

Addresses = npt.NDArray[np.uint64]
_Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class CopyPlan:
    """Copies to make, in any order: ``sizes[i]`` bytes from address ``src[i]`` to ``dst[i]``.

    Attributes:
        src, dst, sizes: uint64, shape (copies,), contiguous.
        nbytes: sum of the sizes.
    """

    src: Addresses
    dst: Addresses
    sizes: Addresses
    nbytes: int


class CopyPlanner:
    """Makes the copy plans of one worker.

    Args:
        kv_caches: the device's tensors; their addresses are taken now.
        layout: where the pages lie in a slot.
        address: address of slot 0, as the copying device sees it.
        slots: number of slots.
        piece_slots: no copy crosses a multiple of so many slots; None where that does not matter.

    Raises:
        ValueError: the layout is of other tensors.
    """

    def __init__(
        self,
        kv_caches: KVCaches,
        layout: SlotLayout,
        address: int,
        slots: int,
        piece_slots: int | None = None,
    ) -> None:
        if kv_caches.page_bytes != layout.page_bytes:
            raise ValueError(
                f"the tensors have pages of {kv_caches.page_bytes}, the layout of {layout.page_bytes}"
            )
        self._blocks_per_chunk = layout.blocks_per_chunk
        self._slots = slots
        piece = slots if piece_slots is None else piece_slots
        self._groups = [_Group(kv_caches, refs, layout, address, piece) for refs in kv_caches.groups]

    def store(self, blocks: Blocks, slots: Sequence[int]) -> CopyPlan:
        """Plan the copies from ``blocks`` to ``slots``.

        Raises:
            ValueError: the number of groups or slots does not fit, or a block or slot is out of range.
        """
        device, host, sizes = self._pairs(blocks, slots)
        return CopyPlan(device, host, sizes, int(sizes.sum()))

    def load(self, slots: Sequence[int], blocks: Blocks) -> CopyPlan:
        """Plan the copies from ``slots`` to ``blocks``. Errors as in ``store``."""
        device, host, sizes = self._pairs(blocks, slots)
        return CopyPlan(host, device, sizes, int(sizes.sum()))

    def _pairs(self, blocks: Blocks, slots: Sequence[int]) -> tuple[Addresses, Addresses, Addresses]:
        """Return the addresses of the pages in the tensors, those in the slots, and the sizes."""
        slot_ids = np.asarray(slots, dtype=np.int64)
        needed = self._check(blocks, slot_ids)
        parts, first_id, first_slot = [], 0, 0
        for group, size, first, count in zip(
            self._groups, blocks.group_sizes, blocks.first_indices, needed, strict=True
        ):
            if size:
                ids = blocks.ids[first_id : first_id + size]
                parts += group.pairs(ids, slot_ids[first_slot : first_slot + count], first)
            first_id += size
            first_slot += count
        if len(parts) == 1:
            return parts[0]
        device, host, sizes = zip(*parts, strict=True) if parts else ((), (), ())
        return _joined(device), _joined(host), _joined(sizes)

    def _check(self, blocks: Blocks, slot_ids: _Integers) -> tuple[int, ...]:
        if len(blocks.group_sizes) != len(self._groups):
            raise ValueError(
                f"there are {len(blocks.group_sizes)} groups of blocks; the caches have {len(self._groups)}"
            )
        needed = blocks.slots_needed(self._blocks_per_chunk)
        if sum(needed) != len(slot_ids):
            raise ValueError(f"the blocks need {sum(needed)} slots, but {len(slot_ids)} are given")
        _require_within(slot_ids, self._slots, "slot")
        return needed


class _Group:
    """The addresses of one group's pages: a base and two strides for each tensor it has pages in."""

    def __init__(
        self, caches: KVCaches, refs: Sequence[PageRef], layout: SlotLayout, address: int, piece_slots: int
    ) -> None:
        used: dict[int, int] = {}  # a tensor that a group names twice is copied once
        for ref in refs:
            used[ref.tensor] = max(ref.page_bytes, used.get(ref.tensor, 0))
        self._blocks_per_chunk = layout.blocks_per_chunk
        self._num_blocks = min((caches.tensors[index].shape[0] for index in used), default=0)
        # Blocks of a dense tensor that follow each other have adjacent bytes; others have gaps.
        dense = [i for i in used if used[i] == layout.page_bytes[i] == caches.tensors[i].stride(0)]
        sparse = [i for i in used if i not in dense]
        self._dense = _Pages(caches, dense, used, layout, address)
        self._sparse = _Pages(caches, sparse, used, layout, address)
        # A tensor's pages in the next slot follow only where a slot holds nothing else.
        slots_join = layout.chunk_bytes == layout.worker_bytes and len(layout.page_bytes) == 1
        self._joined_blocks = layout.blocks_per_chunk * (piece_slots if slots_join else 1)

    def pairs(
        self, ids: _Integers, slots: _Integers, first: int
    ) -> list[tuple[Addresses, Addresses, Addresses]]:
        per_chunk = self._blocks_per_chunk
        _require_within(ids, self._num_blocks, "block")
        places = np.arange(first % per_chunk, first % per_chunk + len(ids))  # in the row of the slots' blocks
        chunk, block = np.divmod(places, per_chunk)
        places = slots[chunk] * per_chunk + block
        parts = []
        if self._dense.tensors:
            starts = self._run_starts(ids, places)
            lengths = np.diff(starts, append=len(ids))
            parts.append(self._dense.pairs(ids[starts], places[starts], lengths, per_chunk))
        if self._sparse.tensors:
            parts.append(self._sparse.pairs(ids, places, np.ones_like(ids), per_chunk))
        return parts

    def _run_starts(self, ids: _Integers, places: _Integers) -> _Integers:
        """Find where a run of blocks begins that are neighbours in the tensors and in the slots."""
        breaks = np.empty(len(ids), dtype=np.bool_)
        breaks[0] = True
        np.logical_or(ids[1:] - ids[:-1] != 1, places[1:] - places[:-1] != 1, out=breaks[1:])
        breaks |= places % self._joined_blocks == 0
        return np.flatnonzero(breaks)


class _Pages:
    """Columns of numbers, one row for each tensor."""

    def __init__(
        self, caches: KVCaches, tensors: Sequence[int], used: dict[int, int], layout: SlotLayout, address: int
    ) -> None:
        self.tensors = tuple(tensors)
        self._device_base = _column(caches.tensors[i].data_ptr() for i in tensors)
        self._device_stride = _column(caches.tensors[i].stride(0) for i in tensors)
        self._host_base = _column(address + layout.tensor_offsets[i] for i in tensors)
        self._host_stride = _column(layout.page_bytes[i] for i in tensors)
        self._page_bytes = _column(used[i] for i in tensors)
        self._chunk_bytes = layout.chunk_bytes

    def pairs(
        self, ids: _Integers, places: _Integers, lengths: _Integers, per_chunk: int
    ) -> tuple[Addresses, Addresses, Addresses]:
        """Return the addresses and sizes of runs of ``lengths`` pages, tensor after tensor."""
        chunk, block = np.divmod(places, per_chunk)
        device = self._device_stride * ids
        device += self._device_base
        host = self._host_stride * block
        host += chunk * self._chunk_bytes
        host += self._host_base
        sizes = self._page_bytes * lengths
        return _flat(device), _flat(host), _flat(sizes)


def _column(values: object) -> _Integers:
    return np.array(list(values), dtype=np.int64).reshape(-1, 1)  # type: ignore[call-overload]


def _flat(numbers: _Integers) -> Addresses:
    return numbers.ravel().view(np.uint64)


def _joined(parts: Sequence[Addresses]) -> Addresses:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint64)


def _require_within(numbers: _Integers, count: int, what: str) -> None:
    if len(numbers) and not (numbers.min() >= 0 and numbers.max() < count):
        raise ValueError(
            f"{what} ids from {numbers.min()} to {numbers.max()} are out of range: there are {count}"
        )
