"""One put, get, look-up or removal of chunks: what the native library works on."""

from __future__ import annotations

import ctypes
import errno
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum, IntFlag
from typing import Final, TypeAlias

from kvtier._native.layouts import Call
from kvtier.keys import OffloadKey
from kvtier.tiers._base import SlotMemory
from kvtier.tiers.fs._files.index import Index, ends_of


class Result(IntEnum):
    """What became of one chunk, in an array that C fills in; a negative number instead is an errno.

    The first six are C's. ``Status`` is what the tier makes of it, the name the reason that is counted.
    """

    OK = 0
    EXISTS = 1
    ABSENT = 2
    TORN = 3
    FOREIGN = 4
    CHECKSUM = 5
    MIN_FREE = 6
    MAX_BYTES = 7
    COUNTING = 8


THERE: Final = frozenset({Result.OK, Result.EXISTS})
CORRUPT: Final = frozenset({Result.TORN, Result.FOREIGN, Result.CHECKSUM})
GONE: Final = CORRUPT | {Result.ABSENT}

Failures: TypeAlias = Counter[int]
"""Files and directories that could not be removed or read, by errno."""


def count_failure(failures: Failures, error: OSError) -> None:
    """Count an error; what somebody else has removed, and being stopped, are none."""
    if error.errno not in (errno.ENOENT, errno.ECANCELED):
        failures[error.errno or errno.EIO] += 1


class Verb(Enum):
    """What the native pool does; the value is the library's function."""

    PUT = "kvt_files_put"
    GET = "kvt_files_get"
    CONTAINS = "kvt_files_contains"


class Flag(IntFlag):
    """How files are read and written. As in C."""

    NONE = 0
    DIRECT = 1
    SYNC_DATA = 2
    SYNC_DIRECTORY = 4


@dataclass(frozen=True, slots=True)
class Place:
    """Where chunks are: one epoch of one namespace, as one opener sees it.

    Attributes:
        data_dir: the epoch's directory, relative to the root.
        tmp_dir: the opener's own directory for unfinished files, relative to the root.
        digest: the first 16 bytes of the identity's digest.
    """

    root_fd: int
    data_dir: str
    tmp_dir: str
    digest: bytes
    chunk_bytes: int
    flags: Flag


class StopFlag:
    """Makes jobs in other threads, in C too, leave what they have not begun."""

    def __init__(self) -> None:
        self._value = ctypes.c_uint32(0)
        self.address = ctypes.addressof(self._value)

    def set(self) -> None:
        """Stop. There is no way back."""
        self._value.value = 1

    def __bool__(self) -> bool:
        return self._value.value != 0


class FileCall:
    """The chunks of one batch, and what becomes of each.

    Attributes:
        slots: their slots in ``memory``; empty where no bytes are moved.
        memory: the primary tier's bytes, or None.
        serial: number in the name of the first chunk's temporary file; one more for each next.
        stop: set where no more chunks shall be begun.
        results: a ``Result`` or a negative errno for each chunk.
        inodes: inode of the file where the result is TORN, FOREIGN or CHECKSUM.
        added: bytes that a put has added to the file system, directories included.
        address: address of the C record.
    """

    def __init__(
        self,
        place: Place,
        keys: Sequence[OffloadKey],
        slots: array[int] | None = None,
        memory: SlotMemory | None = None,
        serial: int = 0,
    ) -> None:
        self.place = place
        self.keys = keys
        self.slots = slots
        self.memory = memory
        self.serial = serial
        self.stop = StopFlag()
        self.results = array("i", bytes(4 * len(keys)))
        self.inodes = array("Q", bytes(8 * len(keys)))
        self.added = 0
        self._index: Index | None = None
        self._key_ends = ends_of(keys)
        self._record = self._make_record()
        self.address = ctypes.addressof(self._record)

    def __len__(self) -> int:
        return len(self.keys)

    def take_results(self, chunks: Sequence[int], part: FileCall) -> None:
        """Take over what became of some of the chunks in a call of their own."""
        for i, result, inode in zip(chunks, part.results, part.inodes, strict=True):
            self.results[i], self.inodes[i] = result, inode

    def note_in(self, index: Index) -> None:
        """Let the pool's threads note in the index which chunks are there, though not which are gone."""
        self._index = index
        self._record.index = index.address

    def _make_record(self) -> Call:
        place = self.place
        return Call(
            place.data_dir.encode(),
            place.tmp_dir.encode(),
            b"".join(self.keys),
            self._key_ends.buffer_info()[0],
            self.slots.buffer_info()[0] if self.slots is not None else None,
            self.stop.address,
            self.results.buffer_info()[0],
            self.inodes.buffer_info()[0],
            self.memory.address if self.memory is not None else 0,
            place.chunk_bytes,
            self.serial,
            place.root_fd,
            place.flags,
            (ctypes.c_uint8 * 16)(*place.digest),
        )
