"""The quarantine of files that failed a check: a bounded number is kept for inspection.

Other hosts share a chunk, so one bad read does not move its file: two more reads, past the page cache and
into other memory, must find the same damage. Otherwise this host reads damaged data, and the file stays. A
host moves no more files in an hour than a quarantine holds.

Anything may be in a chunk's place: a directory, a FIFO, an entry that this user cannot remove. While the
quarantine is full of such entries, damaged files stay in place, and each get of them is a miss.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from kvtier._log import GuardedLogger, LogLimit
from kvtier.keys import OffloadKey, content_hash, group_index
from kvtier.tiers.fs._checking import FileChecker
from kvtier.tiers.fs._files.native_call import FileCall, Result, StopFlag
from kvtier.tiers.fs._layout import CAREFULLY, chunk_path, forget_pages, make_folder
from kvtier.tiers.fs._maintenance.sweep import MAX_FILES, Removal

_LINES_EVERY_S: Final = 30.0
_HOUR_S: Final = 3600.0
_BAD_HOST: Final = (
    "%s failed its check (%s), and reading it again gave other bytes: this host reads damaged data. The file "
    "stays, and is a miss here: check this host's memory, disks and network"
)
_TOO_MANY: Final = (
    "%s failed its check (%s) and stays: %d files were quarantined in an hour. Run 'kvtier verify' on "
    "another host: if it finds no damage, this host reads damaged data"
)
_log = GuardedLogger("kvtier.tiers.fs")


class Quarantine:
    """The quarantine of one namespace. Any thread may call it.

    Chunks of other lengths than ``payload_bytes``, if given, are torn.
    """

    def __init__(
        self, root_fd: int, namespace: str, payload_bytes: int | None = None, most_an_hour: int | None = None
    ) -> None:
        self._root_fd = root_fd
        self._checked = namespace.rpartition("_")[2], payload_bytes
        self._moved_s: deque[float] = deque(maxlen=most_an_hour)
        self._folder = f"{namespace}/quarantine"
        self._removal = Removal(root_fd, StopFlag())
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._log_limit = LogLimit(_LINES_EVERY_S)

    def counts(self) -> Mapping[str, int]:
        """Return the number of files quarantined since the tier opened, by reason. Does not block."""
        return dict(self._counts)

    def add_all(self, call: FileCall, chunks: Sequence[int]) -> list[int]:
        """Move the files of some damaged chunks. Return the positions of those now away. Blocks."""
        folder, keys, results = call.place.data_dir, call.keys, call.results
        return [i for i in chunks if self.add(folder, keys[i], Result(results[i]), call.inodes[i])]

    def add(self, data_dir: str, key: OffloadKey, result: Result, inode: int) -> bool:
        """Move a chunk's file if its damage is confirmed and no other file has replaced it.

        Returns whether the damaged file is no longer in its place.
        """
        path, reason = chunk_path(data_dir, key), result.name.lower()
        name = f"{content_hash(key).hex()}_g{group_index(key)}.{reason}.{time.time_ns()}-{os.getpid()}"
        target = f"{self._folder}/{name}"
        with self._lock:
            try:
                if not self._confirm(path, key, inode, reason):
                    return False
                make_folder(self._root_fd, self._folder)
                self._require_place()
                if not self._move(path, inode, target):
                    return True  # another reader moved it first
            except OSError as error:
                what = "%s failed its check (%s) and cannot be quarantined: %s"
                self._log(logging.ERROR, what, path, reason, error.strerror or error)
                return False
            self._moved_s.append(time.monotonic())
            self._counts[reason] += 1
            self._log(logging.ERROR, "%s failed its check (%s) and was moved to %s", path, reason, target)
            return True

    def _confirm(self, path: str, key: OffloadKey, inode: int, reason: str) -> bool:
        """Return whether a file may be moved: its damage is confirmed, or it is not a file. OSError."""
        try:
            found = os.stat(path, dir_fd=self._root_fd, follow_symlinks=False)
        except FileNotFoundError:
            return True
        if not stat.S_ISREG(found.st_mode) or found.st_ino != inode:
            return True
        moved_s = self._moved_s
        if len(moved_s) == moved_s.maxlen and time.monotonic() - moved_s[0] < _HOUR_S:
            self._log(logging.ERROR, _TOO_MANY, path, reason, moved_s.maxlen)
            return False
        fd = os.open(path, os.O_RDONLY | CAREFULLY, dir_fd=self._root_fd)
        forget_pages(fd)
        os.close(fd)
        # each read has its own memory
        checkers = [FileChecker(self._root_fd, *self._checked) for _ in range(2)]
        one, other = (checker.check(path, key) for checker in checkers)
        if one != other or not one.finding.is_corrupt:
            self._log(logging.ERROR, _BAD_HOST, path, reason)
            return False
        return True

    def _move(self, path: str, inode: int, target: str) -> bool:
        with suppress(FileNotFoundError):
            if os.stat(path, dir_fd=self._root_fd, follow_symlinks=False).st_ino == inode:
                os.rename(path, target, src_dir_fd=self._root_fd, dst_dir_fd=self._root_fd)
                return True
        return False

    def _require_place(self) -> None:
        """Remove the oldest entries until there is room for one more. OSError if they cannot be removed."""
        pruned = self._removal.prune(self._folder, MAX_FILES - 1)
        if pruned.entries:
            what = "%s holds at most %d entries: the oldest %d were removed"
            self._log(logging.WARNING, what, self._folder, MAX_FILES, pruned.entries)
        if pruned.problem is not None:
            raise OSError(errno.ENOSPC, f"the quarantine is full, and its entries stay: {pruned.problem}")

    def _log(self, level: int, what: str, *details: object) -> None:
        added = self._log_limit.allow(what, time.monotonic())
        if added is not None:
            _log.log(level, what + "%s", *details, added)
