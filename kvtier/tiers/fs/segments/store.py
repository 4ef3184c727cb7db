"""The format ``segments``: what its two ways of working have in common.

The work on one epoch's segments is a ``Shelf``. Which segments are compacted, and when, is decided here;
how bytes are moved, by the shelf.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import threading
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Generic, Protocol, TypeVar

from kvtier.keys import OffloadKey
from kvtier.tiers.fs.call import FileCall, Place, StopFlag
from kvtier.tiers.fs.layout import BLOCK_BYTES
from kvtier.tiers.fs.segments.layout import FOLDER, MAX_MAP_BLOCKS, Shape, footer_blocks

SEGMENT_BYTES: Final = 64 * 2**20
"""Length of a segment, unless the root may hold too little for that."""

MOST_OPEN: Final = 128
"""Segments whose files are open at once, two descriptors each."""

_LEAST_CHUNKS: Final = 4
_SHARE: Final = 32
_COMPACTED_AT_ONCE: Final = 4
_NEVER_AGAIN: Final = frozenset({errno.EAGAIN, errno.ENOENT, errno.ECANCELED})
_log = logging.getLogger("kvtier.tiers.fs")


class State(IntEnum):
    """What happens to a segment's file. As in C."""

    WRITING = 1  # this process appends to it
    GROWING = 2  # another one does, or one that died did
    SEALED = 3  # nobody does any more


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """One segment as it is known.

    Attributes:
        number: the shelf's own number of it.
        name: of its file.
        state: what happens to it.
        records: chunks that were found in it, the discarded ones among them.
        live: of these, such as can be got.
        bytes: on disk.
    """

    number: int
    name: str
    state: State
    records: int
    live: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ShelfCounts:
    """What a shelf knows.

    Attributes:
        chunks: that can be got.
        torn: records that were not whole when they were looked at: their writer had not finished them.
        foreign: records of another identity.
        index_bytes: memory that the index takes.
    """

    chunks: int
    torn: int
    foreign: int
    index_bytes: int


class Shelf(Protocol):
    """The segments of one epoch, open. All calls block, and may be made from any thread."""

    def load(self, stop: StopFlag) -> int:
        """Learn all that is there. Return how many chunks are known."""

    def segments(self) -> list[SegmentInfo]:
        """Describe the segments that are known."""

    def keys(self, number: int) -> list[OffloadKey]:
        """Return the keys of the chunks in a segment that can be got."""

    def marks(self, number: int) -> array[int]:
        """Return their fingerprints: ``index.fingerprint``, type code ``Q``."""

    def take_lost(self) -> list[OffloadKey]:
        """Return the keys of chunks whose segments were found to be gone since it was asked last."""

    def kill(self, number: int, block: int) -> None:
        """Discard the chunk at a place. OSError where that cannot be written down."""

    def drop(self, number: int) -> int:
        """Remove a segment. Return the bytes that the file system has got less. OSError."""

    def forget(self, number: int) -> None:
        """Learn that a segment was removed."""

    def copy(self, number: int, stop: StopFlag) -> tuple[int, int]:
        """Copy what can be got of a sealed segment into the current one.

        Returns:
            Chunks copied, and the bytes that the file system has got more.

        Raises:
            OSError: not all could be copied, or another process is at it (EAGAIN).
        """

    def adopt(self, stop: StopFlag) -> int:
        """Seal what dead writers have left. Return the bytes that the file system has got more."""

    def finish(self) -> int:
        """Seal the current segment. No put is under way. Return the bytes got more."""

    def counts(self) -> ShelfCounts:
        """Say what is known."""

    def close(self) -> None:
        """Forget everything. Nothing is under way."""


ShelfT = TypeVar("ShelfT", bound=Shelf)


@dataclass(slots=True)
class Shelved(Generic[ShelfT]):
    """The segments of one epoch, and how many use them now."""

    shelf: ShelfT
    place: Place
    users: int = 0


class Segments(ABC, Generic[ShelfT]):
    """What a ``Store`` of segments does alike, however it works on them.

    Args:
        max_bytes: what the root may hold, where that is known: segments are small in a small one.
    """

    format: Final = "segments"

    def __init__(self, max_bytes: int | None = None) -> None:
        self._max_bytes = max_bytes
        self._shelves: dict[str, Shelved[ShelfT]] = {}
        self._lock = threading.Lock()

    @abstractmethod
    def open_shelf(self, place: Place, writer: str, segment_bytes: int) -> ShelfT:
        """Open the segments of one epoch; what is there is learned later. OSError."""

    # ------------------------------------------------------------------------------- bytes

    def most_bytes(self, chunk_bytes: int) -> int:
        """See ``Store.most_bytes``: the extent's head; a new segment's, its map and its footer."""
        return chunk_bytes + BLOCK_BYTES * (2 + MAX_MAP_BLOCKS // 16 + footer_blocks(1))

    def segment_bytes(self, place: Place) -> int:
        """Return how long new segments are: so that eviction has many of them to choose from."""
        wished = max(_wished_bytes(self._max_bytes), _least_bytes(place.chunk_bytes))
        return wished // BLOCK_BYTES * BLOCK_BYTES

    # ------------------------------------------------------------------------- shelves

    @contextmanager
    def shelf(self, place: Place) -> Iterator[ShelfT]:
        """Use the segments of one epoch; they are opened when they are asked for first."""
        found = self.take_shelf(place)
        try:
            yield found.shelf
        finally:
            self.give_back(found)

    def take_shelf(self, place: Place) -> Shelved[ShelfT]:
        """The same for who cannot say ``with``; it waits for no file."""
        with self._lock:
            found = self._shelves.get(place.data_dir)
            if found is None:
                writer = f"{os.getpid()}-{secrets.token_hex(8)}"
                found = Shelved(self.open_shelf(place, writer, self.segment_bytes(place)), place)
                self._shelves[place.data_dir] = found
            found.users += 1
            return found

    def give_back(self, found: Shelved[ShelfT]) -> None:
        """End the use of what ``take_shelf`` gave."""
        with self._lock:
            found.users -= 1

    def close(self) -> None:
        """Seal and close all of them. Nothing is under way."""
        with self._lock:
            shelves, self._shelves = self._shelves, {}
        for found in shelves.values():
            found.shelf.finish()
            found.shelf.close()

    def _close_others(self, place: Place) -> int:
        """Close the segments of epochs that were left. Return the bytes that the file system has got more."""
        with self._lock:
            over = [
                name for name, found in self._shelves.items() if name != place.data_dir and not found.users
            ]
            shelves = [self._shelves.pop(name) for name in over]
        added = 0
        for found in shelves:
            added += found.shelf.finish()
            found.shelf.close()
        return added

    # --------------------------------------------------------------------------- the store

    def forget(self, place: Place, units: Sequence[str]) -> Sequence[OffloadKey]:
        """See ``Store.forget``."""
        names = {os.path.basename(path) for path in units}
        with self.shelf(place) as shelf:
            for info in shelf.segments():
                if info.name in names:
                    shelf.forget(info.number)
            return shelf.take_lost()

    def fingerprints(self, place: Place, part: int, stop: StopFlag) -> array[int]:
        """See ``Store.fingerprints``: all of them are in part 0."""
        if part:
            return array("Q")
        with self.shelf(place) as shelf:
            shelf.load(stop)
            marks = array("Q")
            for info in shelf.segments():
                marks.extend(shelf.marks(info.number))
        return marks

    def tend(self, place: Place, stop: StopFlag) -> int:
        """See ``Store.tend``: seal what the dead left, and compact what is mostly dead."""
        added = self._close_others(place)
        with self.shelf(place) as shelf:
            shelf.load(stop)
            added += shelf.adopt(stop)
            wasteful = [info for info in shelf.segments() if self._is_wasteful(place, info)]
            wasteful.sort(key=lambda info: info.live)
            for info in wasteful[:_COMPACTED_AT_ONCE]:
                if stop:
                    break
                added += _compact(shelf, info, stop)
        return added

    def statistics(self, place: Place) -> ShelfCounts:
        """Say what is known of an epoch's chunks."""
        with self.shelf(place) as shelf:
            return shelf.counts()

    def _is_wasteful(self, place: Place, info: SegmentInfo) -> bool:
        """Say whether more than half of a segment is of no use."""
        return info.state is State.SEALED and 2 * info.live * place.chunk_bytes < info.bytes

    def set_aside(self, call: FileCall, i: int, target: str) -> bool:
        """Keep what was read of a chunk that failed its check in a file of its own, and discard the chunk.

        Args:
            call: the get; what was read is in the chunk's slot.
            i: which chunk.
            target: where to, relative to the root: the bytes, and the trailer's block behind them.

        Returns:
            Whether it was there yet. OSError where it cannot be set aside.
        """
        assert call.memory is not None
        assert call.slots is not None
        number, block = call.inodes[i] >> 32, call.inodes[i] & 0xFFFFFFFF
        with self.shelf(call.place) as shelf:
            known = {info.number: info for info in shelf.segments()}
            if number not in known:
                return False
            with call.memory.view(call.slots[i]) as slot, suppress(OSError):
                _write_evidence(call.place, target, slot, known[number].name, block)
            shelf.kill(number, block)
        return True


def has_room_for_many(max_bytes: int | None, chunk_bytes: int) -> bool:
    """Say whether a root may hold so much that its segments are a small part of it each.

    Where not, room for one chunk costs a good part of all others: they leave as a whole.
    """
    return _wished_bytes(max_bytes) >= _least_bytes(chunk_bytes)


def _wished_bytes(max_bytes: int | None) -> int:
    return SEGMENT_BYTES if max_bytes is None else min(SEGMENT_BYTES, max_bytes // _SHARE)


def _least_bytes(chunk_bytes: int) -> int:
    extent = Shape(chunk_bytes, b"").extent_blocks(_LEAST_CHUNKS)
    return (3 + extent + footer_blocks(_LEAST_CHUNKS)) * BLOCK_BYTES


def _compact(shelf: Shelf, info: SegmentInfo, stop: StopFlag) -> int:
    """Copy what lives in a segment and remove it. Return the bytes that the file system has got more."""
    try:
        copied, added = shelf.copy(info.number, stop) if info.live else (0, 0)
        freed = shelf.drop(info.number)
    except OSError as error:
        if error.errno not in _NEVER_AGAIN:
            _log.warning("segment %s could not be compacted: %s", info.name, error)
        return 0
    _log.debug("segment %s: %d chunks were copied, %d bytes are free", info.name, copied, freed - added)
    return added - freed


def _write_evidence(place: Place, target: str, slot: memoryview, name: str, block: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(target, flags, 0o600, dir_fd=place.root_fd)
    try:
        os.write(fd, slot)
        origin = f"from {place.data_dir}/{FOLDER}/{name}, block {block}\n"
        os.write(fd, origin.encode().ljust(BLOCK_BYTES, b"\0"))
    finally:
        os.close(fd)
