"""Scans of chunks' files by the native library: their ages, and removing them without other files."""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Callable
from typing import Final

from kvtier._native import layouts
from kvtier.tiers.fs._files.call import Failures, StopFlag
from kvtier.tiers.fs._files.chunk_files import require_library
from kvtier.tiers.fs._maintenance.ages import BUCKETS, CLASSES, Histogram, Plan

NAMES_BYTES: Final = 1 << 20
"""Room for the paths of the files that one scan removes; the others stay for the next one."""

ALL_BYTES: Final = 2**63 - 1
Freed = Callable[[int], None]
"""Called with the bytes removed since the last call, so that others can use them before all is done."""


def ignore(*details: object) -> None:
    """Ignore the bytes removed."""


class ChunkScan(layouts.ChunkScan):
    """A scan of the chunks' files of several directories. The native library reads and adds up its fields.

    Files that are not named as chunks are left alone. A file's mtime is when it was written; a later atime is
    when it was used again, and its mode says how often.

    Args:
        now_ns: the file system's time; ages are relative to it.
        histogram: gets the files' bytes, if given.
        leaving: which files are removed; None: none.
        want_bytes: bytes after which removing stops.

    Attributes:
        seen: number of files that were scanned; ``removed`` of those removed.
        removed_bytes: directories that became empty included.
        failed_bytes: of the files that could not be removed; ``failures`` says why.
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
        self._histogram = histogram  # kept as long as there is its address
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
        """Remove the files that a plan names."""
        self._leaving = (ctypes.c_uint8 * len(leaving)).from_buffer(leaving)
        self.leaving = ctypes.addressof(self._leaving)

    @property
    def is_done(self) -> bool:
        return bool(self.removed_bytes >= self.want_bytes)

    def scan(self, root_fd: int, folder: str, stop: StopFlag) -> list[str]:
        """Scan the chunks' files below a directory of an epoch's first level. Blocks.

        Returns the paths of the removed files, relative to ``folder``. Raises OSError if the directory cannot
        be read or ``stop`` was set.
        """
        self.names_bytes = self.failed = 0
        scan = require_library().kvt_chunks_scan
        result = scan(root_fd, folder.encode(), stop.address, ctypes.byref(self))
        if self.failed:
            self.failures[self.error] += self.failed
        if result < 0:
            raise OSError(-result, os.strerror(-result), folder)
        return [name.decode() for name in self._room.raw[: self.names_bytes].split(b"\0")[:-1]]


def scan_to_remove_all() -> ChunkScan:
    """Return a scan that removes all chunks' files, and no others."""
    return ChunkScan(0, leaving=bytearray(b"\1" * (CLASSES * BUCKETS)), want_bytes=ALL_BYTES)


def remove_if_empty(root_fd: int, path: str) -> int:
    """Remove a directory if nothing is in it. Returns the bytes removed."""
    try:
        found = os.stat(path, dir_fd=root_fd, follow_symlinks=False)
        os.rmdir(path, dir_fd=root_fd)
    except OSError:
        return 0
    return found.st_blocks * 512
