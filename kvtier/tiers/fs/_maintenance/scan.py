"""Scans of chunks' files by the native library, which sum or remove them and touch no other files."""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Callable
from typing import Final

from kvtier._native import layouts
from kvtier.tiers.fs._files.chunk_files import require_library
from kvtier.tiers.fs._files.native_call import Failures, StopFlag
from kvtier.tiers.fs._maintenance.ages import Histogram, Plan

# buffer for the paths of the files that one scan removes; the next scan removes more
NAMES_BYTES: Final = 1 << 20
ALL_BYTES: Final = 2**63 - 1
Freed = Callable[[int], None]
"""Callback for the bytes removed since the last call, so that puts can use them early."""


class ChunkScan(layouts.ScanStruct):
    """A scan of chunks' files in several directories. The native library reads and updates its fields.

    It ignores files that are not named as chunks. A file's mtime is the time of its put, and a later atime
    is its last use; its mode has the class of its use count.

    Args:
        now_ns: the file system's time; ages are relative to it.
        histogram: destination of the files' bytes, if given.
        leaving: plan of the files to remove; None: none.
        want_bytes: bytes after which removing stops.

    Attributes:
        seen: number of scanned files; ``removed``: of removed ones.
        removed_bytes: bytes removed, emptied directories included.
        failed_bytes: bytes of files that could not be removed; ``failures`` has the errnos.
    """

    def __init__(
        self,
        now_ns: int,
        histogram: Histogram | None = None,
        leaving: Plan | None = None,
        want_bytes: int = 0,
    ) -> None:
        self.failures: Failures = Counter()
        self._room = ctypes.create_string_buffer(NAMES_BYTES if want_bytes else 1)
        self._histogram = histogram  # C has its address
        super().__init__(
            now_ns=now_ns,
            want_bytes=want_bytes,
            histogram=histogram.buffer_info()[0] if histogram is not None else None,
            names=ctypes.addressof(self._room),
            names_room=len(self._room),
        )
        if leaving is not None:
            self.follow(leaving)

    def follow(self, leaving: Plan) -> None:
        """Remove the files of a plan in later scans."""
        self._leaving = (ctypes.c_uint8 * len(leaving)).from_buffer(leaving)
        self.leaving = ctypes.addressof(self._leaving)

    @property
    def is_done(self) -> bool:
        return bool(self.removed_bytes >= self.want_bytes)

    def scan(self, root_fd: int, folder: str, stop: StopFlag) -> list[str]:
        """Scan the chunks' files below a first-level directory of an epoch. Blocks.

        Returns the paths of the removed files, relative to ``folder``. Raises OSError if the directory cannot
        be read or ``stop`` is set.
        """
        self.names_bytes = self.failed = 0
        scan = require_library().kvt_chunks_scan
        result = scan(root_fd, folder.encode(), stop.address, ctypes.byref(self))
        if self.failed:
            self.failures[self.error] += self.failed
        if result < 0:
            raise OSError(-result, os.strerror(-result), folder)
        return [name.decode() for name in self._room.raw[: self.names_bytes].split(b"\0")[:-1]]


def remove_if_empty(root_fd: int, path: str) -> int:
    """Remove a directory if it is empty. Returns the bytes removed."""
    try:
        found = os.stat(path, dir_fd=root_fd, follow_symlinks=False)
        os.rmdir(path, dir_fd=root_fd)
    except OSError:
        return 0
    return found.st_blocks * 512
