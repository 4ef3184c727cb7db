"""``kvtier gc``: removes useless data and, on request, chunks beyond a size or age."""

from __future__ import annotations

import errno
import os
import time
from collections import Counter
from collections.abc import Callable, Container
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Annotated, Final, TypeVar

import typer

from kvtier._cli import JsonFlag
from kvtier._settings.quantities import size
from kvtier.errors import TierError
from kvtier.tiers._base import ignore
from kvtier_tools.durations import duration
from kvtier_tools.fs import DataDir, Evicted, Evictor, Failures, StopFlag, errno_name, layout, ledger
from kvtier_tools.report import Bytes, Tick, finish, print_line, progress
from kvtier_tools.root.contents import Cache, ChunkFile, RootView, read_ledger
from kvtier_tools.root.du import Measure
from kvtier_tools.root.memory import MemoryFlag, RootOrMemory, remove_memory, require_root_argument
from kvtier_tools.root.roots import NamespaceOption, require_root

T = TypeVar("T")
_WAIT_AT_MOST_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class CollectionResult:
    """The result of a run, or with ``dry_run`` an estimate of it."""

    root: str
    dry_run: bool
    bytes_before: int  # disk use of the root, or of the one namespace
    bytes_after: int
    max_bytes: int | None
    leftover_bytes: int  # dead writers, old epochs, orphaned chunks and the quarantine
    expired_files: int
    expired_bytes: int
    evicted_files: int
    evicted_bytes: int
    failed: dict[str, int]  # files not removed or read, by errno name

    @property
    def fits(self) -> bool:
        return self.max_bytes is None or self.bytes_after <= self.max_bytes

    @property
    def is_healthy(self) -> bool:
        """Whether everything was done, or with ``dry_run`` examined."""
        return not self.failed and (self.dry_run or self.fits)


def command(
    root: RootOrMemory = None,
    max_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Evict chunks until the root is no larger, such as 200GiB. Default: evict none.",
        ),
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Remove chunks not used for this long, such as 12h or 30d."),
    ] = None,
    namespace: NamespaceOption = None,
    memory: MemoryFlag = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Estimate what would be removed, and remove nothing.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Remove data that no engine can use and, on request, chunks beyond a size or age.

    Exit status 1 if more than --max-bytes is left, or a file could not be removed or read.

    Example: kvtier gc /var/cache/kvtier --max-bytes 200GiB --dry-run
    """
    if memory:
        remove_memory(root, dry_run=dry_run, as_json=as_json)
    path = require_root_argument(root)
    require_root(path)
    done = _collect(
        path,
        max_bytes=_parsed(size, max_bytes, "--max-bytes"),
        older_than_s=_parsed(duration, older_than, "--older-than"),
        namespace=namespace,
        dry_run=dry_run,
    )
    finish(done, _show, as_json=as_json, is_healthy=done.is_healthy)


def _parsed(parse: Callable[[str], T], text: str | None, option: str) -> T | None:
    try:
        return None if text is None else parse(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: {error}", param_hint=option) from None


def _collect(
    path: Path, *, max_bytes: int | None, older_than_s: float | None, namespace: str | None, dry_run: bool
) -> CollectionResult:
    """Remove useless data, chunks not used for ``older_than_s``, then chunks beyond ``max_bytes``."""
    with RootView(path) as root:
        only = None if namespace is None else frozenset((root.namespace(namespace).name,))
        with RootView(root.fd, only) as narrow, progress("files" if dry_run else "files removed") as tick:
            found = _Collection(narrow, only, tick)
            run = found.estimate if dry_run else found.run
            swept, expired, evicted = run(max_bytes, older_than_s)
            removed = swept.bytes + expired.bytes + evicted.bytes
            failures = found.failures | swept.failures | expired.failures | evicted.failures
            return CollectionResult(
                root=str(path),
                dry_run=dry_run,
                bytes_before=found.before,
                bytes_after=found.before - removed if dry_run else found.taken(),
                max_bytes=max_bytes,
                leftover_bytes=swept.bytes + evicted.leftover_bytes,
                expired_files=expired.chunks,
                expired_bytes=expired.chunk_bytes,
                evicted_files=evicted.chunks,
                evicted_bytes=evicted.chunk_bytes,
                failed={errno_name(number): count for number, count in sorted(failures.items())},
            )


def _show(result: CollectionResult) -> None:
    verb = "would be removed" if result.dry_run else "removed"
    one = result
    print_line(f"{Bytes(one.leftover_bytes)} of leftovers {verb}")
    for word, files, taken in (
        ("not used for so long", one.expired_files, one.expired_bytes),
        ("to make room", one.evicted_files, one.evicted_bytes),
    ):
        if files:
            print_line(f"{files:,} files of chunks, {Bytes(taken)}, {verb}: {word}")
    print_line(f"{one.root}: {Bytes(one.bytes_before)} before, {Bytes(one.bytes_after)} after")
    for word, count in one.failed.items():
        number = getattr(errno, word.upper(), 0)
        remedy = ": run this as their owner" if number in (errno.EACCES, errno.EPERM) else ""
        reason = f"{os.strerror(number)}{remedy}"
        print_line(f"{count:,} files or directories could not be removed or read: {reason}")
    if not one.fits:
        others = "" if one.failed else ": the rest are not kvtier's chunks"
        print_line(f"that is more than {Bytes(one.max_bytes or 0)}{others}")


def _correct_ledger(root: RootView, removed_bytes: int, since: str) -> None:
    """Subtract removed bytes from the engines' ledger, if there is one."""
    if not removed_bytes:
        return
    with suppress(OSError):  # engines notice at their next count
        if read_ledger(root.fd) is None:
            return
        shared = ledger.SharedLedger(root.fd)
        try:
            with shared.change() as accounts:
                accounts.remove(removed_bytes, since)
        finally:
            shared.close()


class _Collection:
    """One run on a root."""

    def __init__(self, root: RootView, only: Container[str] | None, tick: Tick) -> None:
        self._root = root
        self._tick = tick
        self._stop = StopFlag()
        self._evictor = Evictor(root.fd, self._stop, lambda _, paths: tick(len(paths)), only=only)
        self._is_narrow = only is not None
        self.failures: Failures = Counter()
        self.before = self.taken()

    def run(self, max_bytes: int | None, older_than_s: float | None) -> tuple[Evicted, Evicted, Evicted]:
        """Remove leftovers, then expired chunks, then chunks beyond the size."""
        accounts = read_ledger(self._root.fd)
        swept = self._evictor.sweep(orphans=True)
        expired = evicted = _NOTHING
        if older_than_s is not None:
            expired = self._exclusively(partial(self._evictor.expire, older_than_s))
        removed = swept.bytes + expired.bytes
        if max_bytes is not None and self.before - removed > max_bytes:
            evicted = self._exclusively(partial(self._evictor.make_room, self.before - removed - max_bytes))
        _correct_ledger(self._root, removed + evicted.bytes, since="" if accounts is None else accounts.mark)
        return swept, expired, evicted

    def estimate(self, max_bytes: int | None, older_than_s: float | None) -> tuple[Evicted, Evicted, Evicted]:
        """Estimate the result of a run, from times of last use alone."""
        left: list[str] = []
        files: list[tuple[float, int]] = []  # time of last use, bytes
        is_limited = max_bytes is not None or older_than_s is not None
        for one in self._root.namespaces():
            left += (f"{one.name}/.tmp/{name}" for name, alive in one.writers().items() if alive is False)
            for found in one.data_dirs:
                if self._is_left(one, found):
                    left.append(found.name)
                elif is_limited:
                    below = self._root.chunks(found.name, self._tick)
                    files += ((it.used, it.disk_bytes) for it in below if isinstance(it, ChunkFile))
        swept = sum(map(Measure(self._root, ignore).bytes, left))
        too_old = -inf if older_than_s is None else time.time() - older_than_s
        excess = -inf if max_bytes is None else self.before - swept - max_bytes
        expired: list[int] = []
        evicted: list[int] = []
        for used, nbytes in sorted(files):
            if used > too_old and excess <= 0:
                break
            (expired if used <= too_old else evicted).append(nbytes)
            excess -= nbytes
        by_age, by_size = (Evicted(0, len(sizes), sum(sizes)) for sizes in (expired, evicted))
        return Evicted(swept), by_age, by_size

    def _is_left(self, one: Cache, found: DataDir) -> bool:
        """Return whether chunks are orphans or in an unused old epoch."""
        if one.is_orphaned or one.epoch is None or found.epoch >= one.epoch:
            return one.is_orphaned
        return self._root.is_locked(layout.users_lock(one.name, found.epoch)) is False

    def taken(self) -> int:
        """Return the disk use of the root, or of the chosen namespace."""
        names = ["."]
        if self._is_narrow:
            caches = self._root.namespaces()
            names = [name for one in caches for name in (one.name, *(it.name for it in one.data_dirs))]
        measure = Measure(self._root, ignore)
        taken = sum(map(measure.bytes, names))
        self.failures |= measure.failures
        return taken

    def _exclusively(self, work: partial[Evicted | None]) -> Evicted:
        """Do work that one process per root may do at a time; wait a moment for another process."""
        if not any(one.is_kvtiers for one in self._root.namespaces()):
            return _NOTHING
        with suppress(OSError):  # ``work`` raises it again
            layout.make_folder(self._root.fd, ledger.FOLDER)
        give_up_at = time.monotonic() + _WAIT_AT_MOST_S
        while True:
            try:
                done = work()
            except OSError as error:
                raise TierError(f"no room can be made: {error.strerror or error}") from error
            if done is not None:
                return done
            if time.monotonic() > give_up_at:
                raise TierError("an engine is evicting from this root; try again later")
            time.sleep(0.1)


_NOTHING: Final = Evicted()
