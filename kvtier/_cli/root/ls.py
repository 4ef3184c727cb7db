"""``kvtier ls``: the caches of a root."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from kvtier._cli.report import Bytes, JsonFlag, ago, finish, print_line, progress, table, yes_no
from kvtier._cli.root.roots import RootArgument
from kvtier.tiers.fs._root import Namespace, Root, Tick, UnknownEntry


@dataclass(frozen=True, slots=True)
class CacheListing:
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
class RootListing:
    """What a root holds.

    Attributes:
        others: names directly below the root that are not kvtier's.
    """

    root: str
    namespaces: list[CacheListing]
    others: list[str]


def command(root: RootArgument, as_json: JsonFlag = False) -> None:
    """List the caches of a root: model, epoch, chunks, bytes, and whether an engine uses it.

    Exit status 1 if a cache has a manifest that does not belong to it, its epoch is not readable, or
    directories cannot be read.

    Example: kvtier ls /var/cache/kvtier
    """
    found = list_root(root)
    finish(found, _show, as_json=as_json, is_healthy=not any(one.problem for one in found.namespaces))


def list_root(path: Path) -> RootListing:
    """Return the caches of a root; it looks at the file of every chunk.

    Raises:
        TierError: the root cannot be read.
    """
    with Root(path) as root, progress("files") as tick:
        listed = [_listed(root, one, tick) for one in root.namespaces()]
        return RootListing(str(path), listed, root.others())


def _listed(root: Root, one: Namespace, tick: Tick) -> CacheListing:
    count: Counter[str] = Counter()
    groups: set[int] = set()
    last_use: float | None = None
    current = one.current
    for data_dir in one.data_dirs:
        kind = "chunks" if data_dir == current else "old chunks"
        for found in root.chunks(data_dir.name, tick):
            if isinstance(found, UnknownEntry):
                count["unreadable"] += bool(found.problem)
                continue
            count[kind] += 1
            count["bytes"] += found.disk_bytes
            groups.add(found.group)
            last_use = max(last_use or 0.0, found.used)
    problems = [one.problem] if one.problem else []
    if count["unreadable"]:
        problems.append(f"{count['unreadable']} files and directories cannot be read")
    manifest = one.manifest
    return CacheListing(
        namespace=one.name,
        model=manifest.model,
        digest=manifest.digest.hex() if manifest.digest else None,
        groups=sorted(groups),
        epoch=one.epoch,
        chunks=count["chunks"],
        old_chunks=count["old chunks"],
        bytes=count["bytes"],
        in_use=one.is_used,
        last_use=last_use,
        problem="; ".join(problems),
    )


def _show(listing: RootListing) -> None:
    columns = ("namespace", "model", "groups", "epoch", "chunks", "old", "bytes", "in use", "used")
    rows = [
        (
            *(one.namespace, one.model, one.groups, one.epoch, one.chunks, one.old_chunks),
            *(Bytes(one.bytes), yes_no(one.in_use), ago(one.last_use)),
        )
        for one in listing.namespaces
    ]
    table(listing.root, columns, rows)
    for one in listing.namespaces:
        if one.problem:
            print_line(f"{one.namespace}: {one.problem}")
    if listing.others:
        print_line(f"not kvtier's: {', '.join(listing.others)}")
