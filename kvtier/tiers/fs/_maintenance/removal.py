"""Removal, or in a dry run the count of what it would remove: the one module where the two differ."""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from kvtier.tiers.fs import _layout as layout
from kvtier.tiers.fs._files.call import Failures, StopFlag
from kvtier.tiers.fs._files.chunk_files import tree_bytes, tree_remove
from kvtier.tiers.fs._locks import open_lock, try_lock


class Removal:
    """Removes what is below a root. Paths are relative to it.

    Args:
        root_fd: the root directory, open.
        stop: set where it shall end soon.
        dry_run: remove nothing, and count what would be removed, each path once.

    Attributes:
        failures: what could not be removed or looked into.
    """

    def __init__(self, root_fd: int, stop: StopFlag, *, dry_run: bool = False) -> None:
        self.stop = stop
        self.dry_run = dry_run
        self.failures: Failures = Counter()
        self._root_fd = root_fd
        self._counted: set[str] = set()

    def tree(self, path: str) -> int:
        """Remove a directory. Returns the bytes removed; what cannot be removed stays for the next time."""
        if self._is_counted(path):
            return 0
        try:
            return self._tree(path)
        except OSError as error:
            self._note(error)
            return 0

    def entry(self, path: str) -> int:
        """Remove a file, or a directory with all that is in it. Returns the bytes removed.

        Raises:
            OSError: something of it stays, which is counted in ``failures`` too.
        """
        if self._is_counted(path):
            return 0
        try:
            found = os.stat(path, dir_fd=self._root_fd, follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                return self._tree(path)
            if not self.dry_run:
                os.unlink(path, dir_fd=self._root_fd)
        except OSError as error:
            self._note(error)
            raise
        return found.st_blocks * 512

    def _tree(self, path: str) -> int:
        walk = tree_bytes if self.dry_run else tree_remove
        itself = os.stat(path, dir_fd=self._root_fd, follow_symlinks=False).st_blocks * 512
        return itself + walk(self._root_fd, path, self.stop, self.failures)

    def folder(self, path: str, *, is_empty: bool) -> int:
        """Remove a directory if nothing is in it. Returns its bytes.

        Args:
            path: the directory.
            is_empty: whether a dry run has found that nothing would be left in it.
        """
        try:
            found = os.stat(path, dir_fd=self._root_fd, follow_symlinks=False)
            if not self.dry_run:
                os.rmdir(path, dir_fd=self._root_fd)
        except OSError:
            return 0
        return found.st_blocks * 512 if is_empty or not self.dry_run else 0

    @contextmanager
    def alone(self, lock: str, *, create: bool) -> Iterator[bool]:
        """Hold a lock file if nobody else does, and remove it in the end. Yields whether it is held."""
        try:
            fd = open_lock(self._root_fd, lock, create=create and not self.dry_run)
        except FileNotFoundError:
            if not create:
                raise
            yield True  # a dry run makes none
            return
        try:
            is_held = try_lock(fd) is True
            yield is_held
            if is_held and not self.dry_run:
                os.unlink(lock, dir_fd=self._root_fd)
        finally:
            os.close(fd)

    def names(self, folder: str) -> list[str]:
        """Return the names left in a directory, in a dry run without those it has counted. OSError."""
        names = layout.names_in(self._root_fd, folder)
        return [name for name in names if not self.is_gone(f"{folder}/{name}")]

    def take_failures(self) -> Failures:
        """Return the failures since the last call, and forget them."""
        failures, self.failures = self.failures, Counter()
        return failures

    def is_gone(self, path: str) -> bool:
        """Return whether a dry run has counted a path already."""
        return path in self._counted

    def _is_counted(self, path: str) -> bool:
        known = self.is_gone(path)
        if self.dry_run:
            self._counted.add(path)
        return known

    def _note(self, error: OSError) -> None:
        if error.errno not in (errno.ENOENT, errno.ECANCELED):  # somebody else has removed it
            self.failures[error.errno or errno.EIO] += 1
