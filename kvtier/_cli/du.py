"""``kvtier du``: how much of the disk the parts of a root take."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtier._cli.report import Bytes, JsonFlag, finish, print_line, progress, table
from kvtier._cli.roots import RootArgument, require_root
from kvtier.tiers.fs._quota import ledger
from kvtier.tiers.fs._root import Namespace, Root, Tick


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


def command(root: RootArgument, as_json: JsonFlag = False) -> None:
    """Add up what the parts of a root take on disk.

    Exit status 1 where directories cannot be read, so that the sums are too small.

    Example: kvtier du /var/cache/kvtier
    """
    require_root(root)
    taken = usage(root)
    finish(taken, _show, as_json=as_json, is_healthy=not taken.unreadable)


def usage(path: Path) -> Usage:
    """Return what everything below a root takes.

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


def _show(usage: Usage) -> None:
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
