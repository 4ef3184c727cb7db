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
    """A scan of the chunks' files of one directory after the other, and what has become of them.

    The native library reads and adds up its fields.

    Only files that are named as chunks count; everything else is somebody else's. A file's mtime says
    when it was written, its atime when it was last used: later than the mtime where it was used again.

    Args:
        now_ns: what ages are counted from, by the file system's clock.
        histogram: gets the files' bytes by age; None: they are not added up.
        cutoffs: ages from which on files are removed.
        want_bytes: removing stops when so many bytes were removed.

    Attributes:
        seen: files that were scanned.
        removed: files that were removed.
        removed_bytes: bytes removed, directories that became empty included.
        failures: what could not be removed or read.
        failed_bytes: of the files that could not be removed.
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
        """Remove files of these ages from now on."""
        self.once_us, self.reused_us = cutoffs.once_us, cutoffs.reused_us

    @property
    def is_done(self) -> bool:
        """Whether as much was removed as was wanted."""
        return bool(self.removed_bytes >= self.want_bytes)

    def scan(self, root_fd: int, folder: str, stop: StopFlag) -> list[str]:
        """Scan the chunks' files below a directory of an epoch's first level. Blocks.

        Returns:
            The paths of what was removed, relative to ``folder``.

        Raises:
            OSError: the directory cannot be read, or ``stop`` was set.
        """
        self.names_bytes = self.failed = 0
        scan = require_library().kvt_chunks_scan
        result = scan(root_fd, folder.encode(), stop.address, ctypes.byref(self))
        if self.failed:
            self.failures[self.error] += self.failed
        if result < 0:
            raise OSError(-result, os.strerror(-result), folder)
        return [name.decode() for name in self._room.raw[: self.names_bytes].split(b"\0")[:-1]]
