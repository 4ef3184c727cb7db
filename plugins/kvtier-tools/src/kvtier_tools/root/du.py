"""``kvtier du``: the disk use of the parts of a root, and its ledger."""

from __future__ import annotations

import os
import stat
from collections import Counter
from dataclasses import dataclass
from typing import Final

from kvtier._cli import JsonFlag
from kvtier_tools.fs import Failures, StopFlag, count_failure, ledger, tree_bytes
from kvtier_tools.report import Bytes, Tick, finish, number_of, print_line, progress, table
from kvtier_tools.root.contents import Cache, RootView, read_ledger
from kvtier_tools.root.roots import RootArgument, require_root

_SLACK: Final = 2**18


@dataclass(frozen=True, slots=True)
class UsagePart:
    """The disk use of one part of a root."""

    namespace: str  # "" for the ledger and others
    part: str  # chunks, old epochs, quarantine, unfinished, rest; ledger, others
    bytes: int


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """How much of a disk a root takes."""

    root: str
    bytes: int
    ledger_bytes: int | None  # in the engines' ledger; None before their first count
    ledger_is_wrong: bool  # whether it differs from ``bytes`` by more than engines write meanwhile
    leased_bytes: int | None  # leased by writing engines; None without a ledger
    writers: int | None  # engines that have it open; None without a ledger
    total_bytes: int  # size of its file system
    free_bytes: int  # free in its file system, for unprivileged users
    unreadable: int  # directories missing from the sums
    parts: list[UsagePart]


def command(root: RootArgument, as_json: JsonFlag = False) -> None:
    """Add up the disk use of a root's parts, and show the engines' ledger.

    Exit status 1 if a directory cannot be read, so that sums are too small.

    Example: kvtier du /var/cache/kvtier
    """
    require_root(root)
    with RootView(root) as opened, progress("directories") as tick:
        taken = _usage(opened, tick)
    finish(taken, _show, as_json=as_json, is_healthy=not taken.unreadable)


def _usage(root: RootView, tick: Tick) -> DiskUsage:
    measure = Measure(root, tick)
    parts = [part for one in root.namespaces() for part in _parts(measure, one)]
    parts.append(UsagePart("", "ledger", measure.bytes(ledger.FOLDER)))
    parts.append(UsagePart("", "others", sum(map(measure.bytes, root.others()))))
    disk, accounts = os.fstatvfs(root.fd), read_ledger(root.fd)
    counted = sum(part.bytes for part in parts)
    known = accounts if accounts is not None and accounts.is_exact else None
    return DiskUsage(
        root=str(root.path),
        bytes=counted,
        ledger_bytes=None if known is None else known.used,
        ledger_is_wrong=known is not None
        and abs(known.used - counted) > _SLACK + known.leased + counted // 8,
        leased_bytes=accounts.leased if accounts is not None else None,
        writers=len(accounts.leases) if accounts is not None else None,
        total_bytes=disk.f_blocks * disk.f_frsize,
        free_bytes=disk.f_bavail * disk.f_frsize,
        unreadable=sum(measure.failures.values()),
        parts=[part for part in parts if part.bytes],
    )


def _show(usage: DiskUsage) -> None:
    rows = [(part.namespace, part.part, Bytes(part.bytes)) for part in usage.parts]
    table(usage.root, ("namespace", "part", "bytes"), [*rows, ("", "in all", Bytes(usage.bytes))])
    print_line(f"file system: {Bytes(usage.free_bytes)} of {Bytes(usage.total_bytes)} free")
    if usage.writers is not None:
        counted = "not counted yet" if usage.ledger_bytes is None else str(Bytes(usage.ledger_bytes))
        leased = f"{Bytes(usage.leased_bytes or 0)} leased by {number_of(usage.writers, 'engine')}"
        print_line(f"ledger: {counted}; {leased}")
    if usage.ledger_is_wrong:
        print_line("the ledger is wrong: files were added or removed by hand; engines count the root again")
    if usage.unreadable:
        print_line(
            f"the sums are too small: {usage.unreadable:,} directories cannot be read; ask their owner"
        )


def _parts(measure: Measure, one: Cache) -> list[UsagePart]:
    current, home = one.current, measure.bytes(one.name)
    # The namespace's own directory was measured above, with its failures.
    again = Measure(measure.root, measure.tick)
    quarantine, unfinished = (again.bytes(f"{one.name}/{folder}") for folder in ("quarantine", ".tmp"))
    sums = {
        "chunks": sum(measure.bytes(found.name) for found in one.data_dirs if found == current),
        "old epochs": sum(measure.bytes(found.name) for found in one.data_dirs if found != current),
        "quarantine": quarantine,
        "unfinished": unfinished,
        "rest": max(0, home - quarantine - unfinished),
    }
    return [UsagePart(one.name, part, taken) for part, taken in sums.items()]


class Measure:
    """Adds up disk use. It neither follows links nor enters other file systems."""

    def __init__(self, root: RootView, tick: Tick) -> None:
        self.root = root
        self.tick = tick
        self.failures: Failures = Counter()

    def bytes(self, path: str) -> int:
        """Return the disk use of a file or directory, and count unreadable directories."""
        self.tick(1)
        try:
            found = os.stat(path, dir_fd=self.root.fd, follow_symlinks=False)
            below = 0
            if stat.S_ISDIR(found.st_mode):
                below = tree_bytes(self.root.fd, path, StopFlag(), self.failures)
            return found.st_blocks * 512 + below
        except OSError as error:
            count_failure(self.failures, error)
            return 0
