"""Scans of chunks' files: their ages, and the removal of those that are too old."""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from typing import Final

from kvtier._native import layouts
from kvtier.tiers.fs._files.call import Failures, StopFlag
from kvtier.tiers.fs._files.chunk_files import require_library
from kvtier.tiers.fs._maintenance.ages import NOTHING, Cutoffs, Histogram

NAMES_BYTES: Final = 1 << 20
"""Room for the paths of what one scan removes; what has none stays for the next one."""


class ChunkScan(layouts.ChunkScan):
    """A scan of the chunks' files of several directories. The native library reads and adds up its fields.

    Files that are not named as chunks are left alone. A file's mtime is when it was written; a later atime is
    when it was used again.

    Args:
        now_ns: the file system's time, from which ages are counted.
        histogram: gets the files' bytes by age, if given.
        cutoffs: ages from which on files are removed.
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
        cutoffs: Cutoffs = NOTHING,
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
        self.remove_older(cutoffs)

    def remove_older(self, cutoffs: Cutoffs) -> None:
        self.once_us, self.reused_us = cutoffs.once_us, cutoffs.reused_us

    @property
    def is_done(self) -> bool:
        return bool(self.removed_bytes >= self.want_bytes)

    def scan(self, root_fd: int, folder: str, stop: StopFlag) -> list[str]:
        """Scan the chunks' files below a directory of an epoch's first level. Blocks.

        Returns the paths of what was removed, relative to ``folder``. Raises OSError if the directory cannot
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
