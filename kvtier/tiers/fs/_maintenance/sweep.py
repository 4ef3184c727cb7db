"""Removes useless data in every namespace of a root. Blocks; needs no engine.

Unfinished files leave when their writer's lock is free, an old epoch when its users' lock is free.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from math import inf
from typing import Final, NamedTuple

from kvtier.tiers._base import ignore
from kvtier.tiers.fs import _layout as layout
from kvtier.tiers.fs._files.chunk_files import tree_remove
from kvtier.tiers.fs._files.native_call import Failures, StopFlag, count_failure
from kvtier.tiers.fs._locks import removed_lock
from kvtier.tiers.fs._maintenance.ages import BUCKETS, CLASSES
from kvtier.tiers.fs._maintenance.scan import ALL_BYTES, ChunkScan, Freed, remove_if_empty
from kvtier.tiers.fs._root import Namespace, Root

MAX_FILES: Final = 128  # entries of any kind in the quarantine of one namespace
_QUARANTINED: Final = re.compile(r".+\.[a-z]+\.([0-9]{1,20})-[0-9]{1,10}")


class Pruned(NamedTuple):
    """The result of ``Removal.prune``."""

    entries: int  # removed
    bytes: int  # the removed entries' disk use
    problem: str | None  # reason why too many entries remain


def by_age(names: Iterable[str]) -> list[str]:
    """Return the names that are quarantined entries, the oldest first."""
    aged = [(int(found[1]), name) for name in names if (found := _QUARANTINED.fullmatch(name))]
    return [name for _, name in sorted(aged)]


class Removal:
    """Removes files and directories below a root. Paths are relative to it."""

    def __init__(self, root_fd: int, stop: StopFlag) -> None:
        self.root_fd = root_fd
        self.stop = stop
        self.failures: Failures = Counter()  # files and directories not removed or read

    def tree(self, path: str) -> int:
        """Remove a directory; count failures. Returns the bytes removed."""
        try:
            return self._tree(path)
        except OSError as error:
            count_failure(self.failures, error)
            return 0

    def entry(self, path: str) -> int:
        """Remove a file or a directory tree. Returns the bytes removed. Counts and raises an OSError."""
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

    def prune(self, folder: str, keep: int) -> Pruned:
        """Remove the oldest entries of a quarantine until ``keep`` are left."""
        try:
            names = layout.names_in(self.root_fd, folder)
        except OSError as error:
            return Pruned(0, 0, error.strerror)
        entries, removed_bytes, problem = 0, 0, "not kvtier's"
        for name in by_age(names):
            if len(names) - entries <= keep:
                break
            try:
                removed_bytes += self.entry(f"{folder}/{name}")
                entries += 1
            except FileNotFoundError:
                entries += 1
            except OSError as error:
                problem = error.strerror or problem
        return Pruned(entries, removed_bytes, None if len(names) - entries <= keep else problem)


class Sweeper(Removal):
    """Removes leftovers below a root. In chunks' directories it removes only files named as chunks.

    Args:
        ours: writers of this process: on some network file systems its locks do not exclude each other.
        freed: callback for removed bytes.
        want_bytes: bytes after which ``remove_leftovers`` stops.
    """

    def __init__(
        self,
        root: Root,
        stop: StopFlag,
        ours: frozenset[str] = frozenset(),
        freed: Freed = ignore,
        want_bytes: float = inf,
    ) -> None:
        super().__init__(root.fd, stop)
        self._root = root
        self._ours = ours
        self._freed = freed
        self._want_bytes = want_bytes
        self.bytes = 0  # removed, about
        self.problems: list[str] = []  # leftovers that could not be removed, with causes

    @property
    def _is_done(self) -> bool:
        return bool(self.stop) or self.bytes >= self._want_bytes

    def _count(self, removed: int) -> None:
        self.bytes += removed
        self._freed(removed)

    def remove_leftovers(self) -> None:
        """Remove orphans, then ``sweep``, then empty the quarantines, until enough is removed."""
        self.sweep_orphans()
        if not self._is_done:
            self.sweep()
        self._sweep_quarantines()

    def sweep(self) -> None:
        """Remove leftovers of dead writers, unused old epochs, and quarantined files beyond the bound."""
        for namespace in self._root.namespaces():
            self._sweep_writers(namespace)
            self._sweep_epochs(namespace)
            if namespace.is_kvtiers:
                self._prune_quarantine(namespace)

    def remove_chunks(self, data_dir: str) -> None:
        """Remove the chunks of an epoch, and emptied directories."""
        scan = ChunkScan(0, leaving=bytearray(b"\1" * (CLASSES * BUCKETS)), want_bytes=ALL_BYTES)
        for part in filter(layout.PART.fullmatch, self._root.names(data_dir)):
            if self._is_done:
                return
            path, removed = f"{data_dir}/{part}", [""]
            while removed:
                before = scan.removed_bytes
                try:
                    removed = scan.scan(self.root_fd, path, self.stop)
                except OSError as error:
                    count_failure(scan.failures, error)
                    break
                self._count(scan.removed_bytes - before)
            leaves = filter(layout.LEAF.fullmatch, self._root.names(path))
            for folder in (*(f"{path}/{leaf}" for leaf in leaves), path):
                self._count(remove_if_empty(self.root_fd, folder))
        self.failures.update(scan.failures)
        self._count(remove_if_empty(self.root_fd, data_dir))

    def sweep_orphans(self) -> None:
        for namespace in self._root.namespaces():
            if namespace.is_orphaned:
                for found in namespace.data_dirs:
                    self.remove_chunks(found.name)

    def _sweep_writers(self, namespace: Namespace) -> None:
        folder = f"{namespace.name}/.tmp"
        names = set(self._root.names(folder))
        for writer in {name.removesuffix(".lock") for name in names} - self._ours:
            if self._is_done or not layout.WRITER.fullmatch(writer):
                continue
            lock = f"{folder}/{writer}.lock"
            with suppress(OSError), removed_lock(self.root_fd, lock, create=False) as alone:
                if alone:
                    self._count(self.tree(f"{folder}/{writer}"))
            # A writer makes the lock before the directory, and removes it after the directory.
            if f"{writer}.lock" not in names and not self._root.is_there(lock):
                self._count(self.tree(f"{folder}/{writer}"))

    def _sweep_epochs(self, namespace: Namespace) -> None:
        current = namespace.epoch
        if current is None:
            return
        traces = layout.epochs_of_users(self._root.names(namespace.name))
        traces |= {found.epoch for found in namespace.data_dirs}
        for number in sorted(number for number in traces if number < current):
            if self._is_done:
                break
            lock = layout.users_lock(namespace.name, number)
            with suppress(OSError), removed_lock(self.root_fd, lock, create=True) as alone:
                if alone:
                    self.remove_chunks(layout.data_dir(namespace.name, number))

    def _sweep_quarantines(self) -> None:
        """Remove quarantined files, the oldest of each namespace first, until enough is removed."""
        for namespace in self._root.namespaces():
            for name in by_age(namespace.quarantine()):
                if self._is_done:
                    return
                with suppress(OSError):
                    self._count(self.entry(f"{namespace.name}/quarantine/{name}"))

    def _prune_quarantine(self, namespace: Namespace) -> None:
        if self.stop:
            return
        folder = f"{namespace.name}/quarantine"
        pruned = self.prune(folder, MAX_FILES)
        if pruned.problem is not None and not self.stop:
            what = f"{folder} holds more than {MAX_FILES} entries, which cannot be removed"
            self.problems.append(f"{what}: {pruned.problem}")
        self._count(pruned.bytes)
