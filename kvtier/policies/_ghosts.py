"""Records of evicted chunks: a number each, in a table of fixed size."""

from __future__ import annotations

from array import array

from kvtier.keys import OffloadKey

RECORD_BITS = 48
_RECORD = (1 << RECORD_BITS) - 1
_TAG = 0xFFFF
_GROUP_BITS = 32  # the end of a key, after its hash
_SEGMENT_BITS = 14
_SEGMENT = 1 << _SEGMENT_BITS
_KEY_BYTES = 12  # The group, and as many bytes of the hash as make keys distinct.


class Ghosts:
    """A direct-mapped table: each key has one place, and the next key for that place overwrites it.

    So forgetting is free, while trimming a dict of a million keys takes 50 ms in one call. One in 65,536 keys
    that were never remembered is mistaken for another key. Segments are made at their first write.
    """

    __slots__ = ("_places", "_segments")

    def __init__(self) -> None:
        self._places = 1
        self._segments: list[array[int] | None] = [None]

    def resize(self, places: int) -> None:
        """Set the number of places for keys; forget all keys if it changes."""
        if places | 1 != self._places:
            self._places = places | 1
            self.clear()

    def clear(self) -> None:
        self._segments = [None] * ((self._places >> _SEGMENT_BITS) + 1)

    def remember(self, key: OffloadKey, record: int) -> None:
        """Remember a record of ``key``, of at most ``RECORD_BITS``."""
        number = int.from_bytes(key[-_KEY_BYTES:], "big")
        place = number % self._places
        segment = self._segments[place >> _SEGMENT_BITS]
        if segment is None:
            segment = self._segments[place >> _SEGMENT_BITS] = array("Q", bytes(8 * _SEGMENT))
        segment[place % _SEGMENT] = (number >> _GROUP_BITS & _TAG) << RECORD_BITS | record

    def recall(self, key: OffloadKey) -> int:
        """Return the record of ``key``; 0 if none is remembered."""
        number = int.from_bytes(key[-_KEY_BYTES:], "big")
        place = number % self._places
        segment = self._segments[place >> _SEGMENT_BITS]
        if segment is None:
            return 0
        found = segment[place % _SEGMENT]
        return found & _RECORD if found >> RECORD_BITS == number >> _GROUP_BITS & _TAG else 0
