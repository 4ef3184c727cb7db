"""Work on files in Python: what the tier does where the native helper is missing.

The same results as in kvtier_native.c, by the same system calls. It takes the interpreter lock several
times for each chunk, and copies each once more, which is slow beside a busy engine thread.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import ClassVar

from kvtier.keys import GROUP_BYTES, MAX_KEY_BYTES
from kvtier.tiers import _seal as seal
from kvtier.tiers.fs._files.base import Failures, key_of, part_path
from kvtier.tiers.fs._files.call import FileCall, Flag, Place, Result, StopFlag
from kvtier.tiers.fs._files.index import fingerprint
from kvtier.tiers.fs._layout import (
    BLOCK_BYTES,
    CAREFULLY,
    DIRECTORY_MODE,
    FILE_MODE,
    chunk_path,
    names_in,
    open_folder,
)

_PUBLISH_ATTEMPTS = 3
_MAX_DEPTH = 16
_RESULTS = {
    seal.Integrity.SOUND: Result.OK,
    seal.Integrity.TORN: Result.TORN,
    seal.Integrity.FOREIGN: Result.FOREIGN,
    seal.Integrity.CHECKSUM: Result.CHECKSUM,
}
_MISSING = (FileNotFoundError, NotADirectoryError)


class ChunkFiles:
    """Work on chunks' files. All calls block, and may be made from any thread, several at once.

    ``first`` and ``end`` delimit a run of the call's chunks: its results are written and nobody else's.
    Errors of chunks are results, never exceptions.
    """

    is_native: ClassVar[bool] = False
    """Whether the native helper does the work."""

    def put(self, call: FileCall, first: int, end: int) -> int:
        """Write chunks that are not there, each whole or not at all.

        Returns:
            The bytes that were added to the file system, directories included.
        """
        added = 0

        def put_one(i: int, path: str) -> int:
            nonlocal added
            result, more = _put_chunk(call, i, path, file)
            added += more
            return result

        with _file_buffer(call) as file:
            _each(call, first, end, put_one)
        return added

    def get(self, call: FileCall, first: int, end: int) -> None:
        """Read chunks into their slots and prove them by their trailers."""
        with _file_buffer(call) as file:
            _each(call, first, end, lambda i, path: _get_chunk(call, i, path, file))

    def contains(self, call: FileCall, first: int, end: int) -> None:
        """Look whether the chunks' files are there: EXISTS, TORN where the length is wrong, or ABSENT."""
        _each(call, first, end, lambda i, path: _existing(call, i, path))

    def discard(self, call: FileCall, first: int, end: int) -> int:
        """Remove the chunks' files. Returns the bytes that were removed."""

        def remove(_: int, path: str) -> int:
            os.unlink(path, dir_fd=call.place.root_fd)
            return Result.OK

        _each(call, first, end, remove)
        return call.results[first:end].count(Result.OK) * call.place.file_bytes

    def touch(self, call: FileCall, first: int, end: int) -> None:
        """Set the time of the last use of the chunks' files to now: OK or ABSENT."""

        def touch_one(_: int, path: str) -> int:
            found = os.stat(path, dir_fd=call.place.root_fd, follow_symlinks=False)
            times = (time.time_ns(), found.st_mtime_ns)
            os.utime(path, ns=times, dir_fd=call.place.root_fd, follow_symlinks=False)
            return Result.OK

        _each(call, first, end, touch_one)

    def fingerprints(self, place: Place, part: int, stop: StopFlag) -> array[int]:
        """List a part of an epoch's chunks, for the index. OSError where it cannot be read.

        Args:
            place: the epoch.
            part: 0 to ``PARTS`` - 1.
            stop: set where the caller does not want to know any more.

        Returns:
            ``index.fingerprint`` of each chunk's key, type code ``Q``.
        """
        marks = array("Q")
        try:
            folders = names_in(place.root_fd, part_path(place, part))
        except FileNotFoundError:
            return marks
        for folder in folders:
            if stop:
                raise InterruptedError(errno.EINTR, "stopped")
            with suppress(OSError):
                names = names_in(place.root_fd, f"{part_path(place, part)}/{folder}")
                keys = (key_of(f"{part:03x}/{folder}/{name}") for name in names)
                marks.extend(fingerprint(key) for key in keys if key is not None)
        return marks

    def tree_bytes(self, root_fd: int, path: str, stop: StopFlag, failures: Failures | None = None) -> int:
        """Return the bytes on disk below a directory. OSError where it cannot be read.

        Directories below it that cannot be read are left out, and added to ``failures``.
        """
        return _Walk(False, stop, failures).below(root_fd, path)

    def tree_remove(self, root_fd: int, path: str, stop: StopFlag, failures: Failures | None = None) -> int:
        """Remove a directory. Returns the bytes removed. OSError where it cannot be removed.

        What is below it and cannot be removed is added to ``failures``.
        """
        removed = _Walk(True, stop, failures).below(root_fd, path)
        with suppress(FileNotFoundError):
            os.rmdir(path, dir_fd=root_fd)
        return removed


@contextmanager
def _file_buffer(call: FileCall) -> Iterator[memoryview]:
    """Yield memory for one whole file, aligned as direct I/O wants it."""
    with mmap.mmap(-1, call.place.file_bytes) as pages, memoryview(pages) as file:
        yield file


def _each(call: FileCall, first: int, end: int, work: Callable[[int, str], int]) -> None:
    """Do something with each chunk and the path of its file."""
    for i in range(first, end):
        try:
            if call.stop:
                call.results[i] = -errno.ECANCELED
            elif GROUP_BYTES < len(call.keys[i]) <= MAX_KEY_BYTES:
                call.results[i] = work(i, chunk_path(call.place.data_dir, call.keys[i]))
            else:
                call.results[i] = -errno.EINVAL
        except _MISSING:  # a put names its own failures: here nothing was found
            call.results[i] = Result.ABSENT
        except OSError as error:
            call.results[i] = -(error.errno or errno.EIO)


def _put_chunk(call: FileCall, i: int, path: str, file: memoryview) -> tuple[int, int]:
    """Return the result and the bytes that the file system has got more."""
    assert call.memory is not None
    assert call.slots is not None
    place, key = call.place, call.keys[i]
    result = _existing(call, i, path)
    if result != Result.ABSENT:
        return result, 0
    tmp = f"{place.tmp_dir}/{call.serial + i:x}"
    with call.memory.view(call.slots[i]) as slot:
        file[: place.chunk_bytes] = slot
    with file[: place.chunk_bytes] as payload:
        trailer = seal.seal(key, payload, place.digest)
    file[place.chunk_bytes :] = trailer.ljust(BLOCK_BYTES, b"\0")
    try:
        _write_temporary(call, tmp, file)
        made = _publish(call, tmp, path)
    except OSError as error:
        with suppress(OSError):
            os.unlink(tmp, dir_fd=place.root_fd)
        return -(error.errno or errno.EIO), 0
    return Result.OK, place.file_bytes + (made * _directory_bytes(place.root_fd, path) if made else 0)


def _directory_bytes(root_fd: int, path: str) -> int:
    """Return what the directory of a new file takes on disk: many file systems keep small ones in inodes."""
    try:
        return os.stat(os.path.dirname(path), dir_fd=root_fd, follow_symlinks=False).st_blocks * 512
    except OSError:  # it has vanished: too much is better than too little
        return BLOCK_BYTES


def _existing(call: FileCall, i: int, path: str) -> int:
    """Return whether the chunk is there: its length is looked at and nothing else."""
    try:
        found = os.stat(path, dir_fd=call.place.root_fd, follow_symlinks=False)
    except _MISSING:
        return Result.ABSENT
    if stat.S_ISREG(found.st_mode) and found.st_size == call.place.file_bytes:
        return Result.EXISTS
    call.inodes[i] = found.st_ino
    return Result.TORN


def _write_temporary(call: FileCall, tmp: str, file: memoryview) -> None:
    place = call.place
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW | _direct_flag(call)
    try:
        fd = os.open(tmp, flags, FILE_MODE, dir_fd=place.root_fd)
    except FileNotFoundError:
        _make_parents(place.root_fd, tmp)
        fd = os.open(tmp, flags, FILE_MODE, dir_fd=place.root_fd)
    try:
        _write(fd, file)
        if place.flags & Flag.SYNC_DATA:
            os.fdatasync(fd)
    finally:
        os.close(fd)


def _publish(call: FileCall, tmp: str, path: str) -> int:
    """Give a whole temporary file its name. Return how many directories were made for it."""
    root_fd, made = call.place.root_fd, 0
    for attempt in range(_PUBLISH_ATTEMPTS + 1):
        try:
            os.rename(tmp, path, src_dir_fd=root_fd, dst_dir_fd=root_fd)
            break
        except FileNotFoundError:
            if attempt == _PUBLISH_ATTEMPTS:
                raise
            made += _make_parents(root_fd, path)
    if call.place.flags & Flag.SYNC_DIRECTORY:
        _sync_parents(root_fd, path, made)
    return made


def _get_chunk(call: FileCall, i: int, path: str, file: memoryview) -> int:
    assert call.memory is not None
    assert call.slots is not None
    place, key = call.place, call.keys[i]
    fd = os.open(path, os.O_RDONLY | CAREFULLY | _direct_flag(call), dir_fd=place.root_fd)
    try:
        result = Result.TORN
        if _read(fd, file) == place.file_bytes:
            with file[: place.chunk_bytes] as payload, file[place.chunk_bytes :] as trailer:
                result = _RESULTS[seal.check(trailer, key, payload, place.digest)]
        if result != Result.OK:
            call.inodes[i] = os.fstat(fd).st_ino
            return result
    finally:
        os.close(fd)
    with call.memory.view(call.slots[i]) as slot:
        slot[:] = file[: place.chunk_bytes]
    return result


def _write(fd: int, file: memoryview) -> None:
    done = 0
    while done < len(file):
        with file[done:] as rest:
            moved = os.pwritev(fd, [rest], done)
        if moved == 0:
            raise OSError(errno.EIO, "nothing was written")
        done += moved


def _read(fd: int, file: memoryview) -> int:
    """Fill ``file`` from the beginning. Returns the bytes read before the end of the file."""
    done = 0
    while done < len(file):
        try:
            with file[done:] as rest:
                moved = os.preadv(fd, [rest], done)
        except OSError as error:  # the rest of a short file is not aligned: that is its end
            if error.errno == errno.EINVAL and done:
                return done
            raise
        if moved == 0:
            return done
        done += moved
    return done


def _direct_flag(call: FileCall) -> int:
    return getattr(os, "O_DIRECT", 0) if call.place.flags & Flag.DIRECT else 0


def _make_parents(root_fd: int, path: str) -> int:
    """Make the missing directories between the root and ``path``. Return how many were made."""
    parent = os.path.dirname(path)
    if not parent:
        return 0
    made = 0
    try:
        os.mkdir(parent, DIRECTORY_MODE, dir_fd=root_fd)
    except FileExistsError:
        return 0
    except FileNotFoundError:
        made = _make_parents(root_fd, parent)
        try:
            os.mkdir(parent, DIRECTORY_MODE, dir_fd=root_fd)
        except FileExistsError:
            return made
    return made + 1


def _sync_parents(root_fd: int, path: str, made: int) -> None:
    """Flush the directory that holds ``path``, and those that hold ``made`` new ones above it."""
    while path := os.path.dirname(path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root_fd)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        if made == 0:
            return
        made -= 1


class _Walk:
    """Adds up, or removes, what is in a directory. What vanishes meanwhile is no error."""

    def __init__(self, removing: bool, stop: StopFlag, failures: Failures | None) -> None:
        self._removing = removing
        self._stop = stop
        self._failures: Failures = Counter() if failures is None else failures

    def below(self, parent_fd: int, name: str, depth: int = 0) -> int:
        """Return the bytes. OSError where the directory itself cannot be read, or ``stop`` was set."""
        total = 0
        with open_folder(parent_fd, name) as fd:
            device = os.fstat(fd).st_dev
            for entry in os.listdir(fd):
                if self._stop:
                    break
                with suppress(OSError):
                    total += self._entry(fd, entry, device, depth)
        if self._stop:
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED), name)
        return total

    def _entry(self, fd: int, name: str, device: int, depth: int) -> int:
        found = os.stat(name, dir_fd=fd, follow_symlinks=False)
        if found.st_dev != device:
            return 0
        below, remove = 0, os.unlink
        if stat.S_ISDIR(found.st_mode) and depth < _MAX_DEPTH:
            remove = os.rmdir
            try:
                below = self.below(fd, name, depth + 1)
            except OSError as error:
                self._note(error)
        if self._removing:
            try:
                remove(name, dir_fd=fd)
            except OSError as error:  # who has removed it counts it, and nobody else
                if remove is os.unlink or error.errno != errno.ENOTEMPTY:  # what is in it was counted
                    self._note(error)
                return below
        return below + found.st_blocks * 512

    def _note(self, error: OSError) -> None:
        if error.errno not in (errno.ENOENT, errno.ECANCELED):
            self._failures[error.errno or errno.EIO] += 1
