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


class ChunkScan:
    """A scan of the chunks' files of one directory after the other, and what has become of them.

    Only files that are named as chunks count; everything else is somebody else's. A file's mtime says
    when it was written, its atime when it was last used: later than the mtime where it was used again.

    Args:
        now_ns: what ages are counted from, by the file system's clock.
        histogram: gets the files' bytes by age; None: they are not added up.
        cutoffs: which files are removed.
        want_bytes: removing stops when so many bytes were removed.

    Attributes:
        seen: files that were scanned.
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
        self.now_ns = now_ns
        self.histogram = histogram
        self.cutoffs = cutoffs
        self.want_bytes = want_bytes
        self.seen = 0
        self.removed = 0
        self.removed_bytes = 0
        self.failures: Failures = Counter()
        self.failed_bytes = 0
        self._names = ctypes.create_string_buffer(NAMES_BYTES if want_bytes else 1)

    @property
    def is_done(self) -> bool:
        """Whether as much was removed as was wanted."""
        return self.removed_bytes >= self.want_bytes

    def scan(self, root_fd: int, folder: str, stop: StopFlag) -> list[str]:
        """Scan the chunks' files below a directory of an epoch's first level. Blocks.

        Returns:
            The paths of what was removed, relative to ``folder``.

        Raises:
            OSError: the directory cannot be read, or ``stop`` was set.
        """
        record = layouts.ChunkScan(
            now_ns=self.now_ns,
            once_us=self.cutoffs.once_us,
            reused_us=self.cutoffs.reused_us,
            want_bytes=self.want_bytes - self.removed_bytes,
            histogram=self.histogram.buffer_info()[0] if self.histogram is not None else None,
            names=ctypes.addressof(self._names),
            names_room=len(self._names),
        )
        scan = require_library().kvt_chunks_scan
        result = scan(root_fd, folder.encode(), stop.address, ctypes.byref(record))
        self.seen += record.seen
        self.removed += record.removed
        self.removed_bytes += record.removed_bytes
        self.failed_bytes += record.failed_bytes
        if record.failed:
            self.failures[record.error] += record.failed
        if result < 0:
            raise OSError(-result, os.strerror(-result), folder)
        return [name.decode() for name in self._names.raw[: record.names_bytes].split(b"\0")[:-1]]
