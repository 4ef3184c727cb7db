"""What an opener knows of an epoch's chunks without asking the disk.

A chunk is known by 64 bits of its key. The set is cut into small ones, for a large one that grows
holds the interpreter for tens of milliseconds. A million chunks take some 70 MB.

It is never the truth: another process may have removed what is in it, and may have put what is not.
So it says PRESENT or UNKNOWN, and not ABSENT. A wrong PRESENT costs one get that finds nothing; then
the chunk is forgotten here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from kvtier.keys import GROUP_BYTES, OffloadKey

SHELVES: Final = 1024
_GOLDEN: Final = 0x9E3779B97F4A7C15
_WORD: Final = (1 << 64) - 1
_PRIME: Final = (
    1 << 64
) - 59  # the largest below 2**64: every byte of a hash counts, or numbers would collide


def fingerprint(key: OffloadKey) -> int:
    """Return 64 bits that stand for a key. The native helper makes the same from a file's name."""
    spread = int.from_bytes(key[-GROUP_BYTES:], "big") * _GOLDEN & _WORD
    return int.from_bytes(key[:-GROUP_BYTES], "little") % _PRIME ^ spread


class Index:
    """Fingerprints of chunks that were there when they were last heard of. Any thread may ask it."""

    def __init__(self) -> None:
        self._shelves: list[set[int]] = [set() for _ in range(SHELVES)]

    def __len__(self) -> int:
        return sum(map(len, self._shelves))

    def __contains__(self, key: OffloadKey) -> bool:
        mark = fingerprint(key)
        return mark in self._shelves[mark % SHELVES]

    def add(self, keys: Sequence[OffloadKey]) -> None:
        """Note that chunks are there."""
        self.add_listed(map(fingerprint, keys))

    def discard(self, keys: Iterable[OffloadKey]) -> None:
        """Note that chunks are not there."""
        for key in keys:
            mark = fingerprint(key)
            self._shelves[mark % SHELVES].discard(mark)

    def add_listed(self, marks: Iterable[int]) -> None:
        """Note fingerprints as ``Store.fingerprints`` lists them."""
        shelves = self._shelves
        for mark in marks:
            shelves[mark % SHELVES].add(mark)
