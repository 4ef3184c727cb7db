"""What audited slots must hold: checksums that are handed on from copy to copy, with the chunk itself.

For each area of each slot there is a word, shared by the processes of an engine. Whoever brings a chunk into
a slot says there what it must hold: the worker, when it has stored it, by the bytes that it has read from its
device; whoever got it from a tier, by the bytes that the seal has proven. Whoever takes it from there
compares: before a put, and after a load by the bytes that are in the device then.

So a chunk is never compared with another one of the same key: what two engines compute for one key may
differ in its last bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import Protocol

import crc32c

from kvtier.core.chunks import Chunk
from kvtier.core.messages import Command, Fetch
from kvtier.errors import StateError
from kvtier.keys import OffloadKey
from kvtier.memory.region import Region
from kvtier.telemetry import evidence

_WORD_BYTES = 8
_KNOWN = 1 << 32
_CHECKSUM = _KNOWN - 1
_MIX_ID, _MIX_SLOT = 0x9E3779B1, 0x85EBCA6B


class Fault(IntFlag):
    """What an audit can find."""

    SLOT = 1 << 33  # the slot does not hold any more what was brought into it
    COPY = 1 << 34  # the device does not hold what the slot does


_FAULTS = Fault.SLOT | Fault.COPY


@dataclass(frozen=True, slots=True)
class Damage:
    """A chunk that an audit has found damaged.

    Attributes:
        key: its key.
        slot: where it is.
        origin: the tier that it was brought from for this load, None where it was there.
        fault: what is wrong.
    """

    key: OffloadKey
    slot: int
    origin: int | None
    fault: Fault

    @property
    def tier(self) -> int | None:
        """The tier that is at fault. None for the primary one, which a copy of the device is a part of."""
        return None if self.fault & Fault.COPY else self.origin

    def __str__(self) -> str:
        """Say where, for the log."""
        return f"{self.key.hex()} in slot {self.slot}"

    def keep_evidence(self, tier: str) -> None:
        """Keep what a worker does not know, beside the bytes that it has kept. Does not wait."""
        facts = {"key": self.key.hex(), "slot": self.slot, "tier": tier, "origin": self.origin}
        evidence.keep_soon("an audit has found a chunk damaged", facts)


class Slots(Protocol):
    """The slots, as a region has them."""

    slots: int

    def view(self, slot: int) -> memoryview:
        """Return the bytes of one slot."""


def slot_checksums_bytes(slots: int, areas: int) -> int:
    """Return how many bytes the words of so many slots take."""
    return slots * areas * _WORD_BYTES


class SlotChecksums:
    """The words of all slots.

    A word is written by one process at a time: by whoever fills the slot, and by whoever loads it.

    Args:
        region: the slots.
        words: ``slot_checksums_bytes(slots, areas)`` bytes, zeros at first.
        rate: share of chunks that are audited, 0 to 1.
        areas: areas of a slot.
        area_bytes: length of an area.
        is_shared: whether several workers write to an area. None of them knows then what it must hold:
            of a store, only that the device and the slot hold the same is checked.

    Attributes:
        areas, area_bytes, is_shared, rate: as above.
    """

    def __init__(
        self,
        region: Slots,
        words: memoryview,
        rate: float,
        areas: int,
        area_bytes: int,
        *,
        is_shared: bool = False,
    ) -> None:
        self.rate = rate
        self.areas = areas
        self.area_bytes = area_bytes
        self.is_shared = is_shared
        self._region = region
        self._words = words.cast("B").cast("Q")

    @staticmethod
    def private(region: Slots, rate: float, area_bytes: int) -> SlotChecksums:
        """Make one of this process alone, for slots of one area."""
        return SlotChecksums(
            region, memoryview(bytearray(slot_checksums_bytes(region.slots, 1))), rate, 1, area_bytes
        )

    def offset_in(self, region: Region) -> int:
        """Return where the words are in a region's metadata, in bytes.

        Raises:
            StateError: they are elsewhere.
        """
        words = self._words.cast("B")
        address = ctypes.addressof(ctypes.c_char.from_buffer(words))
        offset = address - region.address - region.nbytes
        if not 0 <= offset <= len(region.metadata) - len(words):
            raise StateError("what audited slots must hold is not shared with other processes")
        return offset

    # --- who fills a slot ------------------------------------------------------------------------

    def forget(self, slots: Sequence[int], area: int | None = None) -> None:
        """Learn that slots, or an area of each of them, are about to be filled with something else."""
        words, areas = self._words, self.areas
        for part in range(areas) if area is None else (area,):
            for place in [slot * areas + part for slot in slots]:
                if words[place]:
                    words[place] &= _FAULTS

    def forget_fetched(self, commands: Iterable[Command]) -> None:
        """Forget the slots that are lent to fetches. By whoever submits them, before."""
        for command in commands:
            if isinstance(command, Fetch):
                self.forget(command.slots)

    def chosen(self, transfer_id: int, slots: Sequence[int]) -> list[int]:
        """Return the positions of the slots to audit of a store: the same ones in every worker."""
        bound = round(self.rate * (_CHECKSUM + 1))  # of integers the comparison is much faster
        seed = transfer_id * _MIX_ID
        return [at for at, slot in enumerate(slots) if (seed + slot * _MIX_SLOT) & _CHECKSUM < bound]

    def expect(self, slot: int, area: int, checksum: int) -> None:
        """Say what an area must hold from now on."""
        place = slot * self.areas + area
        self._words[place] = (self._words[place] & _FAULTS) | _KNOWN | checksum

    def take_over(self, slots: Iterable[int]) -> None:
        """Say that slots must hold what they hold now: a tier has filled them, and that was proven."""
        for slot in slots:
            for area in range(self.areas):
                self.expect(slot, area, crc32c.crc32c(self.view(slot, area)))

    # --- who takes what is there -----------------------------------------------------------------

    def view(self, slot: int, area: int) -> memoryview:
        """Return the bytes of one area of a slot."""
        return self._region.view(slot)[area * self.area_bytes :][: self.area_bytes]

    def expected(self, slot: int, area: int) -> int | None:
        """Return the checksum of what an area must hold; None where it is not audited."""
        word = self._words[slot * self.areas + area]
        return word & _CHECKSUM if word & _KNOWN else None

    def audited(self, slots: Sequence[int], area: int = 0) -> list[int]:
        """Return the positions of those slots of which it is known what this area must hold."""
        words, areas = self._words, self.areas
        return [at for at, slot in enumerate(slots) if words[slot * areas + area] & _KNOWN]

    def are_intact(self, chunks: Sequence[tuple[OffloadKey, int]]) -> bool:
        """Say whether the slots of these keys hold what they must; keep evidence of what does not."""
        return all([self._is_intact(key, slot, area) for key, slot in chunks for area in range(self.areas)])

    def _is_intact(self, key: OffloadKey, slot: int, area: int) -> bool:
        content = self.view(slot, area)
        expected, found = self.expected(slot, area), crc32c.crc32c(content)
        if expected is None or found == expected:
            return True
        facts = {"key": key.hex(), "slot": slot, "area": area, "expected": expected, "found": found}
        evidence.keep("a chunk has changed in the primary tier", facts, slot=content)
        return False

    def blame(self, slot: int, area: int, fault: Fault) -> None:
        """Note what an audit has found."""
        self._words[slot * self.areas + area] |= fault

    def take_damage(self, chunks: Sequence[Chunk], origins: Sequence[int | None]) -> list[Damage]:
        """Return what audits have found in the slots of these chunks since this was last asked."""
        damage = [
            Damage(chunk.key, chunk.slot, origin, self.take_fault(chunk.slot))
            for chunk, origin in zip(chunks, origins, strict=True)
        ]
        return [it for it in damage if it.fault]

    def take_fault(self, slot: int) -> Fault:
        """Return what audits have found in a slot since this was last asked."""
        words, found = self._words, Fault(0)
        for place in range(slot * self.areas, (slot + 1) * self.areas):
            found |= Fault(words[place] & _FAULTS)
            words[place] &= ~_FAULTS
        return found
