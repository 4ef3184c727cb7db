"""Expected checksums of audited slots, carried along with each copy of a chunk.

Each area of each slot has a word, shared by the processes of an engine. The process that fills a slot sets
it: a worker after a store, from the bytes read back from its device; a tier's runner after a get, once the
seal was verified. The process that reads the slot compares: before a put, and after a load with the bytes
then in the device. So a chunk is never compared with another one of the same key: two engines may compute
different last bits for one key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntFlag

import crc32c

from kvtier._core.chunks import Chunk
from kvtier._core.messages import Command, Get
from kvtier._memory.region import Region
from kvtier._telemetry import damage_dump
from kvtier.keys import OffloadKey

_WORD_BYTES = 8
_KNOWN = 1 << 32
_CHECKSUM = _KNOWN - 1
_MIX_ID, _MIX_SLOT = 0x9E3779B1, 0x85EBCA6B


class Fault(IntFlag):
    """Damage that an audit can find."""

    SLOT = 1 << 33  # the slot no longer holds the bytes it was filled with
    COPY = 1 << 34  # the device and the slot hold different bytes


_FAULTS = Fault.SLOT | Fault.COPY


@dataclass(frozen=True, slots=True)
class SlotDamage:
    """A chunk that an audit has found damaged."""

    key: OffloadKey
    slot: int
    # The tier that the chunk was promoted from for this load. None if it was in the primary tier.
    origin: int | None
    fault: Fault

    @property
    def tier(self) -> int | None:
        """The tier at fault; None for the primary tier, which is also blamed for device copies."""
        return None if self.fault & Fault.COPY else self.origin

    def __str__(self) -> str:
        return f"{self.key.hex()} in slot {self.slot}"


def slot_checksums_bytes(slots: int, areas: int) -> int:
    return slots * areas * _WORD_BYTES


class SlotChecksums:
    """The words of all slots.

    One process at a time writes a word: the one that fills the slot, or the one that loads it. ``words`` has
    ``slot_checksums_bytes(slots, areas)`` bytes, zeros at first; the share ``rate`` of chunks is audited. If
    an area ``is_shared``, several workers write to it, and none knows its whole contents: after a store only
    device and slot are compared.
    """

    def __init__(
        self,
        memory: Region,
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
        self._memory = memory
        self._words = words.cast("B").cast("Q")

    @staticmethod
    def shared(
        region: Region, rate: float, areas: int, area_bytes: int, *, is_shared: bool = False
    ) -> SlotChecksums:
        """Return the checksums that all processes of a region share, at the end of its metadata."""
        words = region.metadata[-slot_checksums_bytes(region.slots, areas) :]
        return SlotChecksums(region, words, rate, areas, area_bytes, is_shared=is_shared)

    @staticmethod
    def private(memory: Region, rate: float, area_bytes: int) -> SlotChecksums:
        """Return checksums for this process alone, of slots with one area."""
        words = memoryview(bytearray(slot_checksums_bytes(memory.slots, 1)))
        return SlotChecksums(memory, words, rate, 1, area_bytes)

    # --- to fill a slot --------------------------------------------------------------------------

    def forget(self, slots: Sequence[int], area: int | None = None) -> None:
        """Clear the checksums of slots, or of one area of each, before they are filled."""
        words, areas = self._words, self.areas
        for part in range(areas) if area is None else (area,):
            for place in [slot * areas + part for slot in slots]:
                if words[place]:
                    words[place] &= _FAULTS

    def forget_promoted(self, commands: Iterable[Command]) -> None:
        """Clear the checksums of the slots of gets. Call it before these are submitted."""
        for command in commands:
            if isinstance(command, Get):
                self.forget(command.slots)

    def chosen(self, transfer_id: int, slots: Sequence[int]) -> list[int]:
        """Return the positions of the slots of a store to audit, which are equal in every worker."""
        bound = round(self.rate * (_CHECKSUM + 1))  # comparing integers is much faster
        seed = transfer_id * _MIX_ID
        return [at for at, slot in enumerate(slots) if (seed + slot * _MIX_SLOT) & _CHECKSUM < bound]

    def expect(self, slot: int, area: int, checksum: int) -> None:
        place = slot * self.areas + area
        self._words[place] = (self._words[place] & _FAULTS) | _KNOWN | checksum

    def record_checksums(self, slots: Iterable[int]) -> None:
        """Set the checksums of slots from their content, which was promoted with a verified seal."""
        for slot in slots:
            for area in range(self.areas):
                self.expect(slot, area, crc32c.crc32c(self.view(slot, area)))

    # --- to read a slot --------------------------------------------------------------------------

    def view(self, slot: int, area: int) -> memoryview:
        return self._memory.view(slot)[area * self.area_bytes :][: self.area_bytes]

    def expected(self, slot: int, area: int) -> int | None:
        """Return the expected checksum of an area; None if it is not audited."""
        word = self._words[slot * self.areas + area]
        return word & _CHECKSUM if word & _KNOWN else None

    def audited(self, slots: Sequence[int], area: int = 0) -> list[int]:
        """Return the positions of the slots with a checksum for this area."""
        words, areas = self._words, self.areas
        return [at for at, slot in enumerate(slots) if words[slot * areas + area] & _KNOWN]

    def are_intact(self, chunks: Sequence[tuple[OffloadKey, int]]) -> bool:
        """Return whether these chunks' slots match their checksums; keep evidence of those that do not."""
        return all([self._is_intact(key, slot, area) for key, slot in chunks for area in range(self.areas)])

    def _is_intact(self, key: OffloadKey, slot: int, area: int) -> bool:
        content = self.view(slot, area)
        expected, found = self.expected(slot, area), crc32c.crc32c(content)
        if expected is None or found == expected:
            return True
        facts = {"key": key.hex(), "slot": slot, "area": area, "expected": expected, "found": found}
        damage_dump.write("a chunk has changed in the primary tier", facts, slot=content)
        return False

    def blame(self, slot: int, area: int, fault: Fault) -> None:
        self._words[slot * self.areas + area] |= fault

    def take_damage(self, chunks: Sequence[Chunk], origins: Sequence[int | None]) -> list[SlotDamage]:
        """Return and clear the findings of audits in the slots of these chunks."""
        damage = [
            SlotDamage(chunk.key, chunk.slot, origin, self.take_fault(chunk.slot))
            for chunk, origin in zip(chunks, origins, strict=True)
        ]
        return [it for it in damage if it.fault]

    def take_fault(self, slot: int) -> Fault:
        """Return and clear the findings of audits in a slot."""
        words, found = self._words, Fault(0)
        for place in range(slot * self.areas, (slot + 1) * self.areas):
            found |= Fault(words[place] & _FAULTS)
            words[place] &= ~_FAULTS
        return found
