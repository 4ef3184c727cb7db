"""One put, get, look-up or removal of files: what the native helper and its fallback work on."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum, IntFlag
from typing import Protocol

from kvtier.keys import OffloadKey
from kvtier.tiers.base import SlotMemory
from kvtier.tiers.fs.index import Index, ends_of
from kvtier.tiers.fs.layout import BLOCK_BYTES


class Result(IntEnum):
    """What became of one chunk; a negative number instead is an errno. The first six as in C."""

    OK = 0
    EXISTS = 1
    ABSENT = 2
    TORN = 3
    FOREIGN = 4
    CHECKSUM = 5
    MIN_FREE = 6
    MAX_BYTES = 7
    COUNTING = 8


class Verb(Enum):
    """What can be begun without waiting for it."""

    PUT = "put"
    GET = "get"


class Flag(IntFlag):
    """How files are read and written. As in C."""

    NONE = 0
    DIRECT = 1
    SYNC_DATA = 2
    SYNC_DIRECTORY = 4
    BARE = 8  # the file is the chunk's bytes and nothing else: no trailer, and nothing proven but the length


@dataclass(frozen=True, slots=True)
class Place:
    """Where chunks are: one epoch of one namespace, as one opener sees it.

    Attributes:
        root_fd: the tier's root directory, open.
        data_dir: the epoch's directory, relative to the root.
        tmp_dir: the opener's own directory for unfinished files, relative to the root.
        digest: 16 bytes that tell the identity.
        chunk_bytes: length of every chunk.
        flags: how files are read and written.
    """

    root_fd: int
    data_dir: str
    tmp_dir: str
    digest: bytes
    chunk_bytes: int
    flags: Flag

    @property
    def is_bare(self) -> bool:
        """Whether files are the chunks' bytes and nothing else."""
        return bool(self.flags & Flag.BARE)

    @property
    def file_bytes(self) -> int:
        """Length of every chunk's file."""
        return self.chunk_bytes + (0 if self.is_bare else BLOCK_BYTES)


class _Record(ctypes.Structure):
    """``struct call`` of kvtier_native.c."""

    _fields_ = (
        ("data_dir", ctypes.c_char_p),
        ("tmp_dir", ctypes.c_char_p),
        ("keys", ctypes.c_char_p),
        ("key_ends", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("stop", ctypes.c_void_p),
        ("results", ctypes.c_void_p),
        ("inodes", ctypes.c_void_p),
        ("base", ctypes.c_uint64),
        ("chunk_bytes", ctypes.c_uint64),
        ("serial", ctypes.c_uint64),
        ("root_fd", ctypes.c_int32),
        ("flags", ctypes.c_uint32),
        ("digest", ctypes.c_uint8 * 16),
        ("segments", ctypes.c_void_p),
        ("index", ctypes.c_void_p),
    )


class StopFlag:
    """Tells jobs in other threads, in C too, to leave what they have not begun."""

    def __init__(self) -> None:
        self._value = ctypes.c_uint32(0)
        self.address = ctypes.addressof(self._value)

    def set(self) -> None:
        """Stop. There is no way back."""
        self._value.value = 1

    def __bool__(self) -> bool:
        return self._value.value != 0


class FileCall:
    """The chunks of one batch, and what becomes of each. Jobs share it, each with a run of its own.

    Attributes:
        place: where the chunks' files are.
        keys: the chunks' offload keys.
        slots: their slots in ``memory``; empty where no bytes are moved.
        memory: the primary tier's bytes, or None.
        serial: number in the name of the first chunk's temporary file; one more for each next.
        pool: what ``FileWork.open_pool`` gave, or 0.
        stop: set where no more chunks shall be begun.
        results: a ``Result`` or a negative errno for each chunk.
        inodes: inode of the file where the result is TORN, FOREIGN or CHECKSUM.
        address: address of the C record.
    """

    def __init__(
        self,
        place: Place,
        keys: Sequence[OffloadKey],
        slots: array[int] | None = None,
        memory: SlotMemory | None = None,
        serial: int = 0,
        pool: int = 0,
    ) -> None:
        self.pool = pool
        self.place = place
        self.keys = keys
        self.slots = slots
        self.memory = memory
        self.serial = serial
        self.stop = StopFlag()
        self.results = array("i", bytes(4 * len(keys)))
        self.inodes = array("Q", bytes(8 * len(keys)))
        self._index: Index | None = None
        self._key_ends = ends_of(keys)
        self._record = self._make_record()
        self.address = ctypes.addressof(self._record)

    def __len__(self) -> int:
        return len(self.keys)

    def use_segments(self, address: int) -> None:
        """Say in which segments the chunks are: what ``kvt_segments_open`` gave."""
        self._record.segments = address

    def note_in(self, index: Index | None) -> None:
        """Say where the pool's threads note which chunks are there; they can only in the helper's own."""
        self._index = index
        self._record.index = index.address if index is not None else None

    @property
    def is_noted(self) -> bool:
        """Whether the pool's threads note which chunks are there. Of those that are gone they do not."""
        return bool(self._record.index)

    def _make_record(self) -> _Record:
        place = self.place
        return _Record(
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


class FileWork(Protocol):
    """The work on files, done by the native helper or in Python with the same results.

    All calls block, and may be made from any thread. ``first`` and ``end`` delimit a run of the
    call's chunks; its results are written and nobody else's.
    """

    def open_pool(self, readers: int, writers: int) -> int:
        """Start threads that share out the chunks of calls, gets before puts. 0: cut batches into jobs."""

    def close_pool(self, pool: int) -> None:
        """End a pool that no call uses any more."""

    def pool_fd(self, pool: int) -> int:
        """Return the descriptor that is readable when something that was begun has ended."""

    def begin(self, call: FileCall, verb: Verb, token: int) -> bool:
        """Have the call's pool do all of it, without waiting for anything. In the event loop.

        Args:
            call: of one chunk at least; it stays until ``ended`` has told of it.
            verb: what to do.
            token: what ``ended`` tells it by, not 0.

        Returns:
            False: it cannot, and has done nothing.
        """

    def ended(self, pool: int) -> list[tuple[int, int]]:
        """Take what has ended: tokens, and for each what ``put`` returns. In the event loop."""

    def put(self, call: FileCall, first: int, end: int) -> int:
        """Write chunks that are not there. Return the bytes that the file system has got more."""

    def get(self, call: FileCall, first: int, end: int) -> None:
        """Read chunks into their slots and prove them."""

    def contains(self, call: FileCall, first: int, end: int) -> None:
        """Look whether the chunks' files are there: OK or ABSENT."""

    def discard(self, call: FileCall, first: int, end: int) -> int:
        """Remove the chunks' files. Return the bytes that the file system has got less."""

    def tree_bytes(self, root_fd: int, path: str, stop: StopFlag) -> int:
        """Return the bytes on disk below a directory. OSError where it cannot be read."""

    def tree_remove(self, root_fd: int, path: str, stop: StopFlag) -> int:
        """Remove a directory. Return the bytes removed. OSError where it cannot be removed."""
