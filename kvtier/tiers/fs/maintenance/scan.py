"""Looking at the ages of chunks' files, and removing those that are too old."""

from __future__ import annotations

import ctypes
import os
import re
import stat
from contextlib import suppress
from typing import Final

from kvtier import native
from kvtier.native import layouts
from kvtier.tiers.fs.files.call import StopFlag
from kvtier.tiers.fs.maintenance.ages import NOTHING, Cutoffs, Histogram

NAMES_BYTES: Final = 1 << 20
"""Room for the paths of what one scan removes; what has none stays for the next one."""

_LEAF: Final = re.compile(r"[0-9a-f]{2}_g[0-9]{1,10}")
_CHUNK: Final = re.compile(r"(?:[0-9a-f]{2})+\.bin")
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class ChunkScan:
    """A look at the chunks' files of one directory after the other, and what has become of them.

    Only files that are named as chunks count; everything else is somebody else's. A file's mtime says
    when it was written, its atime when it was last used: later than the mtime where it was used again.

    Args:
        now_ns: what ages are counted from, by the file system's clock.
        histogram: gets the files' bytes by age; None: they are not added up.
        cutoffs: which files are removed.
        want_bytes: removing stops when so many bytes were removed.

    Attributes:
        seen: files looked at.
        removed: files removed.
        removed_bytes: bytes removed, directories that became empty included.
        stuck: files that are old enough and could not be removed.
        stuck_bytes: their bytes.
        error: the errno of one of them.
    """

    def __init__(
        self,
        now_ns: int,
        histogram: Histogram | None = None,
        cutoffs: Cutoffs = NOTHING,
        want_bytes: int = 0,
    ) -> None:
        self.now_ns = now_ns
        self.histogram = histogram
        self.cutoffs = cutoffs
        self.want_bytes = want_bytes
        self.seen = 0
        self.removed = 0
        self.removed_bytes = 0
        self.stuck = 0
        self.stuck_bytes = 0
        self.error = 0
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
        if native.library is not None:
            return self._look_natively(native.library, root_fd, folder, stop)
        removed: list[str] = []
        fd = os.open(folder, _FOLDER, dir_fd=root_fd)
        try:
            for leaf in filter(_LEAF.fullmatch, os.listdir(fd)):
                with suppress(OSError):
                    removed += self._look_into(fd, leaf, stop)
        finally:
            os.close(fd)
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
        self.stuck += record.stuck
        self.stuck_bytes += record.stuck_bytes
        self.error = record.error or self.error
        if result < 0:
            raise OSError(-result, os.strerror(-result), folder)
        return [name.decode() for name in self._names.raw[: record.names_bytes].split(b"\0")[:-1]]

    def _look_into(self, parent_fd: int, leaf: str, stop: StopFlag) -> list[str]:
        """Look at the files of one directory. Returns the paths of what was removed."""
        removed: list[str] = []
        fd = os.open(leaf, _FOLDER, dir_fd=parent_fd)
        try:
            here = os.fstat(fd)
            for name in filter(_CHUNK.fullmatch, os.listdir(fd)):
                if stop:
                    break
                with suppress(OSError):
                    if self._removes(fd, name, here.st_dev):
                        removed.append(f"{leaf}/{name}")
            here = os.fstat(fd)  # emptied it may take less than before
        finally:
            os.close(fd)
        if removed:  # an empty directory is made again by whoever puts something into it
            with suppress(OSError):
                os.rmdir(leaf, dir_fd=parent_fd)
                self.removed_bytes += here.st_blocks * 512
        return removed

    def _removes(self, fd: int, name: str, device: int) -> bool:
        """Look at a file, and remove it where it is too old."""
        found = os.stat(name, dir_fd=fd, follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode) or found.st_dev != device or not self._is_too_old(found):
            return False
        try:
            os.unlink(name, dir_fd=fd)
        except FileNotFoundError:
            return False
        except OSError as error:
            self.stuck += 1
            self.stuck_bytes += found.st_blocks * 512
            self.error = error.errno or self.error
            return False
        self.removed += 1
        self.removed_bytes += found.st_blocks * 512
        return True

    def _is_too_old(self, found: os.stat_result) -> bool:
        reused = found.st_atime_ns > found.st_mtime_ns
        age_us = (self.now_ns - max(found.st_atime_ns, found.st_mtime_ns)) // 1000
        self.seen += 1
        if self.histogram is not None:
            self.histogram.add(age_us, reused, found.st_blocks * 512)
        cutoff = self.cutoffs.reused_us if reused else self.cutoffs.once_us
        return age_us >= cutoff and not self.is_done
