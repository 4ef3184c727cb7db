"""The root of a file tier on disk, read without an engine, for sweeps and the command line.

It holds locks only for a moment. Files that other processes add or remove meanwhile are not errors. It yields
chunks one by one, because a root may hold millions.

A cache is a directory ``<model>_<digest>`` that contains kvtier's manifest or an epoch, and directories
``<model>_<digest>_r0[.e<epoch>]``. Everything else below a root is foreign.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from kvtier.errors import TierError
from kvtier.keys import OffloadKey, group_index
from kvtier.tiers._base import ignore
from kvtier.tiers.fs import _layout as layout
from kvtier.tiers.fs._locks import opened_lock, try_lock, wait_for_lock
from kvtier.tiers.fs._quota import ledger

_NAMESPACE: Final = re.compile(r"[A-Za-z0-9.-]+_([0-9a-f]{16})")
_LEVELS: Final = (layout.PART, layout.LEAF)
_REMEDY: Final = "no engine opens the cache: remove the file, and the next engine writes it anew"

Tick = Callable[[int], None]
"""Called with the number of files read since the last call."""


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
class DataDir:
    """The chunks of one epoch."""

    name: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of ``config.json``."""

    fields: dict[str, Any]  # empty if it cannot be read
    digest: bytes | None  # the identity's; None if it does not match the directory's name
    # Reason why it is unusable. "" if it is valid, or if it is missing, because the next engine writes it.
    problem: str

    @property
    def model(self) -> str | None:
        name = self.fields.get("model")
        return name if isinstance(name, str) else None


class Namespace:
    """One cache below a root, as tools see it."""

    def __init__(self, root: Root, name: str, data_dirs: list[DataDir]) -> None:
        self._root = root
        self.name = name  # its directory's name
        self.data_dirs = sorted(data_dirs, key=lambda found: found.epoch)  # time when the root was listed

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
    def is_orphaned(self) -> bool:
        """Whether no engine can open its chunks. False unless it holds only directories of chunks.

        Other contents may belong to another program.
        """
        if not self.data_dirs or self._root.is_home(self.name):
            return False
        return all(
            layout.PART.fullmatch(name) for found in self.data_dirs for name in self._root.names(found.name)
        )

    @property
    def is_kvtiers(self) -> bool:
        """Whether kvtier made the cache."""
        if "kvtier_format" in self.manifest.fields:
            return True
        return any(self._root.is_there(f"{self.name}/{sign}") for sign in ("epoch", "epoch.lock"))

    @property
    def problem(self) -> str:
        """The problem of the whole cache; "" if there is none."""
        problem = self.manifest.problem
        if not problem and self.data_dirs and not self.is_orphaned and self.epoch is None:
            problem = "epoch is not readable: the next engine starts another one and removes these chunks"
        return problem

    @property
    def epoch(self) -> int | None:
        """The epoch that an engine would join now; None if unknown."""
        return layout.stored_epoch(self._root.fd, self.name)

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
        return {self._root.is_locked(layout.users_lock(self.name, epoch)) for epoch in epochs}

    def writers(self) -> dict[str, bool | None]:
        """Return, for each writer with a directory for unfinished files, whether it is alive."""
        folder = f"{self.name}/.tmp"
        names = {name.removesuffix(".lock") for name in self._root.names(folder)}
        return {name: self._root.is_locked(f"{folder}/{name}.lock") for name in sorted(names)}

    def quarantine(self) -> list[str]:
        return sorted(self._root.names(f"{self.name}/quarantine"))


class Root:
    """A root directory, open for reading. A context manager. TierError if the root cannot be read.

    ``root`` is its path, or an open descriptor, which stays the caller's. ``only`` has the names of the
    namespaces to show; None for all.
    """

    def __init__(self, root: Path | int, only: Container[str] | None = None) -> None:
        self.path = Path(".") if isinstance(root, int) else root
        self._only = only
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            self.fd = os.dup(root) if isinstance(root, int) else os.open(root, flags)
        except OSError as error:
            what = "the root" if isinstance(root, int) else root
            whose = layout.owner_of(error, Path("."))
            raise TierError(f"{what} cannot be read: {error.strerror}{whose}") from error

    def __enter__(self) -> Root:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self.fd)

    def namespaces(self) -> list[Namespace]:
        """Return the caches, sorted by name. TierError if the root cannot be read any more."""
        data_dirs: dict[str, list[DataDir]] = {}
        homes = []
        for name in self._directories():
            if found := layout.parse_data_dir(name):
                data_dirs.setdefault(found[0], []).append(DataDir(name, found[1]))
            elif _NAMESPACE.fullmatch(name) and self.is_home(name):
                homes.append(name)
        wanted = sorted(name for name in {*homes, *data_dirs} if self._only is None or name in self._only)
        found_here = [Namespace(self, name, data_dirs.get(name, [])) for name in wanted]
        return [one for one in found_here if one.is_kvtiers or one.is_orphaned]

    def namespace(self, name: str) -> Namespace:
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

    def names(self, folder: str) -> list[str]:
        """Return the names in a directory; none if it is missing or unreadable."""
        try:
            return layout.names_in(self.fd, folder)
        except OSError:
            return []

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

    def _directories(self) -> list[str]:
        try:
            with os.scandir(self.fd) as entries:
                return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError as error:
            raise TierError(f"{self.path} cannot be read: {error.strerror}") from error

    def is_home(self, name: str) -> bool:
        return any(self.is_there(f"{name}/{sign}") for sign in (layout.MANIFEST, "epoch", "epoch.lock"))

    def is_there(self, path: str) -> bool:
        """Return whether a path exists. A path that cannot be examined counts as existing."""
        try:
            os.stat(path, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return True

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
    named, digest = _NAMESPACE.fullmatch(name), hashlib.sha256(text).digest()
    if named is None or not digest.hex().startswith(named[1]):
        return Manifest(fields, None, f"{layout.MANIFEST} belongs to another cache; {_REMEDY}")
    return Manifest(fields, digest, "")
