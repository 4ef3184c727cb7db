"""``kvtier du``: how much of the disk the parts of a root take, and what its ledger says."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtier._cli.report import Bytes, JsonFlag, finish, print_line, progress, table
from kvtier._cli.roots import RootArgument, require_root
from kvtier.tiers.fs._files.call import Failures, StopFlag
from kvtier.tiers.fs._files.chunk_files import tree_bytes
from kvtier.tiers.fs._quota import ledger
from kvtier.tiers.fs._root import Namespace, Root, Tick


@dataclass(frozen=True, slots=True)
class Part:
    """A part of what a root takes.

    Attributes:
        namespace: whose; "" for what is not kvtier's.
        part: ``chunks``, ``old epochs``, ``quarantine``, ``unfinished``, ``rest``,
            and ``ledger``, ``others``.
        bytes: what its files and directories take on disk.
    """

    namespace: str
    part: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Usage:
    """How much of a disk a root takes.

    Attributes:
        root: the directory.
        bytes: what it takes in all.
        ledger_bytes: what the engines that share it believe that it takes; None where they have not counted.
        leased_bytes: what they are writing now; None where nobody keeps a ledger.
        writers: engines that have it open; None as well.
        total_bytes: of its file system.
        free_bytes: of its file system, for unprivileged users.
        unreadable: directories that could not be looked into, so that the sums are too small.
        parts: the parts.
    """

    root: str
    bytes: int
    ledger_bytes: int | None
    leased_bytes: int | None
    writers: int | None
    total_bytes: int
    free_bytes: int
    unreadable: int
    parts: list[Part]


def command(root: RootArgument, as_json: JsonFlag = False) -> None:
    """Add up what the parts of a root take on disk, and show what the engines' ledger says.

    Exit status 1 if a directory cannot be read, so that sums are too small.

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
    with Root(path) as root, progress("directories") as tick:
        walk = _Walk(root, tick)
        sums: Counter[tuple[str, str]] = Counter()
        for one in root.namespaces():
            for part, taken in _parts(walk, one):
                sums[one.name, part] += taken
        sums["", "ledger"] = walk.bytes(ledger.FOLDER)
        sums["", "others"] = sum(walk.bytes(name) for name in root.others())
        disk, accounts = os.fstatvfs(root.fd), ledger.read(root.fd)
        return Usage(
            root=str(path),
            bytes=sum(sums.values()),
            ledger_bytes=accounts.used if accounts is not None and accounts.is_exact else None,
            leased_bytes=accounts.leased if accounts is not None else None,
            writers=len(accounts.leases) if accounts is not None else None,
            total_bytes=disk.f_blocks * disk.f_frsize,
            free_bytes=disk.f_bavail * disk.f_frsize,
            unreadable=sum(walk.failures.values()),
            parts=[Part(*whose, taken) for whose, taken in sums.items() if taken],
        )


def _show(usage: Usage) -> None:
    rows = [(part.namespace, part.part, Bytes(part.bytes)) for part in usage.parts]
    table(usage.root, ("namespace", "part", "bytes"), [*rows, ("", "in all", Bytes(usage.bytes))])
    print_line(f"file system: {Bytes(usage.free_bytes)} of {Bytes(usage.total_bytes)} free")
    if usage.writers is not None:
        counted = "not counted yet" if usage.ledger_bytes is None else str(Bytes(usage.ledger_bytes))
        print_line(
            f"ledger: {counted}; {usage.writers} engines, writing {Bytes(usage.leased_bytes or 0)} now"
        )
    if usage.unreadable:
        print_line(
            f"the sums are too small: {usage.unreadable:,} directories cannot be read; ask their owner"
        )


def _parts(walk: _Walk, one: Namespace) -> Iterator[tuple[str, int]]:
    for place in one.data_dirs:
        yield "chunks" if place == one.current else "old epochs", walk.bytes(place.name)
    rest = walk.bytes(one.name)
    for part, folder in (("quarantine", "quarantine"), ("unfinished", ".tmp")):
        taken = walk.bytes(f"{one.name}/{folder}", is_counted=True)
        rest -= taken
        yield part, taken
    yield "rest", max(0, rest)


class _Walk:
    """Adds up what is below directories. Links are not followed, other file systems not entered."""

    def __init__(self, root: Root, tick: Tick) -> None:
        self._tick = tick
        self.failures: Failures = Counter()
        self._root = root

    def bytes(self, path: str, *, is_counted: bool = False) -> int:
        """Return what a file or directory takes; its failures are noted unless they were before."""
        self._tick(1)
        failures: Failures = Counter()
        taken = 0
        try:
            found = os.stat(path, dir_fd=self._root.fd, follow_symlinks=False)
            taken = found.st_blocks * 512
            if stat.S_ISDIR(found.st_mode):
                taken += tree_bytes(self._root.fd, path, StopFlag(), failures)
        except FileNotFoundError:
            pass
        except OSError as error:
            failures[error.errno or 0] += 1
        if not is_counted:
            self.failures += failures
        return taken
