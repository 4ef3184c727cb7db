"""Removal of what is below a root; what cannot be removed is counted and stays for the next time."""

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
    """Removes what is below a root. Paths are relative to it.

    Attributes:
        failures: what could not be removed or looked into.
    """

    def __init__(self, root_fd: int, stop: StopFlag) -> None:
        self.stop = stop
        self.failures: Failures = Counter()
        self._root_fd = root_fd

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
            found = os.stat(path, dir_fd=self._root_fd, follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                return self._tree(path)
            os.unlink(path, dir_fd=self._root_fd)
        except OSError as error:
            count_failure(self.failures, error)
            raise
        return found.st_blocks * 512

    def _tree(self, path: str) -> int:
        itself = os.stat(path, dir_fd=self._root_fd, follow_symlinks=False).st_blocks * 512
        return itself + tree_remove(self._root_fd, path, self.stop, self.failures)

    def folder(self, path: str) -> int:
        """Remove a directory if nothing is in it. Returns its bytes."""
        try:
            found = os.stat(path, dir_fd=self._root_fd, follow_symlinks=False)
            os.rmdir(path, dir_fd=self._root_fd)
        except OSError:
            return 0
        return found.st_blocks * 512

    @contextmanager
    def alone(self, lock: str, *, create: bool) -> Iterator[bool]:
        """Hold a lock file if nobody else does, and remove it in the end. Yields whether it is held."""
        with opened_lock(self._root_fd, lock, create=create) as fd:
            is_held = try_lock(fd) is True
            yield is_held
            if is_held:
                os.unlink(lock, dir_fd=self._root_fd)

    def take_failures(self) -> Failures:
        """Return the failures since the last call, and forget them."""
        failures, self.failures = self.failures, Counter()
        return failures
