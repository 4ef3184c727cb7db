"""One call of the native library for a batch of chunks, and the result of each chunk."""

from __future__ import annotations

import ctypes
import errno
from array import array
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum, IntFlag
from typing import Final, TypeAlias

from kvtier._native.layouts import Call
from kvtier.keys import OffloadKey
from kvtier.tiers._base import Outcome, SlotMemory, Status
from kvtier.tiers.fs._files.index import Index, ends_of


class Result(IntEnum):
    """The result of one chunk, in an array that C fills in; a negative number is an errno.

    C sets only the first six. The name, in lower case, is the reason to count.
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

REASONS: Final = {
    "max_bytes": "max_bytes is reached",
    "min_free": "the file system has no more free bytes than min_free_bytes, or can hold no more files",
    "counting": "it is not known yet how many bytes root_dir holds",
    "reset_failed": "a reset could not be stored: until one is, gets miss and puts are refused",
    "enospc": "the file system is full",
    "edquot": "the disk quota is used up",
    "erofs": "the file system is read-only",
    "eacces": "permission is denied",
    "eperm": "the file system does not permit it",
    "eio": "the device failed",
    "enoent": "a directory below root_dir was removed",
    "estale": "the network file system has lost a file",
    "emfile": "the process has too many open files",
    "enfile": "the machine has too many open files",
    "enomem": "the machine is out of memory",
    "enodev": "the file system is not mounted any more",
    "enotconn": "the file system is not mounted any more",
    "enolck": "the file system has no locks, so engines could not keep a common bound",
    "etimedout": "the file system did not answer",
}

_STATUSES: Final = {
    Result.OK: Status.OK,
    Result.EXISTS: Status.OK,
    Result.ABSENT: Status.ABSENT,
    Result.TORN: Status.CORRUPT,
    Result.FOREIGN: Status.CORRUPT,
    Result.CHECKSUM: Status.CORRUPT,
    Result.MIN_FREE: Status.REFUSED,
    Result.MAX_BYTES: Status.REFUSED,
    Result.COUNTING: Status.REFUSED,
    -errno.ENOSPC: Status.REFUSED,
    -errno.EDQUOT: Status.REFUSED,
}

Failures: TypeAlias = Counter[int]
"""Files and directories that could not be removed or read, by errno."""


def count_failure(failures: Failures, error: OSError) -> None:
    """Count an error, except for a stop or a file that another process has removed."""
    if error.errno not in (errno.ENOENT, errno.ECANCELED):
        failures[error.errno or errno.EIO] += 1


def errno_name(number: int | None) -> str:
    """Return the reason for an errno: its name in lower case."""
    return errno.errorcode.get(number or 0, f"errno_{number or 0}").lower()


def outcome_of(results: array[int]) -> Outcome:
    """Return the outcome of a put or get, with the reasons of failed and refused chunks."""
    if not any(results):
        return Outcome.all(Status.OK, len(results))
    statuses = tuple(_STATUSES.get(result, Status.FAILED) for result in results)
    reasons = Counter(
        errno_name(-result) if result < 0 else Result(result).name.lower()
        for result, status in zip(results, statuses, strict=True)
        if status not in (Status.OK, Status.ABSENT)
    )
    return Outcome(statuses, reasons)


def chunks_with(results: array[int], wanted: Container[int]) -> list[int]:
    """Return the positions of chunks with one of the results. Fast if all are OK."""
    return [i for i, result in enumerate(results) if result in wanted] if any(results) else []


class Verb(Enum):
    """A task of the native pool; the value is the library's function."""

    PUT = "kvt_files_put"
    GET = "kvt_files_get"
    CONTAINS = "kvt_files_contains"


class Flag(IntFlag):
    """Options of reads and writes; C has the same."""

    NONE = 0
    DIRECT = 1
    SYNC_DATA = 2
    SYNC_DIRECTORY = 4
    SHARED = 8


@dataclass(frozen=True, slots=True)
class Place:
    """The directories of one epoch for one opener, relative to the root, and its options."""

    root_fd: int
    data_dir: str  # the epoch's
    tmp_dir: str  # the opener's, for unfinished files
    digest: bytes  # first 16 bytes of the identity's digest
    chunk_bytes: int
    flags: Flag


class StopFlag:
    """Tells jobs in other threads, in C too, to stop early. It cannot be unset."""

    def __init__(self) -> None:
        self._value = ctypes.c_uint32(0)
        self.address = ctypes.addressof(self._value)

    def set(self) -> None:
        self._value.value = 1

    def __bool__(self) -> bool:
        return self._value.value != 0


class FileCall:
    """The chunks of one batch, and the result of each.

    Args:
        slots: slots of the chunks in ``memory``; neither is given if no bytes move.
        serial: number in the name of the first chunk's temporary file; the others follow.
    """

    def __init__(
        self,
        place: Place,
        keys: Sequence[OffloadKey],
        slots: Sequence[int] | None = None,
        memory: SlotMemory | None = None,
        serial: int = 0,
    ) -> None:
        self.place = place
        self.keys = keys
        self.stop = StopFlag()
        self.results = array("i", bytes(4 * len(keys)))  # a Result or a negative errno for each chunk
        self.inodes = array("Q", bytes(8 * len(keys)))  # set for files whose result is in CORRUPT
        self.added = 0  # bytes that a put wrote, new directories included
        self._index: Index | None = None
        self._slots = array("q", slots) if slots is not None else None
        self._key_ends, self._memory = ends_of(keys), memory  # C has their addresses, and that of the slots
        self._record = Call(
            place.data_dir.encode(),
            place.tmp_dir.encode(),
            b"".join(keys),
            self._key_ends.buffer_info()[0],
            self._slots.buffer_info()[0] if self._slots is not None else None,
            self.stop.address,
            self.results.buffer_info()[0],
            self.inodes.buffer_info()[0],
            memory.address if memory is not None else 0,
            place.chunk_bytes,
            serial,
            place.root_fd,
            place.flags,
            (ctypes.c_uint8 * 16)(*place.digest),
        )
        self.address = ctypes.addressof(self._record)

    def __len__(self) -> int:
        return len(self.keys)

    def take_results(self, chunks: Sequence[int], part: FileCall) -> None:
        """Copy the results of ``part``, a call for the chunks at these positions."""
        for i, result, inode in zip(chunks, part.results, part.inodes, strict=True):
            self.results[i], self.inodes[i] = result, inode

    def note_in(self, index: Index) -> None:
        """Make the pool's threads add found chunks to the index. They do not remove missing chunks."""
        self._index = index
        self._record.index = index.address
