"""The primary tier's bytes: one region of equally long slots, shared by the processes of an engine.

Needs neither torch nor numpy: the scheduler's process uses it for views of slots.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import mmap
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from kvtier._core.slot_trailers import SlotTrailers, slot_trailers_bytes
from kvtier._forks import keep_fd_from_children, keep_memory_from_children
from kvtier._log import GuardedLogger
from kvtier._memory import _locked_file, guard, memory_limits, pages
from kvtier._memory._locked_file import KEPT_FOR, NOTE_BYTES, PREFIX, LockedFile, remove_stale_files
from kvtier._memory.population import Population, SlotPart
from kvtier.errors import RegionError, StateError

logger = GuardedLogger("kvtier.memory")

SHARED_MEMORY = Path("/dev/shm")
_JOIN_S = 10.0
_MAX_NAME = 160


class Region:
    """``slots`` slots of ``chunk_bytes`` bytes each, one after the other, page-aligned.

    A slot may be used only after ``populate`` has reported it: a page without memory kills the process that
    touches it. It is a context manager that closes.
    """

    def __init__(
        self,
        slots: int,
        chunk_bytes: int,
        file: LockedFile | None = None,
        metadata_bytes: int = 0,
        keep_s: float = 0.0,
    ) -> None:
        self.slots = slots
        self.chunk_bytes = chunk_bytes
        self.path = file.path if file else None
        self._file = file
        fd, nbytes = (file.fd if file else -1), slots * chunk_bytes + metadata_bytes
        flags = mmap.MAP_SHARED if file else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            self._map: mmap.mmap | None = mmap.mmap(fd, nbytes, flags=flags)
        except OSError as error:
            free = os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE
            text = f"the primary tier needs {nbytes} bytes, but about {free} are free ({error.strerror})"
            raise RegionError(f"{text}: lower cpu_bytes_to_use") from error
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._guard: Callable[[], object] | None = None
        with suppress(OSError):  # A dump takes minutes, during which a tier process could write to slots.
            self._map.madvise(mmap.MADV_DONTDUMP)
        if file is not None:
            keep_memory_from_children(self._map, self._address)
        self._populations: list[Population] = []
        self._has_huge_pages: bool | None = None  # None until huge pages were requested
        self._backing = threading.Lock()  # held while ``back`` uses the file
        # Also runs at interpreter exit, so that a forgotten region frees its memory.
        self._keep_s = keep_s
        self._release = weakref.finalize(self, _locked_file.release, file, keeps=keep_s > 0) if file else None

    @staticmethod
    def open(
        name: str,
        slots: int,
        chunk_bytes: int,
        directory: Path = SHARED_MEMORY,
        metadata_bytes: int = 0,
        contents: str = "",
        keep_s: float = 0.0,
        is_first: bool = True,
    ) -> Region:
        """Create the shared region ``name``, or join it if a living process has it open.

        First removes files that dead processes left in ``directory``, which is on a file system in memory.
        Each engine on this machine needs its own ``name``. All users of the region must pass the same
        ``contents``, ASCII words, because regions of equal size can have different layouts. RegionError if
        there is no room, a living region of that name has another size or contents, the directory does not
        exist, or ``chunk_bytes`` is not a multiple of the page size.

        If ``keep_s`` is above 0, the region of an engine that has ended is taken over if it has this size and
        contents, and this one is kept that many seconds after its end. The first word of ``contents`` names
        the engine. Regions kept for other engines stay, even if their guards were killed. The metadata begins
        with the trailers of the slots; the rest is zeros. One process of an engine ``is_first``: others wait
        for it.
        """
        _require_shape(slots, chunk_bytes)
        path, nbytes = directory / _file_name(name), slots * chunk_bytes + metadata_bytes
        owner, note = contents.split(" ")[0] if keep_s else "", _note(contents, kept=keep_s > 0)
        file = None
        if keep_s and is_first and not path.exists():
            cleared = range(slots * chunk_bytes + slot_trailers_bytes(slots), nbytes)
            file = _locked_file.adopt(path, nbytes, note, cleared)
        elif keep_s:
            _locked_file.wait_for(path)
        remove_stale_files(directory, owner, partial(_guard_orphan, keep_s) if is_first else None)
        file = file or _locked_file.create_or_join(path, nbytes, note)
        return Region._over(file, slots, chunk_bytes, metadata_bytes, keep_s)

    @staticmethod
    def _over(
        file: LockedFile, slots: int, chunk_bytes: int, metadata_bytes: int, keep_s: float = 0.0
    ) -> Region:
        """Make a region of a file; release the file if that fails."""
        try:
            _allocate(file, slots * chunk_bytes, metadata_bytes)
            return Region(slots, chunk_bytes, file, metadata_bytes, keep_s)
        except BaseException:
            _locked_file.release(file)
            raise

    @staticmethod
    def anonymous(slots: int, chunk_bytes: int) -> Region:
        """Make a region of this process alone, without a file."""
        _require_shape(slots, chunk_bytes)
        return Region(slots, chunk_bytes)

    @staticmethod
    def unnamed(slots: int, chunk_bytes: int, metadata_bytes: int = 0) -> Region:
        """Make a region that can be passed to other processes through ``fileno``, or raise RegionError."""
        _require_shape(slots, chunk_bytes)
        file = _locked_file.create_unnamed(slots * chunk_bytes + metadata_bytes)
        return Region._over(file, slots, chunk_bytes, metadata_bytes)

    @staticmethod
    def borrowed(fd: int, slots: int, chunk_bytes: int, metadata_bytes: int = 0) -> Region:
        """Map another process's region, and own its descriptor; raise RegionError if it is smaller.

        Children do not inherit the mapping, so no write to the slots outlives this process.
        """
        _require_shape(slots, chunk_bytes)
        file = _locked_file.borrow(fd, slots * chunk_bytes + metadata_bytes)
        region = Region(slots, chunk_bytes, file, metadata_bytes)
        region._require_open().madvise(mmap.MADV_DONTFORK)
        return region

    def fileno(self) -> int:
        """Return the file's descriptor, for ``borrowed``; StateError if the region is closed or anonymous."""
        self._require_open()
        if self._file is None:
            raise StateError("an anonymous region has no file that could be shared")
        return self._file.fd

    @property
    def nbytes(self) -> int:
        return self.slots * self.chunk_bytes

    @property
    def address(self) -> int:
        """Address of slot 0 in this process."""
        self._require_open()
        return self._address

    def view(self, slot: int) -> memoryview:
        """Return the bytes of one slot: one-dimensional, format ``B``, writable.

        A view keeps the memory mapped, also beyond ``close``. Raises StateError after that, and IndexError.
        """
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot is {slot}; the region has {self.slots} slots")
        start = slot * self.chunk_bytes
        with memoryview(self._require_open()) as whole:
            return whole[start : start + self.chunk_bytes]

    @property
    def metadata(self) -> memoryview:
        """The shared bytes behind the slots, backed with memory; zeros when the region is new."""
        with memoryview(self._require_open()) as whole:
            return whole[self.nbytes :]

    @property
    def trailers(self) -> SlotTrailers:
        """The trailers of the slots, at the front of the metadata."""
        return SlotTrailers(self.metadata, self.slots)

    def claim(self) -> None:
        """Become the only owner of the slots' contents, until the region closes, or raise RegionError.

        Otherwise two engines with the same id would overwrite each other's chunks. An anonymous region always
        belongs to its process.
        """
        self._require_open()
        if self._file is not None and not _locked_file.claim(self._file):
            raise RegionError(
                f"{self.path} belongs to another running engine: set a different engine_id for each engine"
            )

    def start_guard(self, *, until_claimed: bool = False) -> None:
        """Start a process that removes the file after all its users have ended in any way.

        If that fails, it logs a warning, and the next start on this machine removes the file.
        ``until_claimed``: the guard ends when another process claims the region and starts its own guard.
        """
        self._require_open()
        if self._file is None or self._file.path is None or self._guard is not None:
            return
        try:
            fd = guard.start(str(self._file.path), self._file.fd, self._keep_s, until_claimed=until_claimed)
        except OSError as error:
            logger.warning("%s: if the engine is killed, its file stays until the next start", error)
            return
        keep_fd_from_children(fd)
        self._guard = weakref.finalize(self, os.close, fd)

    def populate(
        self, on_ready: Callable[[range], None], parts: Sequence[SlotPart] = (), threads: int | None = None
    ) -> None:
        """Start allocating memory for the slots, in daemon threads, in pieces from slot 0 on.

        Every process may do so, more than once: pages keep their content. If memory runs out, or a memory
        limit is near, it logs one error, and the region has fewer usable slots. ``close`` stops it. The
        threads call ``on_ready`` with slots that are usable from now on, and with an empty range when no more
        will follow, unless the region is closed before. It must not block. ``parts`` contains the NUMA node
        for each part of a slot; by default the system decides.
        """
        mapping = self._require_open()
        population = Population(self.slots, self.chunk_bytes, self._address, self._file, on_ready, parts)
        self._populations.append(population)
        population.start(mapping, threads)

    def back(self, slots: range) -> None:
        """Allocate memory for slots at once, or raise OSError. Their content stays."""
        with self._backing:
            mapping, fd = self._require_open(), self._file.fd if self._file else None
            if self._has_huge_pages is None:
                self._has_huge_pages = pages.ask_for_huge(mapping, self.path, shared=fd is not None)
            start, nbytes = slots.start * self.chunk_bytes, len(slots) * self.chunk_bytes
            is_there = fd is not None and os.fstat(fd).st_blocks * 512 >= start + nbytes  # from slot 0 on
            if not is_there and (limit := memory_limits.exceeded_by(nbytes)):
                raise OSError(errno.ENOMEM, str(limit))
            if code := pages.back(self._address + start, nbytes, fd, start, huge=self._has_huge_pages):
                raise OSError(code, os.strerror(code))

    def close(self, wait_s: float | None = None) -> None:
        """Release the region; the last user removes the file. May be called again.

        Memory stays mapped while views or a populating thread use it; the thread is awaited.
        """
        until_s = time.monotonic() + (_JOIN_S if wait_s is None else wait_s)
        for population in self._populations:
            population.stop()
        for population in self._populations:
            population.join(until_s)
        self._populations.clear()
        with self._backing:
            mapping, self._map = self._map, None
        if mapping is not None:
            try:
                mapping.close()
            except BufferError:  # the mapping ends with the last view
                logger.debug("views of the region are still in use at its end")
        if self._release is not None:
            self._release()
        if self._guard is not None:
            self._guard()

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _require_open(self) -> mmap.mmap:
        mapping = self._map
        if mapping is None:
            raise StateError("the region is closed")
        return mapping


class HeapMemory(Region):
    """Page-aligned slots in private memory, to test a tier without a primary tier.

    Args:
        slots: number of slots.
        chunk_bytes: size of a slot; a multiple of the page size keeps all slots aligned.
    """

    def __init__(self, slots: int, chunk_bytes: int) -> None:
        super().__init__(slots, chunk_bytes)


def _note(contents: str, *, kept: bool) -> bytes:
    contents = KEPT_FOR + contents if kept else contents
    if len(contents) > NOTE_BYTES:
        raise ValueError(f"contents has {len(contents)} characters; at most {NOTE_BYTES} are allowed")
    return contents.encode("ascii").ljust(NOTE_BYTES, b"\0") if contents else b""


def _guard_orphan(keep_s: float, path: Path, fd: int) -> None:
    """Start a guard for another engine's file, whose own guard was killed, for example with its container."""
    os.close(guard.start(str(path), fd, keep_s))


def _allocate(file: LockedFile, offset: int, nbytes: int) -> None:
    """Allocate memory for a part of the file that is used at once; raise RegionError if that fails."""
    if nbytes:
        try:
            os.posix_fallocate(file.fd, offset, nbytes)
        except OSError as error:
            raise RegionError(
                f"{file.path or 'shared memory'}: no space for {nbytes} bytes: {error.strerror}"
            ) from error


def _require_shape(slots: int, chunk_bytes: int) -> None:
    if slots < 1:
        raise RegionError(f"the primary tier has {slots} slots: set cpu_bytes_to_use to at least one chunk")
    if chunk_bytes < 1 or chunk_bytes % mmap.PAGESIZE:
        raise RegionError(
            f"chunk_bytes is {chunk_bytes}; it must be a multiple of {mmap.PAGESIZE}, the page size"
        )


def _file_name(name: str) -> str:
    """Return a file name for ``name``; different names stay different."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "-", name)[:_MAX_NAME]
    if safe == name and name:
        return PREFIX + name
    return f"{PREFIX}{safe}.{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}"
