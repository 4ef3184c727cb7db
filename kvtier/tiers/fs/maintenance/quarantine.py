"""Where files go that failed a check: out of the way, never deleted unseen, bounded in number."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from kvtier.keys import OffloadKey, content_hash, group_index
from kvtier.tiers.fs.files.call import FileCall, Result
from kvtier.tiers.fs.layout import DIRECTORY_MODE, chunk_path

MAX_FILES: Final = 128
_MAX_TOLD: Final = 1024

_log = logging.getLogger("kvtier.tiers.fs")


class Quarantine:
    """The quarantine of one namespace. Any thread may call it.

    Args:
        root_fd: the tier's root directory, open.
        namespace: name of the namespace's directory.
    """

    def __init__(self, root_fd: int, namespace: str) -> None:
        self._root_fd = root_fd
        self._folder = f"{namespace}/quarantine"
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._told: set[tuple[str, int]] = set()

    def counts(self) -> Mapping[str, int]:
        """Return how many files were set aside since the tier opened, by reason."""
        with self._lock:
            return dict(self._counts)

    def set_aside(self, call: FileCall, i: int) -> bool:
        """Move chunk ``i`` away, unless another one has taken its place since. Returns whether it was moved.

        Where it cannot be moved it stays, and fails its check each time it is read.

        Args:
            call: the get that found it, or the put that found something else in its place: ``call.inodes``
                says which file.
            i: which chunk.
        """
        key, reason = call.keys[i], Result(call.results[i]).name.lower()
        path = chunk_path(call.place.data_dir, key)
        target = self.target(key, reason)
        with self._lock:
            try:
                with suppress(FileExistsError):
                    os.mkdir(self._folder, DIRECTORY_MODE, dir_fd=self._root_fd)
                if not self._move(path, call.inodes[i], target):
                    return False  # another reader was faster
            except OSError as error:
                self._tell_once(path, call.inodes[i], reason, error)
                return False
            self._counts[reason] += 1
            _log.error("%s failed its check (%s) and was moved to %s", path, reason, target)
            self._prune()
            return True

    def _move(self, path: str, inode: int, target: str) -> bool:
        with suppress(FileNotFoundError):
            if os.stat(path, dir_fd=self._root_fd, follow_symlinks=False).st_ino == inode:
                os.rename(path, target, src_dir_fd=self._root_fd, dst_dir_fd=self._root_fd)
                return True
        return False

    def target(self, key: OffloadKey, reason: str) -> str:
        """Name the file that a chunk goes to, relative to the root."""
        name = f"{content_hash(key).hex()}_g{group_index(key)}.{reason}.{time.time_ns()}-{os.getpid()}"
        return f"{self._folder}/{name}"

    def _tell_once(self, path: str, inode: int, reason: str, error: OSError) -> None:
        if (path, inode) in self._told:
            return
        if len(self._told) >= _MAX_TOLD:
            self._told.clear()
        self._told.add((path, inode))
        self._counts[reason] += 1
        _log.error("%s failed its check (%s) and cannot be set aside: %s", path, reason, error)

    def _prune(self) -> None:
        """Remove the oldest files beyond the bound."""
        with suppress(OSError):
            fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._root_fd)
            try:
                names = sorted(os.listdir(fd), key=_age)
                for name in names[:-MAX_FILES]:
                    _log.warning("the quarantine holds more than %d files, %s is removed", MAX_FILES, name)
                    with suppress(OSError):
                        os.unlink(name, dir_fd=fd)
            finally:
                os.close(fd)


def _age(name: str) -> int:
    """Return when a file was set aside, in ns; 0, the oldest, for names that are not ours."""
    stamp = name.rpartition(".")[2].partition("-")[0]
    return int(stamp) if stamp.isdecimal() else 0
