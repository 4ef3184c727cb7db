"""Looking at units of eviction, and removing those that are too old. See ``store`` for what a unit is."""

from __future__ import annotations

import ctypes
import os
import re
import stat
from contextlib import suppress
from typing import Final

from kvtier import native
from kvtier.tiers.fs.ages import NEVER, NOTHING, Cutoffs, Histogram
from kvtier.tiers.fs.call import StopFlag
from kvtier.tiers.fs.segments.layout import FOLDER, is_segment_name

NAMES_BYTES: Final = 1 << 20
"""Room for the paths of what one scan removes; what has none stays for the next one."""

_MAX_DEPTH: Final = 16
_FILE: Final = re.compile(r"[0-9a-f]{2}_g[0-9]{1,10}/(?:[0-9a-f]{2})+\.bin(?:_[0-9]+\.tmp)?")


def is_unit(path: str, *, of_segments: bool) -> bool:
    """Say whether a file is a unit by its name; everything else is somebody else's.

    What a writer of vLLM's own tier has not finished (``<hash>.bin_<number>.tmp``) is one: nobody else
    ever removes it.

    Args:
        path: relative to a directory of the first level of an epoch.
        of_segments: whether that is the directory of segments.
    """
    return is_segment_name(path) if of_segments else _FILE.fullmatch(path) is not None


class _Record(ctypes.Structure):
    """``struct unit_scan`` of units.c."""

    _fields_ = (
        ("now_ns", ctypes.c_int64),
        ("once_us", ctypes.c_int64),
        ("reused_us", ctypes.c_int64),
        ("want_bytes", ctypes.c_int64),
        ("histogram", ctypes.c_void_p),
        ("names", ctypes.c_void_p),
        ("names_room", ctypes.c_uint64),
        ("names_bytes", ctypes.c_uint64),
        ("of_segments", ctypes.c_uint64),
        ("seen_units", ctypes.c_uint64),
        ("removed_units", ctypes.c_uint64),
        ("removed_bytes", ctypes.c_int64),
    )


class UnitScan:
    """A look at the units of one directory after the other, and what has become of them.

    Args:
        now_ns: what ages are counted from, by the file system's clock.
        histogram: gets the units' bytes by age; None: they are not added up.
        cutoffs: which units are removed.
        want_bytes: removing stops when so many bytes were removed.

    Attributes:
        seen_units: units looked at.
        removed_units: units removed.
        removed_bytes: bytes removed, directories that became empty included.
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
        self.seen_units = 0
        self.removed_units = 0
        self.removed_bytes = 0
        self._of_segments = False
        self._names = ctypes.create_string_buffer(NAMES_BYTES if want_bytes else 1)

    @property
    def is_done(self) -> bool:
        """Whether as much was removed as was wanted."""
        return self.removed_bytes >= self.want_bytes

    def look(self, root_fd: int, folder: str, stop: StopFlag) -> list[str]:
        """Look at the units below a directory of an epoch. Blocks.

        Returns:
            The paths of what was removed, relative to ``folder``.

        Raises:
            OSError: the directory cannot be read, or ``stop`` was set.
        """
        if native.library is not None:
            return self._look_natively(native.library, root_fd, folder, stop)
        removed: list[str] = []
        self._of_segments = _is_of_segments(folder)
        self._look_into(root_fd, folder, "", removed, stop, 0)
        if stop:
            raise InterruptedError("stopped")
        return removed

    def _look_natively(self, library: ctypes.CDLL, root_fd: int, folder: str, stop: StopFlag) -> list[str]:
        record = _Record(
            self.now_ns,
            self.cutoffs.once_us,
            self.cutoffs.reused_us,
            self.want_bytes - self.removed_bytes,
            self.histogram.bytes.buffer_info()[0] if self.histogram is not None else None,
            ctypes.addressof(self._names),
            len(self._names),
            of_segments=_is_of_segments(folder),
        )
        result = library.kvt_units_scan(root_fd, folder.encode(), stop.address, ctypes.byref(record))
        self.seen_units += record.seen_units
        self.removed_units += record.removed_units
        self.removed_bytes += record.removed_bytes
        if result < 0:
            raise OSError(-result, os.strerror(-result), folder)
        return [name.decode() for name in self._names.raw[: record.names_bytes].split(b"\0")[:-1]]

    def _look_into(
        self, parent_fd: int, name: str, path: str, removed: list[str], stop: StopFlag, depth: int
    ) -> bool:
        """Look at a directory. Returns whether something was removed in it."""
        before = len(removed)
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent_fd)
        try:
            device = os.fstat(fd).st_dev
            with os.scandir(fd) as entries:
                for entry in entries:
                    if stop:
                        break
                    with suppress(OSError):
                        self._look_at(fd, entry.name, path, device, removed, stop, depth)
        finally:
            os.close(fd)
        return len(removed) > before

    def _look_at(
        self, fd: int, name: str, path: str, device: int, removed: list[str], stop: StopFlag, depth: int
    ) -> None:
        found = os.stat(name, dir_fd=fd, follow_symlinks=False)
        if found.st_dev != device:
            return
        if stat.S_ISREG(found.st_mode):
            if is_unit(path + name, of_segments=self._of_segments) and self._is_too_old(found):
                os.unlink(name, dir_fd=fd)
                removed.append(path + name)
                self.removed_units += 1
                self.removed_bytes += found.st_blocks * 512
        elif (
            stat.S_ISDIR(found.st_mode)
            and depth < _MAX_DEPTH
            and self._look_into(fd, name, f"{path}{name}/", removed, stop, depth + 1)
        ):
            os.rmdir(name, dir_fd=fd)  # made again by whoever puts something into it; or it is not empty
            self.removed_bytes += found.st_blocks * 512

    def _is_too_old(self, found: os.stat_result) -> bool:
        reused = found.st_atime_ns > found.st_mtime_ns
        age_us = min(NEVER - 1, (self.now_ns - max(found.st_atime_ns, found.st_mtime_ns)) // 1000)
        self.seen_units += 1
        if self.histogram is not None:
            self.histogram.add(age_us, reused, found.st_blocks * 512)
        cutoff = self.cutoffs.reused_us if reused else self.cutoffs.once_us
        return age_us >= cutoff and not self.is_done


def _is_of_segments(folder: str) -> bool:
    return folder.rpartition("/")[2] == FOLDER
