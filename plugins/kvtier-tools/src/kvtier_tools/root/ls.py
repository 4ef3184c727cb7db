"""``kvtier ls``: the caches of a root."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvtier._cli import JsonFlag
from kvtier_tools.report import Bytes, Tick, ago, finish, print_line, progress, table, yes_no
from kvtier_tools.root.contents import Cache, RootView, UnknownEntry
from kvtier_tools.root.memory import MemoryFlag, RootOrMemory, list_memory, require_root_argument


@dataclass(frozen=True, slots=True)
class CacheListing:
    """A cache of a root."""

    namespace: str
    model: str | None  # None if the manifest cannot be read
    digest: str | None  # the identity's, in hexadecimal; None if the manifest belongs to another cache
    groups: list[int]  # KV cache groups with chunks
    epoch: int | None  # the one an engine would join now; None if unknown
    chunks: int  # chunks of that epoch
    old_chunks: int  # chunks of other epochs, removed when unused
    bytes: int  # on disk, old chunks included
    in_use: bool | None  # whether a living process has it open; None if unknown
    last_use: float | None  # Unix time of the last use of a chunk; None without chunks
    problem: str  # "" if there is none


@dataclass(frozen=True, slots=True)
class RootListing:
    """The contents of a root."""

    root: str
    namespaces: list[CacheListing]
    others: list[str]  # names directly below the root that are not kvtier's


def command(root: RootOrMemory = None, memory: MemoryFlag = False, as_json: JsonFlag = False) -> None:
    """List the caches of a root: model, epoch, chunks, bytes, and whether an engine uses it.

    Exit status 1 if a cache has a manifest that does not belong to it, its epoch is not readable, or
    directories cannot be read.

    Example: kvtier ls /var/cache/kvtier
    """
    if memory:
        list_memory(root, as_json=as_json)
    with RootView(require_root_argument(root)) as opened, progress("files") as tick:
        listed = [_listed(opened, one, tick) for one in opened.namespaces()]
        found = RootListing(str(root), listed, opened.others())
    finish(found, _show, as_json=as_json, is_healthy=not any(one.problem for one in listed))


def _listed(root: RootView, one: Cache, tick: Tick) -> CacheListing:
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
