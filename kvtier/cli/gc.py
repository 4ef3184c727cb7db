"""``kvtier gc``: what nobody can use any more, and what is too much or too old, removed from a root."""

from __future__ import annotations

import os
import time
from collections.abc import Container, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from kvtier.cli.report import Bytes, progress, say
from kvtier.errors import TierError
from kvtier.tiers.fs.files import make_files
from kvtier.tiers.fs.files.call import StopFlag
from kvtier.tiers.fs.layout import DIRECTORY_MODE
from kvtier.tiers.fs.maintenance import ages
from kvtier.tiers.fs.maintenance.ages import Cutoffs, Histogram
from kvtier.tiers.fs.maintenance.evict import Evicted, Evictor
from kvtier.tiers.fs.maintenance.sweep import Sweeper
from kvtier.tiers.fs.quota import ledger
from kvtier.tiers.fs.quota.accounts import UNKNOWN, Mark
from kvtier.tiers.fs.quota.quota import look_at
from kvtier.tiers.fs.root import ChunkFile, Namespace, Root, Stray, Tick

_PATIENCE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Collected:
    """What was removed from a root, or with ``dry_run`` what would be, about.

    Attributes:
        root: the directory.
        dry_run: whether nothing was removed.
        bytes_before: what the root took on disk, or with ``--namespace`` that namespace.
        bytes_after: what it takes now, or would take.
        max_bytes: what it was to take at most; None where that was not asked for.
        leftover_bytes: of dead writers, old epochs, chunks without an owner, and the quarantine.
        expired_files: chunks that were not used for as long as was asked.
        expired_bytes: their bytes.
        evicted_files: files that had to make room, those not used for longest first.
        evicted_bytes: their bytes.
    """

    root: str
    dry_run: bool
    bytes_before: int
    bytes_after: int
    max_bytes: int | None
    leftover_bytes: int
    expired_files: int
    expired_bytes: int
    evicted_files: int
    evicted_bytes: int

    @property
    def is_well(self) -> bool:
        """Whether the root takes no more than was asked for."""
        return self.max_bytes is None or self.bytes_after <= self.max_bytes


@dataclass(frozen=True, slots=True)
class Wish:
    """What shall be removed besides what nobody can use.

    Attributes:
        max_bytes: chunks until no more than this is left; None for none.
        older_than_s: chunks that were not used for so long; None for none.
    """

    max_bytes: int | None = None
    older_than_s: float | None = None


def collect(path: Path, wish: Wish, *, namespace: str | None = None, dry_run: bool = False) -> Collected:
    """Remove what nobody can use, and what is asked for.

    Args:
        path: the root.
        wish: what else.
        namespace: look at this one alone.
        dry_run: remove nothing, and say what would be removed.

    Raises:
        TierError: the root cannot be read, has no such namespace, or somebody else is making room in it.
    """
    with Root(path) as root:
        only = None if namespace is None else frozenset((root.namespace(namespace).name,))
        what, kind = ("files", _Rehearsal) if dry_run else ("files removed", _Collector)
        with Root.at(root.fd, only) as narrow, progress(what) as tick:
            return kind(narrow, only, tick).run(str(path), wish)


def show(collected: Collected) -> None:
    """Say what was removed."""
    verb = "would be removed" if collected.dry_run else "removed"
    one = collected
    say(f"{Bytes(one.leftover_bytes)} of leftovers {verb}")
    for word, files, size in (
        ("not used for so long", one.expired_files, one.expired_bytes),
        ("to make room", one.evicted_files, one.evicted_bytes),
    ):
        if files:
            say(f"{files:,} files of chunks, {Bytes(size)}, {verb}: {word}")
    say(f"{one.root}: {Bytes(one.bytes_before)} before, {Bytes(one.bytes_after)} after")
    if not one.is_well:
        say(f"that is more than {Bytes(one.max_bytes or 0)}: what is left are no chunks of kvtier's")


def remove_leftovers(root: Root, namespace: Namespace) -> int:
    """Remove what dead writers and old epochs left in one namespace. Returns the bytes removed, about."""
    with Root.at(root.fd, (namespace.name,)) as narrow:
        return Sweeper(narrow, make_files(), StopFlag()).sweep()


def mark_ledger(root: Root) -> Mark:
    """Return what ``correct_ledger`` is told of the bytes that are removed from now on."""
    accounts = ledger.read(root.fd)
    return UNKNOWN if accounts is None else accounts.mark


def correct_ledger(root: Root, removed_bytes: int, since: Mark) -> None:
    """Tell the engines that share the root what was removed since, where they keep a ledger."""
    if not removed_bytes:
        return
    with suppress(OSError):  # they learn it when they count the root again
        if ledger.read(root.fd) is None:
            return
        shared = ledger.SharedLedger(root.fd, partial(look_at, root.fd))
        try:
            with shared.change() as accounts:
                accounts.remove(removed_bytes, since)
        finally:
            shared.close()


class _Collector:
    """Removes."""

    dry_run = False

    def __init__(self, root: Root, only: Container[str] | None, tick: Tick) -> None:
        self._root = root
        self._tick = tick
        self._files = make_files()
        self._stop = StopFlag()
        self._evictor = Evictor(
            root.fd, self._files, self._stop, lambda _, units: tick(len(units)), only=only
        )
        self._is_narrow = only is not None

    def run(self, path: str, wish: Wish) -> Collected:
        since, before = mark_ledger(self._root), self._taken()
        leftover = self._sweep()
        expired = self._expire(wish.older_than_s) if wish.older_than_s is not None else _NOTHING
        evicted = _NOTHING
        if wish.max_bytes is not None:
            need = before - leftover - expired.bytes - wish.max_bytes
            evicted = self._make_room(need) if need > 0 else _NOTHING
        leftover += expired.leftover_bytes + evicted.leftover_bytes
        removed = leftover + expired.chunk_bytes + evicted.chunk_bytes
        if not self.dry_run:
            correct_ledger(self._root, removed, since)
        return Collected(
            root=path,
            dry_run=self.dry_run,
            bytes_before=before,
            bytes_after=before - removed if self.dry_run else self._taken(),
            max_bytes=wish.max_bytes,
            leftover_bytes=leftover,
            expired_files=expired.chunks,
            expired_bytes=expired.chunk_bytes,
            evicted_files=evicted.chunks,
            evicted_bytes=evicted.chunk_bytes,
        )

    def _taken(self) -> int:
        """Return the bytes that all takes, or the chosen namespace."""
        if not self._is_narrow:
            return self._tree_bytes(".")
        return sum(
            self._tree_bytes(name)
            for one in self._root.namespaces()
            for name in (one.name, *(found.name for found in one.data_dirs))
        )

    def _tree_bytes(self, name: str) -> int:
        try:
            return self._files.tree_bytes(self._root.fd, name, self._stop)
        except OSError:
            return 0

    def _sweep(self) -> int:
        sweeper = Sweeper(self._root, self._files, self._stop)
        return sweeper.sweep() + sweeper.sweep_orphans(lambda _: False)

    def _expire(self, older_than_s: float) -> Evicted:
        return self._alone(partial(self._evictor.expire, older_than_s))

    def _make_room(self, need_bytes: int) -> Evicted:
        return self._alone(partial(self._evictor.make_room, need_bytes))

    def _alone(self, work: partial[Evicted]) -> Evicted:
        """Do what one process at a time may do; wait a little for one that does it now."""
        if not any(one.is_kvtiers for one in self._root.namespaces()):
            return _NOTHING
        with suppress(OSError):  # then it is there, or cannot be, which is told below
            os.mkdir(ledger.FOLDER, DIRECTORY_MODE, dir_fd=self._root.fd)
        give_up_at = time.monotonic() + _PATIENCE_S
        while True:
            try:
                done = work()
            except OSError as error:
                raise TierError(f"no room can be made: {error.strerror or error}") from error
            if done.is_mine:
                return done
            if time.monotonic() > give_up_at:
                raise TierError("an engine is making room in this root all the time: try again later")
            time.sleep(0.1)


class _Rehearsal(_Collector):
    """Says what would be removed, and removes nothing."""

    dry_run = True

    def _sweep(self) -> int:
        return sum(self._tree_bytes(path) for one in self._root.namespaces() for path in _useless(one))

    def _expire(self, older_than_s: float) -> Evicted:
        self._expired = ages.expired(older_than_s)
        return self._count(self._expired)

    def _make_room(self, need_bytes: int) -> Evicted:
        quarantined = sum(self._tree_bytes(f"{one.name}/quarantine") for one in self._root.namespaces())
        histogram = Histogram()
        for chunk in self._chunks():
            if not _is_older(chunk, self._expired):
                histogram.add(_age_us(chunk), _is_reused(chunk), chunk.disk_bytes)
        wanted = max(0, need_bytes - quarantined)
        cutoffs = ages.plan(histogram, 1.0, wanted) if wanted else ages.NOTHING
        counted = self._count(cutoffs, self._expired)
        return Evicted(True, min(quarantined, need_bytes), counted.chunks, counted.chunk_bytes)

    _expired: Cutoffs = ages.NOTHING

    def _count(self, cutoffs: Cutoffs, without: Cutoffs = ages.NOTHING) -> Evicted:
        files = taken = 0
        for chunk in self._chunks():
            if _is_older(chunk, cutoffs) and not _is_older(chunk, without):
                files, taken = files + 1, taken + chunk.disk_bytes
        return Evicted(True, 0, files, taken)

    def _chunks(self) -> Iterator[ChunkFile]:
        for one in self._root.namespaces():
            for place in one.data_dirs if one.is_kvtiers else ():
                if not one.is_old(place):
                    for found in self._root.chunks(place.name, self._tick):
                        if not isinstance(found, Stray):
                            yield found


_NOTHING: Final = Evicted(True)


def _useless(one: Namespace) -> Iterator[str]:
    """Yield the directories of a namespace that nobody can use."""
    if one.is_orphaned:
        yield from (found.name for found in one.data_dirs)
        return
    for writer, lives in one.writers().items():
        if lives is False:
            yield f"{one.name}/.tmp/{writer}"
    users = one.users()
    for found in one.data_dirs:
        if one.is_old(found) and not users.get(found.epoch, False):
            yield found.name


def _age_us(chunk: ChunkFile) -> int:
    return int((time.time() - chunk.used) * 1e6)


def _is_reused(chunk: ChunkFile) -> bool:
    return chunk.used > chunk.written


def _is_older(chunk: ChunkFile, cutoffs: Cutoffs) -> bool:
    return _age_us(chunk) >= (cutoffs.reused_us if _is_reused(chunk) else cutoffs.once_us)
