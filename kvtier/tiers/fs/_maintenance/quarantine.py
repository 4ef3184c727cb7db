"""The quarantine of files that failed a check: they are never deleted unseen, and bounded in number.

Anything may lie in a chunk's place: a directory, a FIFO, something that nobody may remove. While the
quarantine is full of such entries, files that fail stay where they are, and are a miss each time.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from kvtier._log import GuardedLogger
from kvtier._telemetry.log_limit import LogLimit
from kvtier.keys import OffloadKey, content_hash, group_index
from kvtier.tiers.fs._files.call import FileCall, Result, StopFlag
from kvtier.tiers.fs._layout import DIRECTORY_MODE, chunk_path
from kvtier.tiers.fs._maintenance.sweep import MAX_FILES, Removal

_LINES_EVERY_S: Final = 30.0

_log = GuardedLogger("kvtier.tiers.fs")


class Quarantine:
    """The quarantine of one namespace. Any thread may call it."""

    def __init__(self, root_fd: int, namespace: str) -> None:
        self._root_fd = root_fd
        self._folder = f"{namespace}/quarantine"
        self._removal = Removal(root_fd, StopFlag())
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._log_limit = LogLimit(_LINES_EVERY_S)

    def counts(self) -> Mapping[str, int]:
        """Return how many files were quarantined since the tier opened, by reason. Does not block."""
        return dict(self._counts)

    def add_all(self, call: FileCall, chunks: Sequence[int]) -> None:
        """Move the files of some chunks away that have failed their checks. Blocks."""
        for i in chunks:
            self.add(call.place.data_dir, call.keys[i], Result(call.results[i]), call.inodes[i])

    def add(self, data_dir: str, key: OffloadKey, result: Result, inode: int) -> bool:
        """Move a chunk's file away, unless another one has taken its place. Returns whether it was moved."""
        path, reason = chunk_path(data_dir, key), result.name.lower()
        name = f"{content_hash(key).hex()}_g{group_index(key)}.{reason}.{time.time_ns()}-{os.getpid()}"
        target = f"{self._folder}/{name}"
        with self._lock:
            try:
                with suppress(FileExistsError):
                    os.mkdir(self._folder, DIRECTORY_MODE, dir_fd=self._root_fd)
                self._require_place()
                if not self._move(path, inode, target):
                    return False  # another reader was faster
            except OSError as error:
                what = "%s failed its check (%s) and cannot be quarantined: %s"
                self._log(logging.ERROR, what, path, reason, error.strerror or error)
                return False
            self._counts[reason] += 1
            self._log(logging.ERROR, "%s failed its check (%s) and was moved to %s", path, reason, target)
            return True

    def _move(self, path: str, inode: int, target: str) -> bool:
        with suppress(FileNotFoundError):
            if os.stat(path, dir_fd=self._root_fd, follow_symlinks=False).st_ino == inode:
                os.rename(path, target, src_dir_fd=self._root_fd, dst_dir_fd=self._root_fd)
                return True
        return False

    def _require_place(self) -> None:
        """Remove the oldest entries until there is a place for one more. OSError where there is none."""
        pruned = self._removal.prune(self._folder, MAX_FILES - 1)
        if pruned.entries:
            what = "%s has no more than %d places, of the oldest entries %d were removed"
            self._log(logging.WARNING, what, self._folder, MAX_FILES, pruned.entries)
        if pruned.problem is not None:
            raise OSError(errno.ENOSPC, f"the quarantine is full, and its entries stay: {pruned.problem}")

    def _log(self, level: int, what: str, *details: object) -> None:
        """Write a line, unless one of its kind was written a moment ago."""
        added = self._log_limit.allow(what, time.monotonic())
        if added is not None:
            _log.log(level, what + "%s", *details, added)
