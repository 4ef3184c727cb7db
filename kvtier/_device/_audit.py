"""Audits: after a copy, the device's bytes are read back and compared with the slot and its checksum.

They are read in the simplest way, copy by copy and in the order of a single chunk, so that an error in the
method of the real copies becomes visible. Blocks of a store are also read before its copies: if the engine
writes to them meanwhile, the copy is not at fault, but the chunk cannot be trusted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import crc32c
import numpy as np
import numpy.typing as npt

from kvtier._device.base import Audits, Blocks
from kvtier._device.plan import Addresses, CopyPlan, CopyPlanner
from kvtier._memory.layout import SlotLayout
from kvtier._memory.slot_checksums import Fault, SlotChecksums
from kvtier._telemetry import damage_dump
from kvtier.errors import AuditError, BlocksChangedError, DamagedSlotError

_Bytes = npt.NDArray[np.uint8]
_MEANING = {
    Fault.SLOT: (DamagedSlotError, "a chunk has changed in the primary tier"),
    Fault.COPY: (AuditError, "a copy between the device and the primary tier has brought other bytes"),
}

Check = Callable[[], Iterator[None]]
"""Audits one transfer, in the thread of a queue. It runs to its yield before the copies start, when the
blocks are computed, and to its end when the copies have ended. Raises AuditError or BlocksChangedError."""

_Audit = Callable[[int, Blocks], Iterator[None]]  # the same for the chunk in a slot


class Auditor:
    """Audits transfers between the device and the slots of the given checksums and planner.

    ``read`` copies from the device to memory of this process, and returns when the copies are done.
    """

    def __init__(
        self,
        slot_checksums: SlotChecksums,
        planner: CopyPlanner,
        layout: SlotLayout,
        read: Callable[[CopyPlan], None],
    ) -> None:
        self._slot_checksums = slot_checksums
        self._planner = planner
        self._width = layout.blocks_per_chunk
        self._area = layout.rank
        self._read = read
        self._scratch = threading.local()
        self._lock = threading.Lock()
        # for each slot with a checksum, the checksum and its number of loads
        self._loads: dict[int, tuple[int | None, int]] = {}
        self.audits = Audits()

    def of_store(self, transfer_id: int, blocks: Blocks, slots: Sequence[int]) -> Check | None:
        """Return the check of a store, or None if none of its chunks is audited."""
        self._slot_checksums.forget(slots, self._area)
        positions = self._slot_checksums.chosen(transfer_id, slots)
        return self._check(self._audit_store, blocks, slots, positions)

    def of_load(self, transfer_id: int, slots: Sequence[int], blocks: Blocks) -> Check | None:
        """Return the check of a load, or None if none of its chunks is audited.

        Loads of a chunk with a checksum are audited if they are chosen, else the 1st, 2nd, 4th, 8th and so
        on. Auditing every load of a chunk would slow all requests that load it.
        """
        known = self._slot_checksums.audited(slots, self._area)
        is_shared = self._slot_checksums.is_shared
        chosen = self._slot_checksums.chosen(transfer_id, slots) if known or is_shared else []
        due = [at for at in known if self._is_due(slots[at]) or at in chosen]
        return self._check(self._audit_load, blocks, slots, sorted({*due, *chosen}) if is_shared else due)

    def _is_due(self, slot: int) -> bool:
        """Count a load of a slot with a checksum; return whether the loads so far are a power of two."""
        checksum = self._slot_checksums.expected(slot, self._area)
        counted, loads = self._loads.get(slot, (None, 0))
        loads = loads + 1 if counted == checksum else 1
        self._loads[slot] = checksum, loads
        return loads & (loads - 1) == 0

    def _check(self, audit: _Audit, blocks: Blocks, slots: Sequence[int], at: Sequence[int]) -> Check | None:
        chunks = list(_chunks(blocks, self._width)) if at else []

        def check() -> Iterator[None]:
            audits = [audit(slots[position], chunks[position]) for position in at]
            for one in audits:
                next(one)
            yield
            for one in audits:
                next(one, None)

        return check if at else None

    def _audit_store(self, slot: int, chunk: Blocks) -> Iterator[None]:
        plan = self._planner.store(chunk, [slot])
        before = self._read_checksum(slot, plan)
        yield
        held, read = self._read_back(slot, plan.src, plan.dst, plan)
        if self._read_checksum(slot, plan) != before:
            raise BlocksChangedError(f"the engine wrote to blocks while they were copied to slot {slot}")
        self._require(slot, held, read, None)
        if not self._slot_checksums.is_shared:
            self._slot_checksums.expect(slot, self._area, crc32c.crc32c(read.data))

    def _audit_load(self, slot: int, chunk: Blocks) -> Iterator[None]:
        yield
        plan = self._planner.load([slot], chunk)
        held, read = self._read_back(slot, plan.dst, plan.src, plan)
        self._require(slot, held, read, self._slot_checksums.expected(slot, self._area))

    def _read_checksum(self, slot: int, plan: CopyPlan) -> int:
        """Read the pages that a store copies to a slot from the device; return their checksum."""
        area = np.frombuffer(self._slot_checksums.view(slot, self._area), dtype=np.uint8)
        read = np.zeros_like(area)
        self._read(CopyPlan(plan.src, _moved(plan.dst, area, read), plan.sizes))
        return crc32c.crc32c(read.data)

    def _read_back(
        self, slot: int, device: Addresses, host: Addresses, plan: CopyPlan
    ) -> tuple[_Bytes, _Bytes]:
        """Return this worker's bytes in the slot, and a copy with those read back from the device."""
        if not hasattr(self._scratch, "bytes"):
            self._scratch.bytes = np.empty((2, self._slot_checksums.area_bytes), dtype=np.uint8)
        held, read = self._scratch.bytes
        area = np.frombuffer(self._slot_checksums.view(slot, self._area), dtype=np.uint8)
        held[:] = area
        read[:] = held  # Not the area itself, because other workers may write to it meanwhile.
        self._read(CopyPlan(device, _moved(host, area, read), plan.sizes))
        return held, read

    def _require(self, slot: int, held: _Bytes, read: _Bytes, expected: int | None) -> None:
        """Raise AuditError and keep evidence if the bytes do not match the checksum."""
        found = crc32c.crc32c(held.data) if expected is not None else None
        fault = Fault.SLOT if found != expected else Fault(0)
        if not fault and not np.array_equal(held, read):
            fault = Fault.COPY
        with self._lock:
            self.audits = Audits(self.audits.chunks + 1, self.audits.failed + bool(fault))
        if fault:
            kind, text = _MEANING[fault]
            self._slot_checksums.blame(slot, self._area, fault)
            facts = {"slot": slot, "area": self._area, "expected": expected, "found": found}
            facts["of_device"] = crc32c.crc32c(read.data)
            damage_dump.write(text, facts, slot=held.tobytes(), device=read.tobytes())
            raise kind(f"{text} (slot {slot})")


def _moved(addresses: Addresses, area: _Bytes, to: _Bytes) -> Addresses:
    """Return the corresponding addresses in another area."""
    return addresses - np.uint64(area.ctypes.data) + np.uint64(to.ctypes.data)


def _chunks(blocks: Blocks, width: int) -> Iterator[Blocks]:
    """Yield the blocks of each chunk alone, in the order of the slots."""
    groups = len(blocks.group_sizes)
    start = 0
    for group, (size, first) in enumerate(zip(blocks.group_sizes, blocks.first_indices, strict=True)):
        index, end = first, first + size
        while index < end:
            stop = min(end, (index // width + 1) * width)
            ids = blocks.ids[start + index - first : start + stop - first]
            sizes, firsts = [0] * groups, [0] * groups
            sizes[group], firsts[group] = stop - index, index
            yield Blocks(ids, tuple(sizes), tuple(firsts))
            index = stop
        start += size
