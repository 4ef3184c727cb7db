"""Allocates the memory of a region's slots, in threads, in pieces from slot 0 on."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvtier._log import GuardedLogger
from kvtier._memory import memory_limits, numa, pages
from kvtier._memory._locked_file import LockedFile

logger = GuardedLogger("kvtier.memory")

PIECE_BYTES = 64 * 2**20
THREAD_NAME = "kvtier-populate"

_BLOCK_BYTES = 512  # unit of ``st_blocks`` on every file system
_CPUS_PER_THREAD = 4
_MAX_THREADS = 4


@dataclass(frozen=True, slots=True)
class SlotPart:
    """A part of each slot that one worker uses more than others."""

    offset: int  # in the slot
    nbytes: int
    node: int | None  # the worker's NUMA node, or None if it is unknown or does not matter


class Population:
    """The threads that allocate memory for the slots of one region: see ``Region.populate``.

    They keep the memory mapped, so they may end after the region was closed.
    """

    def __init__(
        self,
        slots: int,
        chunk_bytes: int,
        address: int,
        file: LockedFile | None,
        on_ready: Callable[[range], None],
        parts: Sequence[SlotPart],
    ) -> None:
        self._slots = slots
        self._chunk_bytes = chunk_bytes
        self._address = address
        self._path = file.path if file else None
        self._fd = os.dup(file.fd) if file else None
        self._there_bytes = 0  # bytes from slot 0 on that an earlier engine allocated
        if self._fd is not None:
            weakref.finalize(self, os.close, self._fd).atexit = False  # threads may still use it
            status = os.fstat(self._fd)
            behind = status.st_size - slots * chunk_bytes  # allocated already
            self._there_bytes = status.st_blocks * _BLOCK_BYTES - behind
        self._on_ready = on_ready
        self._parts = parts or (SlotPart(0, chunk_bytes, None),)
        self._start_s = time.monotonic()
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()  # guards the fields below
        self._has_huge_pages: bool | None = None  # None until huge pages were requested
        self._next = 0
        self._ready = 0
        self._failed = False

    def start(self, mapping: mmap.mmap, threads: int | None) -> None:
        """Start the threads; by default one for each four CPUs, four at most."""
        default = max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // _CPUS_PER_THREAD))
        for _ in range(threads or default):
            arguments = (mapping, memoryview(mapping))  # a view keeps the memory mapped
            thread = threading.Thread(target=self._run, args=arguments, name=THREAD_NAME, daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Make the threads end after their current pieces."""
        self._stopping.set()

    def join(self, until_s: float) -> None:
        """Wait for the threads to end, except the calling one, until a time of ``time.monotonic``."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until_s - time.monotonic()))

    def _run(self, mapping: mmap.mmap, _view: memoryview) -> None:
        with self._lock:
            if self._has_huge_pages is None:  # At this point, because it reads the system's settings.
                self._has_huge_pages = pages.ask_for_huge(mapping, self._path, shared=self._fd is not None)
        while not self._stopping.is_set() and (piece := self._take()) is not None:
            shortage = self._back(piece)
            if self._stopping.is_set():
                return
            if shortage:
                self._fail(shortage)
            else:
                self._complete(piece)

    def _take(self) -> range | None:
        """Return the slots to do next; None if no slots are left."""
        step = max(1, PIECE_BYTES // self._chunk_bytes)
        with self._lock:
            first, self._next = self._next, min(self._next + step, self._slots)
            return range(first, self._next) if first < self._next else None

    def _back(self, piece: range) -> str:
        """Allocate memory for the slots of a piece, each part on its node; return the shortage, if any."""
        nbytes = len(piece) * self._chunk_bytes * len(self._threads)  # each thread may allocate as much
        is_there = piece.stop * self._chunk_bytes <= self._there_bytes
        if not is_there and (limit := memory_limits.exceeded_by(nbytes)):
            return str(limit)
        for part in self._parts:
            with numa.preferring(part.node):
                for start, end in self._ranges(piece, part):
                    huge = bool(self._has_huge_pages)
                    code = pages.back(self._address + start, end - start, self._fd, start, huge=huge)
                    if code:
                        return errno.errorcode.get(code, str(code))
        return ""

    def _ranges(self, piece: range, part: SlotPart) -> Iterator[tuple[int, int]]:
        """Yield the ranges of the part in each slot. If the part fills whole slots, the ranges are merged."""
        size = self._chunk_bytes
        if part.nbytes == size:
            yield piece.start * size, piece.stop * size
            return
        for slot in piece:
            start = slot * size + part.offset
            end = start + part.nbytes
            # A page shared by two parts belongs to the first one. A slot ends at a page boundary.
            yield start - start % mmap.PAGESIZE, end + -end % mmap.PAGESIZE

    def _complete(self, piece: range) -> None:
        self._on_ready(piece)
        with self._lock:
            self._ready += len(piece)
            is_last = self._ready == self._slots
        if is_last:
            logger.info(
                "the primary tier is ready: %d slots, %d bytes, %s huge pages, after %.1f s",
                self._slots,
                self._slots * self._chunk_bytes,
                "with" if self._has_huge_pages else "without",
                time.monotonic() - self._start_s,
            )
            self._on_ready(range(0))

    def _fail(self, shortage: str) -> None:
        """Skip the remaining slots, and log the shortage once."""
        with self._lock:
            self._next = self._slots
            was_failed, self._failed = self._failed, True
            ready = self._ready
        if was_failed:
            return
        logger.error(
            "the primary tier lacks %d of %d bytes (%s) and continues with %d of %d slots: "
            "set cpu_bytes_to_use to less",
            (self._slots - ready) * self._chunk_bytes,
            self._slots * self._chunk_bytes,
            shortage,
            ready,
            self._slots,
        )
        self._on_ready(range(0))
