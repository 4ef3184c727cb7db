"""Removal of files and directories below a root. What cannot be removed is counted, and stays."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from kvtier.tiers.fs._files.call import Failures, StopFlag, count_failure
from kvtier.tiers.fs._files.chunk_files import tree_remove
from kvtier.tiers.fs._locks import opened_lock, try_lock


class Removal:
    """Removes what is below a root. Paths are relative to it."""

    def __init__(self, root_fd: int, stop: StopFlag) -> None:
        self.root_fd = root_fd
        self.stop = stop
        self.failures: Failures = Counter()  # what could not be removed or looked into

    def tree(self, path: str) -> int:
        """Remove a directory. Returns the bytes removed."""
        try:
            return self._tree(path)
        except OSError as error:
            count_failure(self.failures, error)
            return 0

    def entry(self, path: str) -> int:
        """Remove a file, or a directory with all that is in it. Returns the bytes removed.

        Raises:
            OSError: something of it stays, which is counted in ``failures`` too.
        """
        try:
            found = os.stat(path, dir_fd=self.root_fd, follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                return self._tree(path)
            os.unlink(path, dir_fd=self.root_fd)
        except OSError as error:
            count_failure(self.failures, error)
            raise
        return found.st_blocks * 512

    def _tree(self, path: str) -> int:
        itself = os.stat(path, dir_fd=self.root_fd, follow_symlinks=False).st_blocks * 512
        return itself + tree_remove(self.root_fd, path, self.stop, self.failures)

    @contextmanager
    def alone(self, lock: str, *, create: bool) -> Iterator[bool]:
        """Hold a lock file if nobody else does, and remove it in the end. Yields whether it is held."""
        with opened_lock(self.root_fd, lock, create=create) as fd:
            is_held = try_lock(fd) is True
            yield is_held
            if is_held:
                os.unlink(lock, dir_fd=self.root_fd)


def remove_if_empty(root_fd: int, path: str) -> int:
    """Remove a directory if nothing is in it. Returns the bytes removed."""
    try:
        found = os.stat(path, dir_fd=root_fd, follow_symlinks=False)
        os.rmdir(path, dir_fd=root_fd)
    except OSError:
        return 0
    return found.st_blocks * 512
