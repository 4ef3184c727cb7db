"""``kvtier ls`` and ``kvtier du``: what a root holds, and how much of the disk it takes."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvtier.cli.report import Bytes, ago, is_wide, print_line, progress, table, yes_no
from kvtier.tiers.fs.quota import ledger
from kvtier.tiers.fs.root import ChunkFile, Namespace, Root, Stray, Tick


@dataclass(frozen=True, slots=True)
class Listed:
    """A cache of a root.

    Attributes:
        namespace: the name of its directory.
        model: the model's name; None where the manifest cannot be read.
        digest: of the identity, in hexadecimal digits; None where the manifest does not belong here.
        groups: KV cache groups that chunks belong to.
        epoch: what an engine that opens it now joins; None where that cannot be said.
        chunks: that such an engine can be given.
        old_chunks: of other epochs, which are removed when nobody uses them.
        bytes: what all of them take on disk.
        in_use: whether a living process has it open; None where that cannot be said.
        last_use: when a chunk was last used, in seconds since the epoch of Unix; None without chunks.
        problem: what is wrong, in words; "" where nothing is.
    """

    namespace: str
    model: str | None
    digest: str | None
    groups: list[int]
    epoch: int | None
    chunks: int
    old_chunks: int
    bytes: int
    in_use: bool | None
    last_use: float | None
    problem: str


@dataclass(frozen=True, slots=True)
class Listing:
    """What a root holds.

    Attributes:
        root: the directory.
        namespaces: the caches.
        others: names directly below the root that are not kvtier's.
    """

    root: str
    namespaces: list[Listed]
    others: list[str]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of what a root takes.

    Attributes:
        namespace: whose; "" for what is not kvtier's.
        part: ``chunks``, ``old epochs``, ``quarantine``, ``unfinished``, ``rest``,
            and ``ledger``, ``others``.
        files: how many files.
        bytes: what they and their directories take on disk.
    """

    namespace: str
    part: str
    files: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Usage:
    """How much of a disk a root takes.

    Attributes:
        root: the directory.
        bytes: what it takes in all.
        total_bytes: of its file system.
        free_bytes: of its file system, for unprivileged users.
        unreadable: directories that could not be looked into, so that the sums are too small.
        parts: the parts.
    """

    root: str
    bytes: int
    total_bytes: int
    free_bytes: int
    unreadable: int
    parts: list[Part]


def listing(path: Path) -> Listing:
    """Look at every chunk's file of a root.

    Raises:
        TierError: the root cannot be read.
    """
    with Root(path) as root, progress("files") as tick:
        listed = [_listed(root, one, tick) for one in root.namespaces()]
        return Listing(str(path), listed, root.others())


def _listed(root: Root, one: Namespace, tick: Tick) -> Listed:
    sums = _Sums()
    current = one.current
    for place in one.data_dirs:
        for found in root.chunks(place.name, tick):
            sums.add(found, place == current)
    manifest = one.manifest
    problems = [one.problem] if one.problem else []
    if sums.unreadable:
        problems.append(f"{sums.unreadable} files and directories cannot be read")
    return Listed(
        namespace=one.name,
        model=manifest.model,
        digest=manifest.digest.hex() if manifest.digest else None,
        groups=sorted(sums.groups),
        epoch=one.epoch,
        chunks=sums.current,
        old_chunks=sums.old,
        bytes=sums.bytes,
        in_use=is_used(one),
        last_use=sums.last_use,
        problem="; ".join(problems),
    )


@dataclass(slots=True)
class _Sums:
    """What is added up of a cache's files."""

    current: int = 0
    old: int = 0
    bytes: int = 0
    unreadable: int = 0
    last_use: float | None = None
    groups: set[int] = field(default_factory=set)

    def add(self, found: ChunkFile | Stray, is_current: bool) -> None:
        """Add a file."""
        if isinstance(found, Stray):
            self.unreadable += bool(found.problem)
            return
        self.groups.add(found.group)
        self.current += is_current
        self.old += not is_current
        self.bytes += found.disk_bytes
        self.last_use = max(self.last_use or 0.0, found.used)


def is_used(one: Namespace) -> bool | None:
    """Say whether a living process has a namespace open; None where that cannot be said."""
    known = set(one.users().values())
    return True if True in known else None if None in known else False


def show(listing: Listing) -> None:
    """Print a listing for people."""
    columns = _COLUMNS if is_wide() else {name: _COLUMNS[name] for name in _NARROW}
    rows = [[show(one) for show in columns.values()] for one in listing.namespaces]
    table(listing.root, list(columns), rows)
    for one in listing.namespaces:
        if one.problem:
            print_line(f"{one.namespace}: {one.problem}")
    if listing.others:
        print_line(f"not kvtier's: {', '.join(listing.others)}")


_COLUMNS: Final[Mapping[str, Callable[[Listed], object]]] = {
    "namespace": lambda one: one.namespace,
    "model": lambda one: one.model,
    "groups": lambda one: one.groups,
    "epoch": lambda one: one.epoch,
    "chunks": lambda one: one.chunks,
    "old": lambda one: one.old_chunks,
    "bytes": lambda one: Bytes(one.bytes),
    "in use": lambda one: yes_no(one.in_use),
    "used": lambda one: ago(one.last_use),
}
_NARROW: Final = ("namespace", "epoch", "chunks", "bytes", "in use", "used")


def usage(path: Path) -> Usage:
    """Add up what everything below a root takes.

    Raises:
        TierError: the root cannot be read.
    """
    with Root(path) as root, progress("files") as tick:
        walk = _Walk(root, tick)
        parts = [part for one in root.namespaces() for part in _parts(walk, one)]
        parts.append(walk.part("", "ledger", ledger.FOLDER))
        parts += [walk.part("", "others", name) for name in root.others()]
        disk = os.fstatvfs(root.fd)
        return Usage(
            root=str(path),
            bytes=sum(part.bytes for part in parts),
            total_bytes=disk.f_blocks * disk.f_frsize,
            free_bytes=disk.f_bavail * disk.f_frsize,
            unreadable=walk.unreadable,
            parts=_summed(parts),
        )


def show_usage(usage: Usage) -> None:
    """Print a usage for people."""
    rows = [(part.namespace, part.part, part.files, Bytes(part.bytes)) for part in usage.parts]
    rows.append(("", "in all", sum(part.files for part in usage.parts), Bytes(usage.bytes)))
    table(usage.root, ("namespace", "part", "files", "bytes"), rows)
    if usage.unreadable:
        print_line(
            f"the sums are too small: {usage.unreadable:,} directories cannot be read; ask their owner"
        )


def _parts(walk: _Walk, one: Namespace) -> Iterator[Part]:
    for place in one.data_dirs:
        part = "chunks" if place == one.current else "old epochs"
        yield walk.part(one.name, part, place.name)
    yield walk.part(one.name, "quarantine", f"{one.name}/quarantine")
    yield walk.part(one.name, "unfinished", f"{one.name}/.tmp")
    yield walk.part(one.name, "rest", one.name, without=frozenset({"quarantine", ".tmp"}))


def _summed(parts: list[Part]) -> list[Part]:
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for part in parts:
        files, taken = sums.get((part.namespace, part.part), (0, 0))
        sums[part.namespace, part.part] = files + part.files, taken + part.bytes
    return [Part(*whose, *its) for whose, its in sums.items() if any(its)]


class _Walk:
    """Adds up what is below directories. Links are not followed, other file systems not entered."""

    def __init__(self, root: Root, tick: Tick) -> None:
        self.unreadable = 0
        self._root = root
        self._tick = tick
        self._device = os.fstat(root.fd).st_dev

    def part(self, namespace: str, part: str, path: str, without: frozenset[str] = frozenset()) -> Part:
        try:
            found = os.stat(path, dir_fd=self._root.fd, follow_symlinks=False)
        except FileNotFoundError:
            return Part(namespace, part, 0, 0)
        files, taken = self._below(path, without) if stat.S_ISDIR(found.st_mode) else (1, 0)
        return Part(namespace, part, files, taken + found.st_blocks * 512)

    def _below(self, path: str, without: frozenset[str]) -> tuple[int, int]:
        files = taken = 0
        folders = [path]
        while folders:
            folder = folders.pop()
            for name, mode, blocks in self._entries(folder):
                if folder == path and name in without:
                    continue
                taken += blocks * 512
                if stat.S_ISDIR(mode):
                    folders.append(f"{folder}/{name}")
                else:
                    files += 1
        return files, taken

    def _entries(self, folder: str) -> Iterator[tuple[str, int, int]]:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(folder, flags, dir_fd=self._root.fd)
        except FileNotFoundError:
            return
        except OSError:
            self.unreadable += 1
            return
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    self._tick(1)
                    try:
                        found = entry.stat(follow_symlinks=False)
                    except OSError:  # it has vanished
                        continue
                    if found.st_dev == self._device:
                        yield entry.name, found.st_mode, found.st_blocks
        finally:
            os.close(fd)
