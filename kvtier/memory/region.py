"""The primary tier's bytes: one region of equally long slots, shared by the processes of an engine.

Needs neither torch nor numpy: the scheduler's process uses it for views of slots.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import logging
import mmap
import os
import re
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from kvtier import native
from kvtier.errors import RegionError, StateError
from kvtier.memory import held
from kvtier.memory.held import PREFIX, HeldFile, sweep_ghosts

logger = logging.getLogger("kvtier.memory")

PIECE_BYTES = 64 * 2**20
SHARED_MEMORY = Path("/dev/shm")
_JOIN_S = 10.0
_MAX_NAME = 160


class Region:
    """``slots`` slots of ``chunk_bytes`` bytes each, one after the other, page-aligned.

    Made by ``open`` (a file that several processes map) or ``anonymous`` (memory of this process).
    A slot may be used only after ``populate`` has said so: a page that cannot be had when it is
    first touched kills the process. It is a context manager that closes.

    Attributes:
        slots: number of slots.
        chunk_bytes: length of one slot, and distance to the next, in bytes.
        name: the name it was opened under; empty for an anonymous one.
        path: the file's path; None for an anonymous one.
    """

    def __init__(self, slots: int, chunk_bytes: int, name: str = "", file: HeldFile | None = None) -> None:
        self.slots = slots
        self.chunk_bytes = chunk_bytes
        self.name = name
        self.path = file.path if file else None
        self._file = file
        self._map: mmap.mmap | None = _map_bytes(slots * chunk_bytes, file)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._stopping = threading.Event()
        self._populating: list[threading.Thread] = []
        # Also runs at interpreter exit, so that a forgotten region does not hold memory till the next start.
        self._release = weakref.finalize(self, held.release, file) if file else None

    @staticmethod
    def open(name: str, slots: int, chunk_bytes: int, directory: Path = SHARED_MEMORY) -> Region:
        """Create the shared region ``name``, or join it where a living process has it open.

        First removes what dead processes left behind in ``directory``.

        Args:
            name: one name for each engine on this machine, such as the engine's id.
            slots: number of slots, at least 1.
            chunk_bytes: bytes of a slot, a multiple of the page size.
            directory: a directory of a file system in memory.

        Raises:
            RegionError: there is no room, a living region of that name has another size, the
                directory is not there, or ``chunk_bytes`` is not a multiple of the page size.
        """
        _require_shape(slots, chunk_bytes)
        sweep_ghosts(directory)
        file = held.hold(directory / _file_name(name), slots * chunk_bytes)
        try:
            return Region(slots, chunk_bytes, name, file)
        except BaseException:
            held.release(file)
            raise

    @staticmethod
    def anonymous(slots: int, chunk_bytes: int) -> Region:
        """Make a region of this process alone, without a file. Arguments as in ``open``."""
        _require_shape(slots, chunk_bytes)
        return Region(slots, chunk_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.chunk_bytes

    @property
    def address(self) -> int:
        """Address of slot 0 in this process."""
        self._require_open()
        return self._address

    def view(self, slot: int) -> memoryview:
        """Return the bytes of one slot: one-dimensional, format ``B``, writable.

        A view keeps the memory mapped, also beyond ``close``.

        Raises:
            IndexError: there is no such slot.
            StateError: the region is closed.
        """
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot is {slot}; the region has {self.slots} slots")
        start = slot * self.chunk_bytes
        with memoryview(self._require_open()) as whole:
            return whole[start : start + self.chunk_bytes]

    def claim(self) -> None:
        """Become the one who decides what the slots hold; a no-op for an anonymous region.

        Of all who have the region open one can claim it, until it closes. Two engines that were
        given the same id would otherwise write over each other's chunks.

        Raises:
            RegionError: another one has claimed it.
        """
        self._require_open()
        if self._file is not None and not held.claim(self._file):
            raise RegionError(
                f"{self.path} belongs to another running engine: give each engine an id of its own"
            )

    def populate(self, on_ready: Callable[[range], None]) -> None:
        """Start to back the slots with memory, in a daemon thread, in pieces from slot 0 on.

        Anyone who has the region open may do so, whoever created it, and more than once: pages
        that are there stay as they are. Where memory runs out, one error is logged, the rest is not
        reported, and the region has fewer usable slots. ``close`` stops it.

        Args:
            on_ready: called in that thread with each range of slots that can be used from now on.
                It must not block.
        """
        self._require_open()
        thread = threading.Thread(
            target=self._populate, args=(on_ready,), name="kvtier-populate", daemon=True
        )
        self._populating.append(thread)
        thread.start()

    def close(self) -> None:
        """Give the region back; the last one who closes it removes the file. May be called again.

        Memory that is still in use through views stays mapped until the last view is gone.
        """
        self._stopping.set()
        for thread in self._populating:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)
        self._populating.clear()
        mapping, self._map = self._map, None
        if mapping is not None:
            _unmap(mapping)
        if self._release is not None:
            self._release()

    def __enter__(self) -> Region:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_open(self) -> mmap.mmap:
        mapping = self._map
        if mapping is None:
            raise StateError("the region is closed")
        return mapping

    def _populate(self, on_ready: Callable[[range], None]) -> None:
        step = max(1, PIECE_BYTES // self.chunk_bytes)
        for first in range(0, self.slots, step):
            piece = range(first, min(first + step, self.slots))
            if self._stopping.is_set() or not self._populate_piece(piece):
                return
            if not self._stopping.is_set():
                on_ready(piece)

    def _populate_piece(self, piece: range) -> bool:
        offset = piece.start * self.chunk_bytes
        code = _back_with_pages(self._address + offset, len(piece) * self.chunk_bytes, self._file, offset)
        if code and not self._stopping.is_set():
            logger.error(
                "the primary tier lacks %d of %d bytes (%s): it goes on with %d of %d slots; "
                "set cpu_bytes_to_use to less",
                self.nbytes - offset,
                self.nbytes,
                errno.errorcode.get(code, code),
                piece.start,
                self.slots,
            )
        return code == 0


def _back_with_pages(address: int, nbytes: int, file: HeldFile | None, offset: int) -> int:
    """Get memory for a part of the region and map it; return 0 or the errno. What it holds stays.

    The file's space comes first: unlike a touch of a page this fails without harm where there is
    none, on every kernel, and takes nothing when it fails.
    """
    if file is not None:
        try:
            os.posix_fallocate(file.fd, offset, nbytes)
        except OSError as error:
            return error.errno or errno.EIO
    code = native.populate(address, nbytes)
    return 0 if code in (errno.EINVAL, errno.ENOSYS) else code  # an old kernel: first touches will be slow


def _map_bytes(nbytes: int, file: HeldFile | None) -> mmap.mmap:
    if file is None:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(file.fd, nbytes, flags=mmap.MAP_SHARED)


def _unmap(mapping: mmap.mmap) -> None:
    try:
        mapping.close()
    except BufferError:  # views are out: the last of them takes the mapping along
        logger.debug("views of the region are still in use at its end")


def _require_shape(slots: int, chunk_bytes: int) -> None:
    if slots < 1:
        raise RegionError(f"the primary tier has {slots} slots: set cpu_bytes_to_use to at least one chunk")
    if chunk_bytes < 1 or chunk_bytes % mmap.PAGESIZE:
        raise RegionError(
            f"chunk_bytes is {chunk_bytes}; it must be a multiple of {mmap.PAGESIZE}, the page size"
        )


def _file_name(name: str) -> str:
    """Spell ``name`` as a file name; names that differ stay different."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "-", name)[:_MAX_NAME]
    if safe == name and name:
        return PREFIX + name
    return f"{PREFIX}{safe}.{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}"


__all__ = ["PIECE_BYTES", "SHARED_MEMORY", "Region", "sweep_ghosts"]
