"""An index of an epoch's known chunks, which saves look-ups on the disk.

It has 64 bits of each chunk's key, in tables of the native library: 12 to 24 MB for a million chunks. The
library's threads add the chunks that they put or get.

It is a hint: other processes put and remove chunks too. So the answer is PRESENT or UNKNOWN, never ABSENT. A
wrong PRESENT costs one get that misses; then the chunk is forgotten.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from itertools import accumulate

from kvtier import _native as native
from kvtier.keys import OffloadKey


def ends_of(keys: Sequence[OffloadKey]) -> array[int]:
    """Return 0, then the end of each key in the joined keys: type code ``I``."""
    return array("I", accumulate(map(len, keys), initial=0))


class Index:
    """Fingerprints of known chunks. Any thread may call it."""

    def __init__(self) -> None:
        assert native.library is not None
        assert native.holding is not None
        self._library, self._holding = native.library, native.holding
        self.address = self._library.kvt_index_open()
        if not self.address:
            raise MemoryError("no memory for an index of chunks")

    def __del__(self) -> None:
        if self.address:
            self._library.kvt_index_close(self.address)

    def __len__(self) -> int:
        return int(self._library.kvt_index_count(self.address))

    def known(self, keys: Sequence[OffloadKey]) -> Sequence[int]:
        """Return for each key 1 if its chunk is in the index, else 0."""
        found, ends = bytearray(len(keys)), ends_of(keys)
        room = (ctypes.c_uint8 * len(keys)).from_buffer(found)
        ask = self._holding.kvt_index_known
        ask(self.address, b"".join(keys), ends.buffer_info()[0], len(keys), ctypes.addressof(room))
        return found

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        ends = ends_of(keys)
        self._library.kvt_index_set(self.address, b"".join(keys), ends.buffer_info()[0], len(keys), False)

    def add_listed(self, marks: array[int]) -> None:
        """Add fingerprints from ``chunk_files.fingerprints``."""
        self._library.kvt_index_add_marks(self.address, marks.buffer_info()[0], len(marks))
