"""The segments of one epoch in Python: what the tier does where the native helper is missing.

The same files, the same steps and the same results as in segments.c, and one lock for what is known.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Final

import crc32c

from kvtier.keys import OffloadKey
from kvtier.tiers import seal
from kvtier.tiers.fs.call import Flag, Place, StopFlag
from kvtier.tiers.fs.index import fingerprint
from kvtier.tiers.fs.layout import BLOCK_BYTES, CAREFULLY, FILE_MODE
from kvtier.tiers.fs.python_files import make_parents, sync_parents
from kvtier.tiers.fs.segments import layout
from kvtier.tiers.fs.segments.layout import EXTENT_RECORDS, FOLDER, Head, Kind, Record, Shape
from kvtier.tiers.fs.segments.scan import data_behind
from kvtier.tiers.fs.segments.store import SegmentInfo, ShelfCounts, State

HALF_MADE_S: Final = 10.0
CLOCK_GRAIN_S: Final = 0.05
REFRESH_SHARE: Final = 20
REFRESH_CREDIT_S: Final = 0.05
MAX_PARTS: Final = 512
MOST_LOST: Final = 16_384
MOST_REMOVED: Final = 3
COPIED_BYTES: Final = 8 * 2**20
_SPOT_BYTES: Final = 400  # of dictionaries and records, about, for each chunk


@dataclass(eq=False, slots=True)
class File:
    """One segment's file as it is known.

    Attributes:
        number: the shelf's own number of it.
        name: of the file.
        state: what happens to it.
        capacity: blocks that it may have.
        map_blocks: blocks of its map.
        next_block: where the next extent goes, or is looked for.
        end_block: where there is none any more.
        fd: open for writing, while this process appends to it; else -1.
        pending: writes under way.
        full: nothing is appended any more.
        gone: there is no such file any more.
        bytes: on disk, as far as known.
        records: what can be got, by block.
        found: how many records were found in it.
    """

    number: int
    name: str
    state: State
    capacity: int = 0
    map_blocks: int = 0
    next_block: int = 0
    end_block: int = 0
    fd: int = -1
    pending: int = 0
    full: bool = False
    gone: bool = False
    bytes: int = 0
    records: dict[int, Record] = field(default_factory=dict)
    found: int = 0


@dataclass(slots=True)
class Space:
    """Where records go that are written at once, and whether they are there."""

    file: File
    block: int
    records: int
    written: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """Where a record is that is copied."""

    file: File
    record: Record

    @property
    def is_there(self) -> bool:
        """Whether it was not discarded meanwhile."""
        return self.file.records.get(self.record.block) is self.record


class PythonShelf:
    """``Shelf`` in Python. See there, and ``Segments``, for what the methods do.

    Args:
        place: the epoch.
        writer: a name that no other writer has or had.
        segment_bytes: length of new segments.
    """

    def __init__(self, place: Place, writer: str, segment_bytes: int) -> None:
        self.place = place
        self.shape = Shape(place.chunk_bytes, place.digest)
        self._writer = writer
        self._capacity = segment_bytes // BLOCK_BYTES
        self._serial = 0
        self._numbers = count(1)
        self._folder = f"{place.data_dir}/{FOLDER}"
        self._dir_fd = -1
        self._lock = threading.RLock()
        self._growing = threading.Lock()
        self._looking = threading.Lock()
        self._files: dict[int, File] = {}
        self._spots: dict[OffloadKey, list[tuple[File, Record]]] = {}
        self._current: File | None = None
        self._lost: deque[OffloadKey] = deque(maxlen=MOST_LOST)
        self._torn = self._foreign = 0
        self._looks = 0
        self._listed_at: int | None = None
        self._credit_s = REFRESH_CREDIT_S
        self._looked_at = time.monotonic()

    # --------------------------------------------------------------------------- the index

    def _insert(self, file: File, record: Record) -> None:
        if file.gone or record.block in file.records:
            return
        file.records[record.block] = record
        file.found += 1
        self._spots.setdefault(record.key, []).append((file, record))

    def _forget_record(self, file: File, block: int) -> None:
        record = file.records.pop(block, None)
        if record is None:
            return
        spots = self._spots[record.key]
        spots.remove((file, record))
        if not spots:
            del self._spots[record.key]

    def _lose(self, file: File) -> None:
        for block, record in tuple(file.records.items()):
            self._forget_record(file, block)
            self._lost.append(record.key)
        if file.state is not State.WRITING:
            file.gone = True
            self._files.pop(file.number, None)

    def find(self, key: OffloadKey) -> tuple[File, Record] | None:
        """Return where a chunk is, as far as known."""
        with self._lock:
            spots = self._spots.get(key)
            return spots[-1] if spots else None

    def map_index(self, file: File, block: int) -> int:
        """Return which byte of the map stands for a record."""
        return (block - 1 - file.map_blocks) // self.shape.chunk_blocks

    # ------------------------------------------------------------------------------- files

    @contextmanager
    def open_file(self, file: File, flags: int = os.O_RDONLY) -> Iterator[int]:
        """Open a segment's file, past the page cache where that is possible. OSError."""
        fd = self._open(file.name, flags | self._direct)
        try:
            yield fd
        finally:
            os.close(fd)

    @property
    def _direct(self) -> int:
        return getattr(os, "O_DIRECT", 0) if self.place.flags & Flag.DIRECT else 0

    def _open(self, name: str, flags: int) -> int:
        if self._dir_fd < 0:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._folder)
        return os.open(name, flags | CAREFULLY, FILE_MODE, dir_fd=self._dir_fd)

    def read_map(self, file: File) -> bytes | None:
        """Return the map of the dead; None where the file is no longer there. OSError."""
        try:
            fd = self._open(file.name, os.O_RDONLY)
            try:
                length = file.map_blocks * BLOCK_BYTES
                return os.pread(fd, length, BLOCK_BYTES).ljust(length, b"\0")
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno == errno.ESTALE:  # another host has removed it, or the server has forgotten it
                self._listed_at = None
            elif error.errno != errno.ENOENT:
                raise
            return None

    def sort_out(self, file: File, blocks: Sequence[int]) -> set[int]:
        """Return those of the blocks whose chunks are there; forget the others. OSError."""
        dead = self.read_map(file)
        with self._lock:
            if dead is None:
                self._lose(file)
                return set()
            there = {block for block in blocks if not dead[self.map_index(file, block)]}
            for block in set(blocks) - there:
                self._forget_record(file, block)
        return there

    def mark_dead(self, file: File, block: int) -> None:
        """Mark a place in its file's map, for every process and every later one. OSError.

        The file's times stay what they were: they tell when it was written and used.
        """
        try:
            fd = self._open(file.name, os.O_WRONLY)
        except FileNotFoundError:
            return
        try:
            before = os.fstat(fd)
            os.pwrite(fd, b"\1", BLOCK_BYTES + self.map_index(file, block))
            with suppress(OSError):
                os.utime(fd, ns=(os.fstat(fd).st_atime_ns, before.st_mtime_ns))
            if self.place.flags & Flag.SYNC_DATA:
                os.fdatasync(fd)
        finally:
            os.close(fd)

    # ----------------------------------------------------------------------------- writing

    def write(
        self, keys: Sequence[OffloadKey], views: Sequence[memoryview], sources: Sequence[Source] | None = None
    ) -> tuple[int, int, OSError | None]:
        """Write as many of the chunks as go at once.

        Returns:
            How many; the bytes that the file system has got more; and, where nothing was written that
            anybody finds, why.
        """
        added, removed = 0, 0
        while True:
            try:
                space, more = self._find_space(len(keys))
            except OSError as error:
                return 0, added, error
            done, failed = self._write_into(space, keys, views[: space.records], sources)
            added += more + done
            if failed is None:
                return space.records, added, None
            removed += 1
            if not isinstance(failed, FileNotFoundError) or removed > MOST_REMOVED:
                return 0, added, failed

    def _write_into(
        self,
        space: Space,
        keys: Sequence[OffloadKey],
        views: Sequence[memoryview],
        sources: Sequence[Source] | None,
    ) -> tuple[int, OSError | None]:
        bare = self.place.is_bare
        records = [
            Record(key, self.shape.block_of(space.block, i), 0 if bare else crc32c.crc32c(view))
            for i, (key, view) in enumerate(zip(keys, views, strict=False))
        ]
        error: OSError | None = None
        try:
            self._write_extents(space, records, views)
        except OSError as failed:
            error = failed
        return self._publish(space, records, error, sources), error

    def _find_space(self, wanted: int) -> tuple[Space, int]:
        if (space := self._take_space(wanted)) is not None:
            return space, 0
        with self._growing:
            if (space := self._take_space(wanted)) is not None:
                return space, 0
            with self._lock:
                full = self._stop_growing()
            added = self._seal_if_over(full) if full is not None else 0
            added += self._grow()
            space = self._take_space(wanted)
        if space is None:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        return space, added

    def _take_space(self, wanted: int) -> Space | None:
        with self._lock:
            file = self._current
            if file is None:
                return None
            records = wanted
            while records and file.next_block + self.shape.extent_blocks(records) > file.end_block:
                records -= 1
            if not records:
                return None
            space = Space(file, file.next_block, records)
            file.next_block += self.shape.extent_blocks(records)
            file.pending += 1
            return space

    def _stop_growing(self) -> File | None:
        file, self._current = self._current, None
        if file is not None:
            file.full = True
        return file

    def _grow(self) -> int:
        """Open the next segment. With the growing lock. Return the bytes got more."""
        with self._lock:
            number = next(self._numbers)
            file = File(number, f"{self._writer}-{self._serial:08x}.seg", State.WRITING, self._capacity)
            self._serial += 1
            self._files[number] = file
            file.full = True  # until it is made
        file.map_blocks = self.shape.map_blocks(self._capacity)
        file.next_block = 1 + file.map_blocks
        file.end_block = self.shape.data_end(self._capacity)
        try:
            file.fd = self._make_file(file)
        except OSError:
            with self._lock:
                file.state = State.SEALED
                self._lose(file)
            raise
        with self._lock:
            file.bytes = BLOCK_BYTES
            file.full = False
            self._current = file
        return file.bytes

    def _make_file(self, file: File) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | self._direct
        try:
            fd = self._open(file.name, flags)
        except FileNotFoundError:  # it was removed under us, or is not there yet
            self._open_folder(make=True)
            fd = self._open(file.name, flags)
        try:
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, self._capacity * BLOCK_BYTES)
            head = layout.pack_head(Kind.SEGMENT, self.shape, Head(file.map_blocks, 0, self._capacity, 0))
            _move_all(fd, [memoryview(_blocks(head))], 0, os.pwritev)
            if self.place.flags & Flag.SYNC_DIRECTORY:
                os.fsync(fd)
                os.fsync(self._dir_fd)
        except BaseException:
            os.close(fd)
            with suppress(OSError):
                os.unlink(file.name, dir_fd=self._dir_fd)
            raise
        return fd

    def _open_folder(self, *, make: bool) -> None:
        made = make_parents(self.place.root_fd, f"{self._folder}/.") if make else 0
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self._folder, flags, dir_fd=self.place.root_fd)
        if made and self.place.flags & Flag.SYNC_DIRECTORY:
            sync_parents(self.place.root_fd, f"{self._folder}/.", made + 1)
        with self._lock:
            if self._dir_fd < 0:
                self._dir_fd = fd
            else:  # the same number: others may be about to use it
                os.dup2(fd, self._dir_fd, inheritable=False)
                os.close(fd)
            self._listed_at = None

    def _write_extents(self, space: Space, records: Sequence[Record], views: Sequence[memoryview]) -> None:
        heads = b"".join(
            layout.make_extent_head(self.shape, records[i].block - 1, records[i : i + EXTENT_RECORDS])
            for i in range(0, len(records), EXTENT_RECORDS)
        )
        self._check_removed(space.file)
        whole = memoryview(_blocks(heads))
        parts = []
        for i, view in enumerate(views):
            if i % EXTENT_RECORDS == 0:
                at = i // EXTENT_RECORDS * BLOCK_BYTES
                parts.append(whole[at : at + BLOCK_BYTES])
            parts.append(view)
        _move_all(space.file.fd, parts, space.block * BLOCK_BYTES, os.pwritev)
        space.written = True
        if self.place.flags & Flag.SYNC_DATA:
            os.fdatasync(space.file.fd)
        self._check_removed(space.file)

    @staticmethod
    def _check_removed(file: File) -> None:
        """FileNotFoundError where a segment was removed: nobody finds what is in it."""
        if _is_removed(file.fd):
            raise FileNotFoundError(errno.ENOENT, "the segment was removed", file.name)

    def _publish(
        self,
        space: Space,
        records: Sequence[Record],
        error: OSError | None,
        sources: Sequence[Source] | None,
    ) -> int:
        file, added, discarded = space.file, 0, []
        with self._lock:
            if error is None:
                for i, record in enumerate(records):
                    source = sources[i] if sources is not None else None
                    if source is not None and not source.is_there:
                        discarded.append(record.block)  # while it was copied
                        continue
                    self._insert(file, record)
                    if source is not None:
                        self._forget_record(source.file, source.record.block)
            if space.written:  # who has removed it meanwhile has counted them as well
                added = self.shape.extent_blocks(len(records)) * BLOCK_BYTES
                file.bytes += added
            if error is not None and self._current is file:
                self._stop_growing()  # who walks the extents cannot go on here: its footer leads past this
        for at in discarded:
            self.mark_dead(file, at)
        with self._lock:
            file.pending -= 1
        return added + self._seal_if_over(file)

    def _seal_if_over(self, file: File) -> int:
        with self._lock:
            over = file.full and not file.pending and file.state is State.WRITING and file.fd >= 0
            fd = file.fd
            if over:
                file.fd = -1
        if not over:
            return 0
        try:
            return self._seal(file, fd)
        finally:
            os.close(fd)

    def _seal(self, file: File, fd: int) -> int:
        """Write the footer and cut off what was not used. Return the change of bytes on disk.

        What fails leaves a segment without a footer, whose extents are walked.
        """
        if _is_removed(fd):  # who has removed it has counted its bytes
            with self._lock:
                file.state = State.SEALED
                self._lose(file)
            return 0
        with self._lock:
            records, before, end = list(file.records.values()), file.bytes, file.next_block
        with suppress(OSError):
            if not records:
                os.unlink(file.name, dir_fd=self._dir_fd)
                with self._lock:
                    file.state = State.SEALED
                    self._lose(file)
                return -before
            footer = _blocks(layout.make_footer(self.shape, end, records))
            _move_all(fd, [memoryview(footer)], end * BLOCK_BYTES, os.pwritev)
            os.ftruncate(fd, end * BLOCK_BYTES + len(footer))
            if self.place.flags & Flag.SYNC_DATA:
                os.fdatasync(fd)
        with self._lock:
            file.state = State.SEALED
            file.bytes = os.fstat(fd).st_blocks * 512
            return file.bytes - before

    # ------------------------------------------------------------------ learning what is there

    def look_around(self, stop: StopFlag, *, whatever_it_takes: bool = False) -> None:
        """Learn what others have done, as far as the time that it may take allows."""
        looks = self._looks
        with self._looking:
            now = time.monotonic()
            self._credit_s = min(REFRESH_CREDIT_S, self._credit_s + (now - self._looked_at) / REFRESH_SHARE)
            self._looked_at = now
            if whatever_it_takes or (self._credit_s > 0 and looks == self._looks):
                self._look(stop)
                self._looked_at = time.monotonic()
                self._credit_s -= self._looked_at - now

    def load(self, stop: StopFlag) -> int:
        """See ``Shelf.load``."""
        with self._looking:
            self._look(stop)
        return len(self._spots)

    def _look(self, stop: StopFlag) -> None:
        with suppress(OSError):
            self._look_for_files(stop)
        for file in self._growing_files():
            if stop:
                break
            self._read_more(file, False, stop)
        self._looks += 1

    def _growing_files(self) -> list[File]:
        with self._lock:
            return [file for file in self._files.values() if file.state is State.GROWING]

    def _look_for_files(self, stop: StopFlag) -> None:
        if self._dir_fd < 0 or os.fstat(self._dir_fd).st_nlink == 0:
            self._open_folder(make=False)
        changed = os.fstat(self._dir_fd).st_mtime_ns
        if self._listed_at == changed:
            return
        # What happens within the clock's grain after a change does not change the directory's time.
        settled = time.time() > changed / 1e9 + CLOCK_GRAIN_S
        names = {name for name in os.listdir(self._dir_fd) if layout.is_segment_name(name)}
        with self._lock:
            known = {file.name: file for file in self._files.values()}
            for name in known.keys() - names:
                if known[name].state is not State.WRITING:
                    self._lose(known[name])
        all_met = True
        for name in sorted(names - known.keys()):
            all_met &= not stop and self._meet(name, stop)
        self._listed_at = changed if all_met and settled else None

    def _meet(self, name: str, stop: StopFlag) -> bool:
        """Take up a file that was not known. False where it may be half made, and is to be met again."""
        file = File(next(self._numbers), name, State.GROWING)
        try:
            with self.open_file(file) as fd:
                head = layout.parse_head(Kind.SEGMENT, self.shape, _read(fd, BLOCK_BYTES, 0))
                modified = os.fstat(fd).st_mtime
        except OSError:
            return False
        least = self.shape.map_blocks(head.capacity) if head is not None else 0
        if head is None or not least <= head.count <= layout.MAX_MAP_BLOCKS:
            return time.time() > modified + HALF_MADE_S
        file.capacity = file.end_block = head.capacity
        file.map_blocks = head.count
        file.next_block = 1 + head.count
        with self._lock:
            self._files[file.number] = file
        self._read_more(file, self._is_left(file), stop)
        return True

    def _is_left(self, file: File) -> bool:
        """Say whether a segment without a footer was left by a dead writer: the living hold a lock."""
        try:
            with self.open_file(file) as fd:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                fcntl.flock(fd, fcntl.LOCK_UN)
        except OSError:
            return False
        return True

    def _read_more(self, file: File, is_dead: bool, stop: StopFlag) -> None:
        """Learn what another process has written to a segment since the last time."""
        with suppress(OSError), self.open_file(file) as fd:
            dead = self.read_map(file)
            if dead is None:
                return
            found = os.fstat(fd)
            if not self._load_footer(file, fd, found.st_size, dead):
                self._walk(file, fd, found.st_size, dead, is_dead, stop)
            with self._lock:
                file.bytes = found.st_blocks * 512

    def _load_footer(self, file: File, fd: int, size: int, dead: bytes) -> bool:
        if size % BLOCK_BYTES or size < (2 + file.map_blocks) * BLOCK_BYTES:
            return False
        head = layout.parse_head(Kind.FOOTER, self.shape, _read(fd, BLOCK_BYTES, size - BLOCK_BYTES))
        if head is None:
            return False
        length = layout.blocks_of(layout.footer_entry_bytes(head)) * BLOCK_BYTES
        if head.block * BLOCK_BYTES + length + BLOCK_BYTES != size:
            return False
        found = layout.parse_footer(self.shape, head, _read(fd, length, head.block * BLOCK_BYTES))
        if found is None:
            return False
        with self._lock:
            for record in found:
                self._take_up(file, record, dead, head.block * BLOCK_BYTES)
            file.next_block = head.block
            file.state = State.SEALED
        return True

    def _walk(self, file: File, fd: int, size: int, dead: bytes, is_dead: bool, stop: StopFlag) -> None:
        """Walk the extents from where the last walk ended to the first that is not whole.

        Its writer may be at it. Where that one is dead, go on behind it.
        """
        while not stop and file.next_block < file.end_block:
            at, found = file.next_block, self._extent_at(fd, file.next_block)
            while found is None and is_dead and not stop:
                if (at := data_behind(fd, at)) >= file.end_block:
                    return
                found = self._extent_at(fd, at)
            if found is None:
                return
            head, block = found
            with self._lock:
                for record in layout.parse_extent(self.shape, head, block):
                    self._take_up(file, record, dead, size)
                file.next_block = at + 1 + head.count * self.shape.chunk_blocks

    def _extent_at(self, fd: int, at: int) -> tuple[layout.Head, bytes] | None:
        """Return the head of the extent that begins at a block, and the block."""
        block = _read(fd, BLOCK_BYTES, at * BLOCK_BYTES)
        head = layout.parse_head(Kind.EXTENT, self.shape, block)
        if head is None or head.block != at or not 0 < head.count <= EXTENT_RECORDS:
            return None
        return head, block

    def _take_up(self, file: File, record: Record | seal.Verdict, dead: bytes, size: int) -> None:
        if record is seal.Verdict.FOREIGN:
            self._foreign += 1
            return
        if not isinstance(record, Record) or not self._fits(file, record.block, size):
            self._torn += 1
            return
        if not dead[self.map_index(file, record.block)]:
            self._insert(file, record)

    def _fits(self, file: File, block: int, size: int) -> bool:
        end = block + self.shape.chunk_blocks
        return file.map_blocks < block and end <= file.end_block and end * BLOCK_BYTES <= size

    # ----------------------------------------------------------------------------- reading

    def read(self, file: File, wanted: Sequence[tuple[Record, memoryview]]) -> list[int]:
        """Read chunks of one file into their slots. Return how many bytes of each were there. OSError."""
        wanted = list(wanted)
        moved = []
        with self.open_file(file) as fd:
            for record, view in wanted:
                moved.append(_move_all(fd, [view], record.block * BLOCK_BYTES, os.preadv))
        return moved

    def is_good(self, record: Record, view: memoryview, moved: int) -> bool:
        """Say whether bytes that were read are those that were put."""
        return moved == view.nbytes and (self.place.is_bare or crc32c.crc32c(view) == record.checksum)

    def unfinished(self, file: File, block: int) -> bool:
        """Where a chunk's writer has not finished it: note that, and forget it. It is no damage."""
        with self._lock:
            if file.state is not State.GROWING:
                return False
            self._torn += 1
            self._forget_record(file, block)
            return True

    # ------------------------------------------------------------------------------ upkeep

    def discard(self, key: OffloadKey) -> bool:
        """Discard every place of a chunk. OSError where that cannot be written down."""
        found = False
        while (spot := self.find(key)) is not None:
            file, record = spot
            with self._lock:
                self._forget_record(file, record.block)
            self.mark_dead(file, record.block)
            found = True
        return found

    def touch(self, key: OffloadKey) -> bool:
        """Set the time of the last use of a chunk's segment to now. OSError."""
        spot = self.find(key)
        if spot is None or self._dir_fd < 0:
            return False
        path = f"/proc/self/fd/{self._dir_fd}/{spot[0].name}"
        os.utime(path, ns=(time.time_ns(), os.stat(path).st_mtime_ns))
        return True

    def segments(self) -> list[SegmentInfo]:
        """See ``Shelf.segments``."""
        with self._lock:
            return [
                SegmentInfo(file.number, file.name, file.state, file.found, len(file.records), file.bytes)
                for file in self._files.values()
            ]

    def keys(self, number: int) -> list[OffloadKey]:
        """See ``Shelf.keys``."""
        with self._lock:
            file = self._files.get(number)
            return [record.key for record in file.records.values()] if file is not None else []

    def marks(self, number: int) -> array[int]:
        """See ``Shelf.marks``."""
        return array("Q", map(fingerprint, self.keys(number)))

    def take_lost(self) -> list[OffloadKey]:
        """See ``Shelf.take_lost``."""
        with self._lock:
            lost = list(self._lost)
            self._lost.clear()
        return lost

    def kill(self, number: int, block: int) -> None:
        """See ``Shelf.kill``."""
        with self._lock:
            file = self._files.get(number)
            if file is None:
                return
            self._forget_record(file, block)
        self.mark_dead(file, block)

    def drop(self, number: int) -> int:
        """See ``Shelf.drop``."""
        with self._lock:
            file = self._files.get(number)
        if file is None or file.state is State.WRITING:
            return 0
        try:
            os.unlink(file.name, dir_fd=self._dir_fd)
        except FileNotFoundError:
            return 0
        with self._lock:
            self._lose(file)
        return file.bytes

    def forget(self, number: int) -> None:
        """See ``Shelf.forget``."""
        with self._lock:
            file = self._files.get(number)
            if file is not None:
                self._lose(file)

    def copy(self, number: int, stop: StopFlag) -> tuple[int, int]:
        """See ``Shelf.copy``."""
        with self._lock:
            file = self._files.get(number)
            if file is None or file.state is not State.SEALED:
                return 0, 0
            blocks = list(file.records)
        with self.open_file(file) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            there = sorted(self.sort_out(file, blocks))
            added, each = 0, max(1, COPIED_BYTES // self.shape.chunk_bytes)
            for first in range(0, len(there), each):
                if stop:
                    raise InterruptedError(errno.ECANCELED, os.strerror(errno.ECANCELED))
                added += self._copy_some(file, there[first : first + each])
        return len(there), added

    def _copy_some(self, file: File, blocks: Sequence[int]) -> int:
        with self._lock:
            sources = [Source(file, file.records[block]) for block in blocks if block in file.records]
        added, done, size = 0, 0, self.shape.chunk_bytes
        whole = memoryview(mmap.mmap(-1, max(1, len(sources)) * size))
        views = [whole[i * size : (i + 1) * size] for i in range(len(sources))]
        moved = self.read(file, list(zip([source.record for source in sources], views, strict=True)))
        if not all(map(self.is_good, (source.record for source in sources), views, moved)):
            raise OSError(errno.EIO, "a chunk failed its check")  # its next get sees to that
        keys = [source.record.key for source in sources]
        while done < len(keys):
            written, more, error = self.write(keys[done:], views[done:], sources[done:])
            if error is not None:
                raise error
            done, added = done + written, added + more
        return added

    def adopt(self, stop: StopFlag) -> int:
        """See ``Shelf.adopt``."""
        added = 0
        with self._looking:
            for file in self._growing_files():
                if stop:
                    break
                with suppress(OSError), self.open_file(file, os.O_RDWR) as fd:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self._read_more(file, True, stop)  # all that the dead has written
                    self._check_all(file, stop)
                    if file.state is State.GROWING and not stop and not file.gone:
                        added += self._seal(file, fd)
        return added

    def _check_all(self, file: File, stop: StopFlag) -> None:
        """Check each record of a segment whose writer is dead, and forget those that are torn."""
        with self._lock:
            records = list(file.records.values())
        view = memoryview(mmap.mmap(-1, self.shape.chunk_bytes))
        for record in records:
            if stop or file.state is not State.GROWING:
                break
            (moved,) = self.read(file, [(record, view)])
            if not self.is_good(record, view, moved):
                self.unfinished(file, record.block)

    def finish(self) -> int:
        """See ``Shelf.finish``."""
        with self._lock:
            file = self._stop_growing()
        return self._seal_if_over(file) if file is not None else 0

    def counts(self) -> ShelfCounts:
        """See ``Shelf.counts``."""
        with self._lock:
            chunks = sum(len(file.records) for file in self._files.values())
            return ShelfCounts(chunks, self._torn, self._foreign, chunks * _SPOT_BYTES)

    def close(self) -> None:
        """See ``Shelf.close``."""
        for file in self._files.values():
            if file.fd >= 0:
                os.close(file.fd)
                file.fd = -1
        if self._dir_fd >= 0:
            os.close(self._dir_fd)
            self._dir_fd = -1


def _blocks(content: bytes) -> mmap.mmap:
    """Return aligned memory with ``content``, filled up to whole blocks.

    Like all such memory here it is not closed but let go: a traceback may still hold a view of it.
    """
    memory = mmap.mmap(-1, layout.blocks_of(len(content)) * BLOCK_BYTES)
    memory[: len(content)] = content
    return memory


def _is_removed(fd: int) -> bool:
    """Say whether a file was removed under who has it open: who did it has counted its bytes."""
    return os.fstat(fd).st_nlink == 0


def _read(fd: int, length: int, offset: int) -> bytes:
    """Read what is there of some blocks."""
    if not length:
        return b""
    memory = mmap.mmap(-1, length)
    return memory[: _move_all(fd, [memoryview(memory)], offset, os.preadv)]


def _move_all(
    fd: int, parts: list[memoryview], offset: int, move: Callable[[int, list[memoryview], int], int]
) -> int:
    """Move parts that follow each other in the file. Return the bytes moved before its end. OSError."""
    writing, done = move is os.pwritev, 0
    parts = list(parts)
    while parts:
        try:
            moved = move(fd, parts[:MAX_PARTS], offset + done)
        except OSError as error:  # the rest of a short file is not aligned: that is its end
            if error.errno == errno.EINVAL and not writing and done:
                return done
            raise
        if moved == 0:
            if writing:
                raise OSError(errno.EIO, "nothing was written")
            return done
        done += moved
        while parts and moved >= parts[0].nbytes:
            moved -= parts.pop(0).nbytes
        if parts and moved:
            parts[0] = parts[0][moved:]
    return done
