"""Removing what nobody will use any more, in every namespace of a root. Blocks; needs no engine.

What a writer has not finished is removed when its lock shows that it is dead. An epoch is removed when
it is behind and nobody holds its users' lock.
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

from kvtier.tiers.fs import _layout as layout
from kvtier.tiers.fs._files.call import Failures, StopFlag, count_failure
from kvtier.tiers.fs._files.chunk_files import tree_remove
from kvtier.tiers.fs._locks import removed_lock, wait_for_lock
from kvtier.tiers.fs._root import Namespace, Root

MAX_FILES: Final = 128
"""Entries in the quarantine of one namespace, of whatever kind."""

_QUARANTINED: Final = re.compile(r".+\.[a-z]+\.([0-9]{1,20})-[0-9]{1,10}")


def remove_cache(root: Root, name: str) -> bool:
    """Remove a cache unless a living process uses it. Return whether it is gone.

    Raises:
        OSError: something cannot be removed.
        TierError: the root cannot be read, or has no such cache.
    """
    namespace, stop = root.namespace(name), StopFlag()
    with wait_for_lock(root.fd, f"{name}/epoch.lock", create=True):  # nobody joins meanwhile
        if not {False}.issuperset((*namespace.users(), *namespace.writers().values())):
            return False  # or it is not known whether somebody uses it
        for found in namespace.data_dirs:
            tree_remove(root.fd, found.name, stop)
        tree_remove(root.fd, name, stop)
    return True


class Pruned(NamedTuple):
    """What ``Removal.prune`` has done."""

    entries: int  # that are gone
    bytes: int  # that they took
    problem: str | None  # why there are still too many


def by_age(names: Iterable[str]) -> list[str]:
    """Return the names of quarantined entries, the oldest first, and no other names."""
    aged = [(int(found[1]), name) for name in names if (found := _QUARANTINED.fullmatch(name))]
    return [name for _, name in sorted(aged)]


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

    def prune(self, folder: str, keep: int) -> Pruned:
        """Remove the oldest entries of a quarantine, until there are ``keep``."""
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
    """Removes what is left over below a root. Its methods return the bytes removed, about.

    Args:
        ours: writers of this process: with some network file systems a lock does not tell two
            users in one process apart.

    Attributes:
        problems: what should have been removed and could not be, and why.
    """

    def __init__(self, root: Root, stop: StopFlag, ours: frozenset[str]) -> None:
        super().__init__(root.fd, stop)
        self._root = root
        self._ours = ours
        self.problems: list[str] = []

    def remove_leftovers(self, want_bytes: int) -> int:
        """Remove orphans, then what ``sweep`` does, then the quarantine, until so many bytes are removed."""
        removed = self.sweep_orphans(want_bytes)
        if removed < want_bytes:
            removed += self.sweep()
        return removed + self._sweep_quarantines(want_bytes - removed)

    def sweep(self) -> int:
        """Remove what the dead left behind, epochs that nobody uses, and quarantined files over the bound."""
        removed = 0
        for namespace in self._root.namespaces():
            removed += self._sweep_writers(namespace) + self._sweep_epochs(namespace)
            if namespace.is_kvtiers:
                removed += self._prune_quarantine(namespace)
        return removed

    def _sweep_writers(self, namespace: Namespace) -> int:
        folder = f"{namespace.name}/.tmp"
        names = set(self._root.names(folder))
        removed = 0
        for writer in {name.removesuffix(".lock") for name in names} - self._ours:
            if self.stop:
                break
            lock = f"{folder}/{writer}.lock"
            with suppress(OSError), removed_lock(self.root_fd, lock, create=False) as alone:
                if alone:
                    removed += self.tree(f"{folder}/{writer}")
            # The lock is there before the directory and goes after it.
            if f"{writer}.lock" not in names and not self._root.is_there(lock):
                removed += self.tree(f"{folder}/{writer}")
        return removed

    def _sweep_epochs(self, namespace: Namespace) -> int:
        current = namespace.epoch
        if current is None:
            return 0
        traces = layout.epochs_of_users(self._root.names(namespace.name))
        traces |= {found.epoch for found in namespace.data_dirs}
        removed = 0
        for number in sorted(number for number in traces if number < current):
            if self.stop:
                break
            lock = layout.users_lock(namespace.name, number)
            with suppress(OSError), removed_lock(self.root_fd, lock, create=True) as alone:
                if alone:
                    removed += self.tree(layout.data_dir(namespace.name, number))
        return removed

    def sweep_orphans(self, want_bytes: float = inf) -> int:
        """Remove chunks of which nothing says whose they are, until so many bytes are removed."""
        removed = 0
        for namespace in self._root.namespaces():
            if removed < want_bytes and namespace.is_orphaned:
                removed += sum(self.tree(found.name) for found in namespace.data_dirs)
        return removed

    def _sweep_quarantines(self, want_bytes: int) -> int:
        """Remove what failed a check, the oldest first in each namespace, until so many bytes are removed."""
        removed = 0
        for namespace in self._root.namespaces():
            for name in by_age(namespace.quarantine()):
                if self.stop or removed >= want_bytes:
                    return removed
                with suppress(OSError):
                    removed += self.entry(f"{namespace.name}/quarantine/{name}")
        return removed

    def _prune_quarantine(self, namespace: Namespace) -> int:
        if self.stop:
            return 0
        folder = f"{namespace.name}/quarantine"
        pruned = self.prune(folder, MAX_FILES)
        if pruned.problem is not None and not self.stop:
            what = f"{folder} holds more than {MAX_FILES} entries, which cannot be removed"
            self.problems.append(f"{what}: {pruned.problem}")
        return pruned.bytes
