"""``kvtier verify``: reads and checks every chunk of a root, even while engines use it."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Final

import typer

from kvtier._cli import JsonFlag
from kvtier._log import GuardedLogger
from kvtier.tiers._seal import Integrity
from kvtier_tools.fs import DataDir, FileCheck, FileChecker, Quarantine, Result, errno_name
from kvtier_tools.report import Tick, finish, print_line, progress, table
from kvtier_tools.root.contents import Cache, ChunkFile, RootView, UnknownEntry
from kvtier_tools.root.roots import NamespaceOption, RootArgument, require_root

_FILES_A_JOB: Final = 64
_JOBS_AHEAD: Final = 2
MOST_LISTED: Final = 1000  # damaged files listed by name; all are counted


@dataclass(frozen=True, slots=True)
class DamagedFile:
    """A file that is damaged or unreadable."""

    path: str  # relative to the root
    finding: str  # a value of Integrity
    errno: str  # name of the errno if it is unreadable, else ""
    set_aside: bool  # whether it is in the quarantine now


@dataclass(frozen=True, slots=True)
class CacheVerification:
    """The result for a cache of a root: numbers of files by finding, a value of ``Integrity``."""

    namespace: str
    chunks: int  # checked
    sound: int
    torn: int
    foreign: int
    checksum: int
    unreadable: int  # directories included
    gone: int
    strays: int  # other files among the chunks; they stay
    quarantined: int  # in the quarantine, including files just moved
    set_aside: int  # moved to the quarantine just now
    problem: str  # one of the whole cache; "" if there is none
    ill: list[DamagedFile]  # the first MOST_LISTED

    @property
    def is_healthy(self) -> bool:
        """Whether no problem is left."""
        left = self.torn + self.foreign + self.checksum - self.set_aside
        return not (left or self.unreadable or self.problem)


@dataclass(frozen=True, slots=True)
class RootVerification:
    """The result for a root."""

    root: str
    seconds: float
    namespaces: list[CacheVerification]

    @property
    def is_healthy(self) -> bool:
        return all(one.is_healthy for one in self.namespaces)


def command(
    root: RootArgument,
    repair: Annotated[
        bool, typer.Option("--repair", help="Move damaged files of chunks to the quarantine.")
    ] = False,
    namespace: NamespaceOption = None,
    threads: Annotated[int, typer.Option(min=1, max=64, help="Number of files to read concurrently.")] = min(
        4, os.cpu_count() or 1
    ),
    as_json: JsonFlag = False,
) -> None:
    """Verify every chunk: trailer, identity and checksum.

    Exit status 1 if a problem was found and not repaired.

    Example: kvtier verify /var/cache/kvtier --repair
    """
    require_root(root)
    GuardedLogger("kvtier.tiers.fs").logger.addHandler(logging.NullHandler())  # the result has it all
    found = verify(root, repair=repair, threads=threads, namespace=namespace)
    finish(found, _show, as_json=as_json, is_healthy=found.is_healthy)


def verify(path: Path, *, repair: bool, threads: int, namespace: str | None = None) -> RootVerification:
    """Check every chunk. TierError if the root cannot be read or has no such namespace."""
    began = time.monotonic()
    with RootView(path) as root, progress("chunks") as tick:
        wanted = root.namespaces() if namespace is None else [root.namespace(namespace)]
        verified = [_Check(root, one, repair, threads).run(tick) for one in wanted]
        return RootVerification(str(path), round(time.monotonic() - began, 3), verified)


def _show(verification: RootVerification) -> None:
    columns = ["chunks", "sound"]
    for column in ("torn", "foreign", "checksum", "unreadable", "gone", "strays", "set_aside"):
        if any(getattr(one, column) for one in verification.namespaces):
            columns.append(column)
    rows = [(one.namespace, *(getattr(one, column) for column in columns)) for one in verification.namespaces]
    table(verification.root, ("namespace", *(column.replace("_", " ") for column in columns)), rows)
    for one in verification.namespaces:
        for line in _remarks(one):
            print_line(f"{one.namespace}: {line}")


def _remarks(one: CacheVerification) -> Iterator[str]:
    if one.problem:
        yield one.problem
    for ill in one.ill:
        why = ill.errno or ill.finding
        yield f"{ill.path} {why}{', set aside' if ill.set_aside else ''}"
    if (more := one.torn + one.foreign + one.checksum + one.unreadable - len(one.ill)) > 0:
        yield f"and {more} more"


class _Check:
    """The check of one namespace."""

    def __init__(self, root: RootView, one: Cache, repair: bool, threads: int) -> None:
        self._root = root
        self._one = one
        self._threads = threads
        self._found: Counter[str] = Counter()
        self._damaged: list[DamagedFile] = []
        can_repair = repair and one.is_kvtiers  # other programs' files are only read
        self._quarantine = Quarantine(root.fd, one.name) if can_repair else None

    def run(self, tick: Tick) -> CacheVerification:
        for data_dir in self._one.data_dirs:
            for file, check in self._checked(self._files(data_dir)):
                tick(1)
                self._count(data_dir, file, check)
        found = self._found
        return CacheVerification(
            namespace=self._one.name,
            chunks=sum(found[finding] for finding in Integrity),
            sound=found[Integrity.SOUND],
            torn=found[Integrity.TORN],
            foreign=found[Integrity.FOREIGN],
            checksum=found[Integrity.CHECKSUM],
            gone=found[Integrity.GONE],
            unreadable=found[Integrity.UNREADABLE] + found["unreadable directory"],
            strays=found["stray"],
            quarantined=len(self._one.quarantine()),
            set_aside=found["set aside"],
            problem=self._one.problem,
            ill=self._damaged,
        )

    def _files(self, data_dir: DataDir) -> Iterator[ChunkFile]:
        for found in self._root.chunks(data_dir.name):
            if not isinstance(found, UnknownEntry):
                yield found
            elif found.problem:
                self._found["unreadable directory"] += 1
                self._list(found.path, Integrity.UNREADABLE, found.problem)
            else:
                self._found["stray"] += 1

    def _checked(self, files: Iterator[ChunkFile]) -> Iterator[tuple[ChunkFile, FileCheck]]:
        """Check chunks in several threads, a bounded number ahead of the consumer."""
        with ThreadPoolExecutor(self._threads, "verify") as pool:
            ahead: deque[Future[list[tuple[ChunkFile, FileCheck]]]] = deque()
            while batch := list(islice(files, _FILES_A_JOB)):
                ahead.append(pool.submit(self._check, batch))
                if len(ahead) >= self._threads * _JOBS_AHEAD:
                    yield from ahead.popleft().result()
            for job in ahead:
                yield from job.result()

    def _check(self, files: list[ChunkFile]) -> list[tuple[ChunkFile, FileCheck]]:
        digest = self._one.manifest.digest
        digits = digest[:16].hex() if digest is not None else self._one.name.rpartition("_")[2]
        checker = FileChecker(self._root.fd, digits)
        return [(file, checker.check(file.path, file.key)) for file in files]

    def _count(self, data_dir: DataDir, file: ChunkFile, check: FileCheck) -> None:
        """Count a chunk, and quarantine a damaged one as an engine does; a newer file in its place stays."""
        finding, set_aside = check.finding, False
        self._found[finding] += 1
        if self._quarantine is not None and finding.is_corrupt:
            reason = Result[finding.name]
            set_aside = self._quarantine.add(data_dir.name, file.key, reason, check.inode)
            self._found["set aside"] += set_aside
        if finding.is_corrupt or finding is Integrity.UNREADABLE:
            self._list(file.path, finding, check.errno, set_aside)

    def _list(self, path: str, finding: Integrity, number: int, set_aside: bool = False) -> None:
        if len(self._damaged) < MOST_LISTED:
            name = errno_name(number) if number else ""
            self._damaged.append(DamagedFile(path, finding, name, set_aside))
