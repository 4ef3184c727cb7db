"""Removing what nobody will use any more, in every namespace of a root. Blocks; needs no engine.

What a writer has not finished is removed when its lock shows that it is dead. An epoch is removed when
it is behind and nobody holds its users' lock.
"""

from __future__ import annotations

from contextlib import suppress
from math import inf

from kvtier.tiers.fs import _layout as layout
from kvtier.tiers.fs._files.call import StopFlag
from kvtier.tiers.fs._files.chunk_files import tree_remove
from kvtier.tiers.fs._locks import wait_for_lock
from kvtier.tiers.fs._maintenance.quarantine import MAX_FILES, by_age, prune
from kvtier.tiers.fs._maintenance.removal import Removal
from kvtier.tiers.fs._root import Namespace, Root


def remove_cache(root: Root, name: str) -> bool:
    """Remove a cache unless a living process uses it. Return whether it is gone.

    Raises:
        OSError: something cannot be removed.
        TierError: the root cannot be read, or has no such cache.
    """
    namespace, stop = root.namespace(name), StopFlag()
    with wait_for_lock(root.fd, f"{name}/epoch.lock", create=True):  # nobody joins meanwhile
        if not _is_left(root, namespace):
            return False
        for found in namespace.data_dirs:
            tree_remove(root.fd, found.name, stop)
        tree_remove(root.fd, name, stop)
    return True


def _is_left(root: Root, namespace: Namespace) -> bool:
    """Return whether nobody uses a cache, under its epoch's lock."""
    epochs = layout.epochs_of_users(root.names(namespace.name))
    used = [root.is_locked(layout.users_lock(namespace.name, epoch)) for epoch in epochs]
    return not any(alive is not False for alive in (*used, *namespace.writers().values()))


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
            with suppress(OSError), self.alone(lock, create=False) as alone:
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
            with suppress(OSError), self.alone(lock, create=True) as alone:
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
        pruned = prune(self, folder, MAX_FILES)
        if pruned.problem is not None and not self.stop:
            what = f"{folder} holds more than {MAX_FILES} entries, which cannot be removed"
            self.problems.append(f"{what}: {pruned.problem}")
        return pruned.bytes
