"""Turns blocks and slots into a list of copies, with adjacent ones merged. No Python code runs per page."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvtier._device.base import Blocks, KVCaches, PageRef
from kvtier._memory.layout import SlotLayout

Addresses = npt.NDArray[np.uint64]
_Integers = npt.NDArray[np.int64]
_Pairs = tuple[Addresses, Addresses, Addresses]
_Axis = tuple[slice | None, slice | None]
_DOWN: _Axis = (slice(None), None)
_ACROSS: _Axis = (None, slice(None))


@dataclass(frozen=True, eq=False)
class CopyPlan:
    """Copies to make, in any order: ``sizes[i]`` bytes from ``src[i]`` to ``dst[i]``. Contiguous arrays."""

    src: Addresses
    dst: Addresses
    sizes: Addresses
    host: tuple[int, int] = (0, 2**64)  # start and end of memory that holds the slots

    @cached_property
    def nbytes(self) -> int:
        return int(self.sizes.sum())


def split(plan: CopyPlan, most: int) -> CopyPlan:
    """Return the plan with each copy in pieces of at most ``most`` bytes."""
    pieces = -(-plan.sizes.view(np.int64) // most)
    if not len(pieces) or int(pieces.max()) == 1:
        return plan
    copy = np.repeat(np.arange(len(pieces)), pieces)
    first = np.repeat(np.cumsum(pieces) - pieces, pieces)
    done = ((np.arange(len(copy)) - first) * most).view(np.uint64)
    sizes = np.minimum(plan.sizes[copy] - done, np.uint64(most))
    return CopyPlan(plan.src[copy] + done, plan.dst[copy] + done, sizes)


class CopyPlanner:
    """Makes the copy plans of one worker; it reads the addresses of the tensors once, now.

    ``address`` is slot 0's address for the copying device. No copy crosses from one piece of ``piece_slots``
    slots into the next; None: all slots are one piece. ValueError if the page sizes differ.
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
                f"page sizes differ: the tensors' are {kv_caches.page_bytes}, "
                f"the layout's {layout.page_bytes}"
            )
        self._blocks_per_chunk = layout.blocks_per_chunk
        self._state_groups = kv_caches.state_groups
        self._slots, self._address, self._chunk_bytes = slots, address, layout.chunk_bytes
        piece = slots if piece_slots is None else piece_slots
        self._groups = [_Group(kv_caches, refs, layout, address, piece) for refs in kv_caches.groups]

    def store(self, blocks: Blocks, slots: Sequence[int]) -> CopyPlan:
        """Plan the copies from ``blocks`` to ``slots``, of the pages that this worker writes.

        ValueError if a chunk lacks blocks, because every byte that a load may read has to be written. Also if
        the number of groups or slots does not fit, or a block or slot is out of range.
        """
        width = self._blocks_per_chunk
        if not all(blocks.whole_chunks(blocks.slots_needed(width), width, self._state_groups)[1]):
            raise ValueError(f"a store needs all {width} blocks of each chunk")
        device, host, sizes = self._pairs(blocks, slots, to_write=True)
        return CopyPlan(device, host, sizes, self._memory_of(slots))

    def load(self, slots: Sequence[int], blocks: Blocks) -> CopyPlan:
        """Plan the copies from ``slots`` to ``blocks``, of all pages. Raises the errors of ``store``."""
        device, host, sizes = self._pairs(blocks, slots, to_write=False)
        return CopyPlan(host, device, sizes, self._memory_of(slots))

    def _memory_of(self, slots: Sequence[int]) -> tuple[int, int]:
        first, end = min(slots, default=0), max(slots, default=0) + 1
        return self._address + first * self._chunk_bytes, self._address + end * self._chunk_bytes

    def _pairs(self, blocks: Blocks, slots: Sequence[int], *, to_write: bool) -> _Pairs:
        """Return the addresses of the pages in the tensors, those in the slots, and the sizes."""
        slot_ids = np.asarray(slots, dtype=np.int64)
        needed = self._check(blocks, slot_ids)
        parts, first_id, first_slot = [], 0, 0
        for group, size, first, count in zip(
            self._groups, blocks.group_sizes, blocks.first_indices, needed, strict=True
        ):
            if size:
                ids = blocks.ids[first_id : first_id + size]
                parts += group.pairs(ids, slot_ids[first_slot : first_slot + count], first, to_write)
            first_id += size
            first_slot += count
        if len(parts) == 1:
            return parts[0]
        none = np.empty(0, dtype=np.uint64)
        device, host, sizes = (np.concatenate(column) for column in zip((none,) * 3, *parts, strict=True))
        return device, host, sizes

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
    """Finds the pages of one group's blocks, in its tensors and in slots."""

    def __init__(
        self, caches: KVCaches, refs: Sequence[PageRef], layout: SlotLayout, address: int, piece_slots: int
    ) -> None:
        used = _distinct(refs)
        self._blocks_per_chunk = layout.blocks_per_chunk
        sizes = (caches.tensors[ref.tensor].shape[0] for ref in used)
        self._num_blocks = min(sizes, default=sys.maxsize)  # another pipeline stage has all layers of a group
        # A tensor's pages in the next slot follow directly only if slots hold pages of that tensor alone.
        slots_join = layout.chunk_bytes == layout.worker_bytes and len(layout.page_bytes) == 1
        joined_blocks = layout.blocks_per_chunk * (piece_slots if slots_join else 1)
        dense = [ref for ref in used if _is_dense(caches, ref, layout)]
        shared = [ref for ref in dense if _is_shared(ref)]
        own = [ref for ref in dense if ref not in shared]
        others = [ref for ref in used if ref not in dense]
        self._pages = [
            _Pages(caches, refs, layout, address, blocks)
            for refs, blocks in ((own, joined_blocks), (shared, joined_blocks), (others, 1))
            if refs
        ]

    def pairs(self, ids: _Integers, slots: _Integers, first: int, to_write: bool) -> list[_Pairs]:
        per_chunk = self._blocks_per_chunk
        _require_within(ids, self._num_blocks, "block")
        places = np.arange(first % per_chunk, first % per_chunk + len(ids))  # row index of the slots' blocks
        chunk, block = np.divmod(places, per_chunk)
        places = slots[chunk] * per_chunk + block
        return [pages.pairs(ids, places, to_write) for pages in self._pages]


class _Pages:
    """Pages that are copied alike, as arrays with one number for each piece of a page in a tensor.

    Pages in several pieces are copied block by block, others tensor by tensor. The pieces of a page are close
    together, and small copies that jump through memory are several times slower. Neighbours are joined up to
    a multiple of ``joined_blocks`` places; 1 if the pages of neighbours have bytes between them.
    """

    def __init__(
        self, caches: KVCaches, refs: Sequence[PageRef], layout: SlotLayout, address: int, joined_blocks: int
    ) -> None:
        pieces = [_pieces(ref) for ref in refs]
        tensors = [caches.tensors[ref.tensor] for ref in refs]
        counts = [len(rows) for rows in pieces]

        def of_pieces(numbers: Iterable[int]) -> _Integers:
            return np.repeat(np.array([*numbers], dtype=np.int64), counts)

        in_page, in_slot, self._sizes = np.ascontiguousarray(np.concatenate(pieces).T)
        self._device_base = of_pieces(tensor.data_ptr() for tensor in tensors) + in_page
        self._device_stride = of_pieces(tensor.stride(0) for tensor in tensors)
        self._host_base = of_pieces(address + layout.tensor_offsets[ref.tensor] for ref in refs) + in_slot
        self._host_stride = of_pieces(layout.page_bytes[ref.tensor] for ref in refs)
        # Copy pages in several pieces block by block: see above.
        self._pieces, self._blocks = (_ACROSS, _DOWN) if max(counts) > 1 else (_DOWN, _ACROSS)
        self._chunk_bytes = layout.chunk_bytes
        self._blocks_per_chunk = layout.blocks_per_chunk
        self._joined_blocks = joined_blocks
        self._is_shared = any(map(_is_shared, refs))
        mappings = [ref.mapping for ref in refs]
        self._writers = of_pieces(1 if mapping is None else mapping.writers for mapping in mappings)
        self._writer = of_pieces(0 if mapping is None else mapping.writer for mapping in mappings)

    def pairs(self, ids: _Integers, places: _Integers, to_write: bool) -> _Pairs:
        """Return the addresses and sizes of the pages of blocks; for a store, only those to write."""
        lengths = np.ones_like(ids)
        takes_turns = to_write and self._is_shared  # adjacent pages have different writers
        if self._joined_blocks > 1 and len(ids) and not takes_turns:
            starts = self._run_starts(ids, places)
            lengths = np.diff(starts, append=len(ids))
            ids, places = ids[starts], places[starts]
        chunk, block = np.divmod(places, self._blocks_per_chunk)
        pieces, blocks = self._pieces, self._blocks
        device = self._device_stride[pieces] * ids[blocks]
        device += self._device_base[pieces]
        host = self._host_stride[pieces] * block[blocks]
        host += (chunk * self._chunk_bytes)[blocks]
        host += self._host_base[pieces]
        sizes = self._sizes[pieces] * lengths[blocks]
        if takes_turns:
            own = places[blocks] % self._writers[pieces] == self._writer[pieces]
            device, host, sizes = device[own], host[own], sizes[own]
        return device.ravel().view(np.uint64), host.ravel().view(np.uint64), sizes.ravel().view(np.uint64)

    def _run_starts(self, ids: _Integers, places: _Integers) -> _Integers:
        """Return the starts of runs of blocks that are adjacent in the tensors and in the slots."""
        breaks = np.empty(len(ids), dtype=np.bool_)
        breaks[0] = True
        np.logical_or(ids[1:] - ids[:-1] != 1, places[1:] - places[:-1] != 1, out=breaks[1:])
        breaks |= places % self._joined_blocks == 0
        return np.flatnonzero(breaks)


def _distinct(refs: Sequence[PageRef]) -> list[PageRef]:
    """Return one reference per tensor, because a tensor that a group names twice is copied once."""
    used: dict[int, PageRef] = {}
    for ref in refs:
        other = used.setdefault(ref.tensor, ref)
        if other.mapping != ref.mapping:
            raise ValueError(f"a group maps its pages of tensor {ref.tensor} in two ways")
        if ref.page_bytes > other.page_bytes:
            used[ref.tensor] = ref
    return list(used.values())


def _pieces(ref: PageRef) -> _Integers:
    if ref.mapping is None:
        return np.array([[0, 0, ref.page_bytes]], dtype=np.int64)
    return ref.mapping.pieces()


def _is_dense(caches: KVCaches, ref: PageRef, layout: SlotLayout) -> bool:
    """Return whether consecutive blocks have adjacent bytes, both in the tensor and in a slot."""
    whole = ref.page_bytes == layout.page_bytes[ref.tensor] == caches.tensors[ref.tensor].stride(0)
    return whole and len(_pieces(ref)) == 1


def _is_shared(ref: PageRef) -> bool:
    """Return whether several workers hold the page and share the writes to it."""
    return ref.mapping is not None and ref.mapping.writers > 1


def _require_within(numbers: _Integers, count: int, what: str) -> None:
    if len(numbers) and not (numbers.min() >= 0 and numbers.max() < count):
        raise ValueError(
            f"{what} ids from {numbers.min()} to {numbers.max()} are out of range: there are {count}"
        )
