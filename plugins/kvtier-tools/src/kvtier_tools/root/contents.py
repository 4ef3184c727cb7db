"""A root and its caches, read without an engine.

It holds locks only for a moment. Files that other processes add or remove meanwhile are not errors. It yields
chunks one by one: a root may hold millions.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from kvtier.errors import TierError
from kvtier.keys import OffloadKey, group_index
from kvtier.tiers._base import ignore
from kvtier_tools import fs
from kvtier_tools.fs import (
    Accounts,
    DataDir,
    Namespace,
    StopFlag,
    layout,
    ledger,
    opened_lock,
    try_lock,
    wait_for_lock,
)
from kvtier_tools.report import Tick

_LEVELS: Final = (layout.PART, layout.LEAF)
_REMEDY: Final = "no engine opens the cache: remove the file, and the next engine writes it anew"


@dataclass(frozen=True, slots=True)
class ChunkFile:
    """A chunk's file, as listed in its directory."""

    path: str  # relative to the root
    key: OffloadKey  # from its name
    disk_bytes: int
    used: float  # Unix time of the last use

    @property
    def group(self) -> int:
        return group_index(self.key)


@dataclass(frozen=True, slots=True)
class UnknownEntry:
    """An entry among the chunks that is not a chunk's file."""

    path: str  # relative to the root
    problem: int = 0  # errno of a directory that cannot be read; else 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of ``config.json``."""

    fields: dict[str, Any]  # empty if it cannot be read
    digest: bytes | None  # the identity's; None if it does not match the directory's name
    problem: str  # why it is unusable; "" if it is valid, or missing: the next engine writes it

    @property
    def model(self) -> str | None:
        name = self.fields.get("model")
        return name if isinstance(name, str) else None


class Cache(Namespace):
    """One cache below a root."""

    def __init__(self, root: RootView, name: str, data_dirs: list[DataDir]) -> None:
        super().__init__(root, name, data_dirs)
        self._view = root

    @cached_property
    def manifest(self) -> Manifest:
        """The contents of ``config.json``."""
        try:
            text = layout.read_small(self._root.fd, f"{self.name}/{layout.MANIFEST}")
        except FileNotFoundError:
            return Manifest({}, None, "")
        except OSError as error:
            return Manifest({}, None, f"{layout.MANIFEST}: {error.strerror}")
        return _understood(self.name, text)

    @property
    def problem(self) -> str:
        """The problem of the whole cache; "" if there is none."""
        problem = self.manifest.problem
        if not problem and self.data_dirs and not self.is_orphaned and self.epoch is None:
            problem = "epoch is not readable: the next engine starts another one and removes these chunks"
        return problem

    @property
    def current(self) -> DataDir | None:
        """The directory of the current epoch's chunks; None if there is none."""
        wanted = self.epoch
        return next((found for found in self.data_dirs if found.epoch == wanted), None)

    @property
    def is_used(self) -> bool | None:
        """Whether a living process has it open; None if unknown."""
        # Openers take the epoch's lock first, so they do not collide with the users' locks held here.
        try:
            with wait_for_lock(self._root.fd, f"{self.name}/epoch.lock", create=False):
                known = self.users()
        except FileNotFoundError:
            return False
        except OSError:
            return None
        return True if True in known else None if None in known else False

    def users(self) -> set[bool | None]:
        """Return for the epochs whether living processes use them. The caller holds the epoch's lock."""
        epochs = layout.epochs_of_users(self._root.names(self.name))
        return {self._view.is_locked(layout.users_lock(self.name, epoch)) for epoch in epochs}

    def writers(self) -> dict[str, bool | None]:
        """Return for each writer with a directory for unfinished files whether it is alive."""
        folder = f"{self.name}/.tmp"
        names = {name.removesuffix(".lock") for name in self._root.names(folder)}
        return {name: self._view.is_locked(f"{folder}/{name}.lock") for name in sorted(names)}


class RootView(fs.Root):
    """A root directory, open for reading, with its caches and chunks."""

    def __enter__(self) -> RootView:
        return self

    def namespaces(self) -> list[Cache]:
        """Return the caches, sorted by name. TierError if the root cannot be read any more."""
        return [Cache(self, one.name, one.data_dirs) for one in super().namespaces()]

    def namespace(self, name: str) -> Cache:
        """Return the cache whose directory is ``name``. TierError, with a list, if there is none."""
        found = {one.name: one for one in self.namespaces()}
        if name in found:
            return found[name]
        names = ", ".join(found) or "none at all"
        raise TierError(f"{self.path} has no namespace {name!r}; it has: {names}")

    def others(self) -> list[str]:
        """Return the names directly below the root that are not kvtier's."""
        mine = {one.name for one in self.namespaces()}
        mine |= {found.name for one in self.namespaces() for found in one.data_dirs}
        return sorted(set(self.names(".")) - mine - {ledger.FOLDER})

    def chunks(self, data_dir: str, tick: Tick = ignore) -> Iterator[ChunkFile | UnknownEntry]:
        """Yield the files of an epoch's chunks, and other entries among them, in no order.

        Omits files that vanish meanwhile. An unreadable directory is an ``UnknownEntry`` with a problem.
        """
        yield from self._below(data_dir, "", 0, tick)

    def is_locked(self, path: str) -> bool | None:
        """Return whether a living process holds a lock file; None if unknown."""
        try:
            with opened_lock(self.fd, path, create=False) as fd:
                free = try_lock(fd)
        except FileNotFoundError:
            return False
        except OSError:
            return None
        return None if free is None else not free

    def _entries(self, folder: str, tick: Tick) -> Iterator[os.DirEntry[str] | UnknownEntry]:
        """Yield a directory's entries. It stays open meanwhile: ``entry.stat`` needs its descriptor."""
        try:
            with layout.open_folder(self.fd, folder) as fd, os.scandir(fd) as entries:
                for entry in entries:
                    yield entry
                    tick(1)
        except FileNotFoundError:
            return
        except OSError as error:
            yield UnknownEntry(folder, error.errno or errno.EIO)

    def _below(self, data_dir: str, path: str, level: int, tick: Tick) -> Iterator[ChunkFile | UnknownEntry]:
        for entry in self._entries(f"{data_dir}/{path}".rstrip("/"), tick):
            if isinstance(entry, UnknownEntry):
                yield entry
                continue
            below = f"{path}/{entry.name}".lstrip("/")
            if level < len(_LEVELS) and _LEVELS[level].fullmatch(entry.name):
                yield from self._below(data_dir, below, level + 1, tick)
            else:
                with suppress(OSError):  # it has vanished
                    yield _found(data_dir, below, entry)


def read_ledger(root_fd: int) -> Accounts | None:
    """Return a root's accounts for display, without a lock. None if there are none.

    A read during a write, or of another file, returns None too.
    """
    try:
        return ledger.parse(layout.read_small(root_fd, ledger.LEDGER))
    except OSError:
        return None


def remove_cache(root: RootView, name: str) -> bool:
    """Remove a cache unless a process uses it. Return whether it is gone.

    OSError if a file cannot be removed, TierError if the root cannot be read or has no such cache.
    """
    namespace, stop = root.namespace(name), StopFlag()
    sweeper = fs.Sweeper(root, stop)
    with wait_for_lock(root.fd, f"{name}/epoch.lock", create=True):  # no engine joins meanwhile
        if not {False}.issuperset((*namespace.users(), *namespace.writers().values())):
            return False  # it is in use, or that is unknown
        for found in namespace.data_dirs:
            sweeper.remove_chunks(found.name)
        fs.tree_remove(root.fd, name, stop)
    return True


def _found(data_dir: str, below: str, entry: os.DirEntry[str]) -> ChunkFile | UnknownEntry:
    found, path, key = entry.stat(follow_symlinks=False), f"{data_dir}/{below}", layout.key_of(below)
    if key is None or path != layout.chunk_path(data_dir, key) or not stat.S_ISREG(found.st_mode):
        return UnknownEntry(path)
    used = max(found.st_atime, found.st_mtime)
    return ChunkFile(path, key, found.st_blocks * 512, used)


def _understood(name: str, text: bytes) -> Manifest:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        return Manifest({}, None, f"{layout.MANIFEST} is not readable JSON; {_REMEDY}")
    if "kvtier_format" not in fields:
        return Manifest(fields, None, f"{layout.MANIFEST} is not one of kvtier's")
    named, digest = fs.NAMESPACE.fullmatch(name), hashlib.sha256(text).digest()
    if named is None or not digest.hex().startswith(named[1]):
        return Manifest(fields, None, f"{layout.MANIFEST} belongs to another cache; {_REMEDY}")
    return Manifest(fields, digest, "")
