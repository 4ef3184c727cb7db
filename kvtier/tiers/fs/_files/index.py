"""What an opener knows of an epoch's chunks without asking the disk.

A chunk is known by 64 bits of its key. The native helper keeps them in tables of its own, which the
threads that have put or got chunks note them in, without the interpreter: 12 to 24 MB for a million
chunks. Without it they are in a set, some 70 MB.

It is a hint: another process may have removed what is in it, and may have put what is not.
So it says PRESENT or UNKNOWN, and not ABSENT. A wrong PRESENT costs one get that finds nothing; then
the chunk is forgotten here.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from kvtier import _native as native
from kvtier.keys import GROUP_BYTES, OffloadKey

_GOLDEN: Final = 0x9E3779B97F4A7C15
_WORD: Final = (1 << 64) - 1
# The largest prime below 2**64: every byte of a hash counts, or numbers would collide.
_PRIME: Final = (1 << 64) - 59


def fingerprint(key: OffloadKey) -> int:
    """Return 64 bits that stand for a key. The native helper makes the same from a file's name."""
    spread = int.from_bytes(key[-GROUP_BYTES:], "big") * _GOLDEN & _WORD
    return int.from_bytes(key[:-GROUP_BYTES], "little") % _PRIME ^ spread


def ends_of(keys: Sequence[OffloadKey]) -> array[int]:
    """Return where each of the keys ends when they are joined, behind a 0: type code ``I``."""
    return array("I", accumulate(map(len, keys), initial=0))


class Index:
    """Fingerprints of the chunks that this opener knows to exist. Any thread may call it.

    Attributes:
        address: of the helper's own tables; None where there are none.
    """

    address: int | None = None

    def __init__(self) -> None:
        self._marks: set[int] = set()

    def __len__(self) -> int:
        return len(self._marks)

    def known(self, keys: Sequence[OffloadKey]) -> Sequence[int]:
        """Return for each key whether its chunk is there: 1 or 0."""
        return [mark in self._marks for mark in map(fingerprint, keys)]

    def add(self, keys: Sequence[OffloadKey]) -> None:
        """Note that chunks are there."""
        self._marks.update(map(fingerprint, keys))

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Note that chunks are not there."""
        self._marks.difference_update(map(fingerprint, keys))

    def add_listed(self, marks: array[int]) -> None:
        """Note fingerprints as ``ChunkFiles.fingerprints`` lists them."""
        self._marks.update(marks)


class NativeIndex(Index):
    """``Index`` in C.

    Args:
        library: ``kvtier._native.library``, not None.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.address = library.kvt_index_open()
        if not self.address:
            raise MemoryError("no memory for an index of chunks")

    def __del__(self) -> None:
        if self.address:
            self._library.kvt_index_close(self.address)

    def __len__(self) -> int:
        return int(self._library.kvt_index_count(self.address))

    def known(self, keys: Sequence[OffloadKey]) -> Sequence[int]:
        assert native.holding is not None
        found, ends = bytearray(len(keys)), ends_of(keys)
        room = (ctypes.c_uint8 * len(keys)).from_buffer(found)
        ask = native.holding.kvt_index_known
        ask(self.address, b"".join(keys), ends.buffer_info()[0], len(keys), ctypes.addressof(room))
        return found

    def add(self, keys: Sequence[OffloadKey]) -> None:
        self._set(keys, there=True)

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        self._set(keys, there=False)

    def add_listed(self, marks: array[int]) -> None:
        self._library.kvt_index_add_marks(self.address, marks.buffer_info()[0], len(marks))

    def _set(self, keys: Sequence[OffloadKey], *, there: bool) -> None:
        if keys:
            ends = ends_of(keys)
            where = self.address, b"".join(keys), ends.buffer_info()[0], len(keys)
            self._library.kvt_index_set(*where, there)


def make_index() -> Index:
    """Make an empty one: the helper's, where it is there."""
    return NativeIndex(native.library) if native.library is not None else Index()
