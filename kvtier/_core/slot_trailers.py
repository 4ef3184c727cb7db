"""Trailers of slots in shared memory. The next engine verifies the chunks of this one with them.

The entry of a slot has the trailer of its chunk, which proves key, identity and bytes, and numbers from one
clock. The scheduler numbers each filling of a slot before it begins. The tier process writes the trailer
while the chunk is pinned, and then the number of the filling that it is about. So an entry is valid if both
numbers agree. After a reset no entry of the engine is valid any more, because its weights may differ from
those that the next engine loads. The tier process marks a chunk as verified with that number, too.

Each number is eight aligned bytes, written at once by one process. A process that is killed leaves an entry
valid or void.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

_WORD_BYTES = 8
_TRAILER_BYTES = 128
_HEADER_WORDS = 2
_CLOCK, _VOID = 0, 1  # words of the header: the clock, and the last number whose entries are void: 0 or _ALL
_ALL = 2**64 - 1
_FILLED, _WRITTEN, _USED, _VERIFIED = 0, 1, 2, 3  # words of an entry, before its trailer
_TRAILER = 4
_ENTRY_WORDS = _TRAILER + _TRAILER_BYTES // _WORD_BYTES


def slot_trailers_bytes(slots: int) -> int:
    return (_HEADER_WORDS + slots * _ENTRY_WORDS) * _WORD_BYTES


class SlotTrailers:
    """The entries of all slots: the first ``slot_trailers_bytes(slots)`` bytes of a region's metadata.

    Zeros are a table without valid entries.
    """

    def __init__(self, metadata: memoryview, slots: int) -> None:
        self.slots = slots
        self._bytes = metadata[: slot_trailers_bytes(slots)].cast("B")
        self._words = self._bytes.cast("Q")

    # --- the scheduler ---------------------------------------------------------------------------

    def fill(self, slots: Collection[int]) -> None:
        """Void the entries of slots that are about to be filled, and number the filling."""
        words, now = self._words, self._tick()
        for slot in slots:
            at = _HEADER_WORDS + slot * _ENTRY_WORDS
            words[at + _FILLED] = words[at + _USED] = now

    def use(self, slots: Collection[int]) -> None:
        """Note that the chunks of slots are used now."""
        words, now = self._words, self._tick()
        for slot in slots:
            words[_HEADER_WORDS + slot * _ENTRY_WORDS + _USED] = now

    def drop(self, slots: Collection[int]) -> None:
        """Void the entries of slots until these are filled again."""
        for slot in slots:
            self._words[_HEADER_WORDS + slot * _ENTRY_WORDS + _FILLED] = 0

    def reset(self) -> None:
        """Void all entries, also those that this engine is still to write."""
        self._words[_VOID] = _ALL

    def adopt(self) -> list[tuple[int, bytes]]:
        """Return what ``complete`` does, for a new engine, which has verified none of the chunks."""
        entries = self._words[_HEADER_WORDS:]
        if self._words[_VOID]:  # clear them first: this engine may be killed, too
            entries[:] = memoryview(bytes(entries.nbytes)).cast("Q")
            self._words[_VOID] = 0
        marks = entries[_VERIFIED::_ENTRY_WORDS]
        marks[:] = memoryview(bytes(marks.nbytes)).cast("Q")
        return self.complete()

    def is_verified(self, slot: int) -> bool:
        """Return whether the bytes of a slot were verified since it was filled, and no reset came since."""
        at = _HEADER_WORDS + slot * _ENTRY_WORDS
        return self._words[at + _VERIFIED] == self._words[at + _FILLED] > self._words[_VOID]

    def complete(self) -> list[tuple[int, bytes]]:
        """Return slots and trailers of the valid entries, the least recently used first."""
        words, void = self._words, self._words[_VOID]
        found: list[tuple[int, int]] = []
        for slot, at in enumerate(range(_HEADER_WORDS, len(words), _ENTRY_WORDS)):
            if words[at + _FILLED] == words[at + _WRITTEN] > void:
                found.append((words[at + _USED], slot))
        return [(slot, self.read(slot)) for _, slot in sorted(found)]

    def _tick(self) -> int:
        self._words[_CLOCK] = now = self._words[_CLOCK] + 1
        return now

    # --- the tier process ------------------------------------------------------------------------

    def write(self, slot: int, trailer: bytes) -> None:
        """Write the trailer of a slot's chunk, which is pinned."""
        at = _HEADER_WORDS + slot * _ENTRY_WORDS
        filled, start = self._words[at + _FILLED], (at + _TRAILER) * _WORD_BYTES
        self._bytes[start : start + _TRAILER_BYTES] = trailer
        self._words[at + _WRITTEN] = self._words[at + _VERIFIED] = filled

    def unverified(self) -> list[int]:
        """Return the slots of valid entries whose chunks are not verified, the most recently used first."""
        return [slot for slot, _ in reversed(self.complete()) if not self.is_verified(slot)]

    def verify(self, slot: int, is_whole: Callable[[bytes], bool]) -> bool:
        """Mark the chunk of a valid entry as verified if ``is_whole`` returns so of its trailer.

        Returns whether it is marked. The slot need not be pinned: a filling in between voids the mark.
        """
        at = _HEADER_WORDS + slot * _ENTRY_WORDS
        filled = self._words[at + _FILLED]
        if filled != self._words[at + _WRITTEN] or not is_whole(self.read(slot)):
            return False
        self._words[at + _VERIFIED] = filled
        return True

    def read(self, slot: int) -> bytes:
        start = (_HEADER_WORDS + slot * _ENTRY_WORDS + _TRAILER) * _WORD_BYTES
        return bytes(self._bytes[start : start + _TRAILER_BYTES])
