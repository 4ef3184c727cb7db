"""``kvtier ls``: the caches of a root."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvtier._cli.report import Bytes, JsonFlag, ago, finish, print_line, progress, table, yes_no
from kvtier._cli.roots import RootArgument
from kvtier.tiers.fs._root import ChunkFile, Namespace, Root, Tick, UnknownEntry


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


def command(root: RootArgument, as_json: JsonFlag = False) -> None:
    """List the caches of a root: model, epoch, chunks, bytes, and whether an engine uses it.

    Exit status 1 where a cache has a manifest that does not belong to it, its epoch is not readable, or
    directories cannot be read.

    Example: kvtier ls /var/cache/kvtier
    """
    found = listing(root)
    finish(found, _show, as_json=as_json, is_healthy=not any(one.problem for one in found.namespaces))


def listing(path: Path) -> Listing:
    """Return the caches of a root; it looks at the file of every chunk.

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
        in_use=one.is_used,
        last_use=sums.last_use,
        problem="; ".join(problems),
    )


@dataclass(slots=True)
class _Sums:
    """Sums over a cache's files."""

    current: int = 0
    old: int = 0
    bytes: int = 0
    unreadable: int = 0
    last_use: float | None = None
    groups: set[int] = field(default_factory=set)

    def add(self, found: ChunkFile | UnknownEntry, is_current: bool) -> None:
        if isinstance(found, UnknownEntry):
            self.unreadable += bool(found.problem)
            return
        self.groups.add(found.group)
        self.current += is_current
        self.old += not is_current
        self.bytes += found.disk_bytes
        self.last_use = max(self.last_use or 0.0, found.used)


def _show(listing: Listing) -> None:
    rows = [[show(one) for show in _COLUMNS.values()] for one in listing.namespaces]
    table(listing.root, list(_COLUMNS), rows)
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
