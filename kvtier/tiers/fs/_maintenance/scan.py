"""Looking at the ages of chunks' files, and removing those that are too old."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import stat
from collections import Counter
from enum import IntEnum
from typing import Final

from kvtier import _native as native
from kvtier._native import layouts
from kvtier.tiers.fs import _layout as layout
from kvtier.tiers.fs._files.base import Failures
from kvtier.tiers.fs._files.call import StopFlag
from kvtier.tiers.fs._maintenance.ages import NEVER, NOTHING, Cutoffs, Histogram

NAMES_BYTES: Final = 1 << 20
"""Room for the paths of what one scan removes; what has none stays for the next one."""

_CHUNK: Final = re.compile(r"(?:[0-9a-f]{2})+\.bin")


class _Fate(IntEnum):
    """What a scan did with a directory entry. GONE: an earlier dry run already counted it as removed."""

    STAYS = 0
    REMOVED = 1
    GONE = 2


class ChunkScan:
    """A look at the chunks' files of one directory after the other, and what has become of them.

    Only files that are named as chunks count; everything else is somebody else's. A file's mtime says
    when it was written, its atime when it was last used: later than the mtime where it was used again.

    Args:
        now_ns: what ages are counted from, by the file system's clock.
        histogram: gets the files' bytes by age; None: they are not added up.
        cutoffs: which files are removed.
        want_bytes: removing stops when so many bytes were removed.
        gone: in a dry run, which only Python does, the files that it takes to be gone; None: files are
            removed.

    Attributes:
        seen: files looked at.
        removed: files removed.
        removed_bytes: bytes removed, directories that became empty included.
        left: entries that the directory looked at last still has, or would have.
        failures: what could not be removed or looked into.
        failed_bytes: of the files that could not be removed.
    """

    def __init__(
        self,
        now_ns: int,
        histogram: Histogram | None = None,
        cutoffs: Cutoffs = NOTHING,
        want_bytes: int = 0,
        gone: Cutoffs | None = None,
    ) -> None:
        self.now_ns = now_ns
        self.histogram = histogram
        self.cutoffs = cutoffs
        self.want_bytes = want_bytes
        self.seen = 0
        self.removed = 0
        self.removed_bytes = 0
        self.left = 0
        self.failures: Failures = Counter()
        self.failed_bytes = 0
        self.gone = gone
        self._names = ctypes.create_string_buffer(NAMES_BYTES if want_bytes else 1)

    @property
    def is_done(self) -> bool:
        """Whether as much was removed as was wanted."""
        return self.removed_bytes >= self.want_bytes

    def look(self, root_fd: int, folder: str, stop: StopFlag) -> list[str]:
        """Look at the chunks' files below a directory of an epoch's first level. Blocks.

        Returns:
            The paths of what was removed, relative to ``folder``.

        Raises:
            OSError: the directory cannot be read, or ``stop`` was set.
        """
        self.left = 0
        if native.library is not None and self.gone is None:
            return self._look_natively(native.library, root_fd, folder, stop)
        removed: list[str] = []
        with layout.open_folder(root_fd, folder) as fd:
            for leaf in os.listdir(fd):
                self.left += 1
                if layout.LEAF.fullmatch(leaf):
                    try:
                        removed += self._look_into(fd, leaf, stop)
                    except OSError as error:
                        self.note(error)
        if stop:
            raise InterruptedError("stopped")
        return removed

    def _look_natively(self, library: ctypes.CDLL, root_fd: int, folder: str, stop: StopFlag) -> list[str]:
        record = layouts.ChunkScan(
            self.now_ns,
            self.cutoffs.once_us,
            self.cutoffs.reused_us,
            self.want_bytes - self.removed_bytes,
            self.histogram.bytes.buffer_info()[0] if self.histogram is not None else None,
            ctypes.addressof(self._names),
            len(self._names),
        )
        result = library.kvt_chunks_scan(root_fd, folder.encode(), stop.address, ctypes.byref(record))
        self.seen += record.seen
        self.removed += record.removed
        self.removed_bytes += record.removed_bytes
        self.left = record.left
        self.failed_bytes += record.failed_bytes
        if record.failed:
            self.failures[record.error] += record.failed
        if result < 0:
            raise OSError(-result, os.strerror(-result), folder)
        return [name.decode() for name in self._names.raw[: record.names_bytes].split(b"\0")[:-1]]

    def _look_into(self, parent_fd: int, leaf: str, stop: StopFlag) -> list[str]:
        """Look at the files of one directory. Returns the paths of what was removed."""
        removed: list[str] = []
        others = 0
        with layout.open_folder(parent_fd, leaf) as fd:
            here = os.fstat(fd)
            names = os.listdir(fd)
            for name in names:
                if stop:
                    break
                fate = self._fate(fd, name, here.st_dev)
                others += fate is _Fate.STAYS
                if fate is _Fate.REMOVED:
                    removed.append(f"{leaf}/{name}")
            if removed:
                here = os.fstat(fd)  # emptied it may take less than before
        emptied = (
            bool(names) and not others if self.gone is not None else bool(removed) and _rmdir(parent_fd, leaf)
        )
        if emptied:
            self.left -= 1
            self.removed_bytes += here.st_blocks * 512 if removed else 0
        return removed

    def _fate(self, fd: int, name: str, device: int) -> _Fate:
        """Look at an entry, and remove it where it is a chunk's file that is too old."""
        try:
            if not _CHUNK.fullmatch(name):
                return _Fate.STAYS
            found = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if not stat.S_ISREG(found.st_mode) or found.st_dev != device:
                return _Fate.STAYS
            return self._removed(fd, name, found)
        except OSError as error:
            self.note(error)
            return _Fate.STAYS

    def _removed(self, fd: int, name: str, found: os.stat_result) -> _Fate:
        reused, nbytes = found.st_atime_ns > found.st_mtime_ns, found.st_blocks * 512
        age_us = min(NEVER - 1, (self.now_ns - max(found.st_atime_ns, found.st_mtime_ns)) // 1000)
        if self.gone is not None and self.gone.include(age_us, reused):
            return _Fate.GONE
        self.seen += 1
        if self.histogram is not None:
            self.histogram.add(age_us, reused, nbytes)
        if not self.cutoffs.include(age_us, reused) or self.is_done:
            return _Fate.STAYS
        if self.gone is None:
            try:
                os.unlink(name, dir_fd=fd)
            except OSError as error:
                self.failed_bytes += 0 if error.errno == errno.ENOENT else nbytes
                raise
        self.removed += 1
        self.removed_bytes += nbytes
        return _Fate.REMOVED

    def note(self, error: OSError) -> None:
        """Count a failure; what somebody else has removed, and being stopped, are none."""
        if error.errno not in (errno.ENOENT, errno.ECANCELED) and not isinstance(error, InterruptedError):
            self.failures[error.errno or errno.EIO] += 1


def _rmdir(parent_fd: int, leaf: str) -> bool:
    """Remove a directory if it is empty: it is made again by whoever puts something into it."""
    try:
        os.rmdir(leaf, dir_fd=parent_fd)
    except OSError:
        return False
    return True
