"""Makes room below a root. It needs no engine; one process at a time does it for all.

Data that no engine can use leaves first: orphans, old epochs, leftovers of dead writers, the quarantine.
Then chunks leave by their use (see ``ages``), from all namespaces alike. The root is never listed or sorted
as a whole: a random sample of its directories shows how often and when chunks were used, and decides which
leave. Directories are then visited in random order until there is room. Hashes spread chunks evenly over
directories, so any sample is like the whole.

A chunk that is removed while a reader has it open is read to its end. Unfinished files lie in their writer's
own directory and are not touched; nor are files that are not named as chunks, wherever they lie.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from kvtier.tiers.fs import _layout as layout
from kvtier.tiers.fs._files.call import Failures, StopFlag, count_failure
from kvtier.tiers.fs._maintenance import ages
from kvtier.tiers.fs._maintenance.ages import Plan
from kvtier.tiers.fs._maintenance.scan import ALL_BYTES, ChunkScan, Freed, ignore, remove_if_empty
from kvtier.tiers.fs._maintenance.sweep import Sweeper
from kvtier.tiers.fs._quota import ledger
from kvtier.tiers.fs._root import Root

SAMPLE_FILES: Final = 32_768
"""Files in the sample that decides what leaves."""

_ROUNDS: Final = 4
Gone = Callable[[str, Sequence[str]], None]
"""Called with an epoch's directory and the paths below it of chunks that were removed."""

Approve = Callable[[int], bool]
"""Called with the bytes of all chunks, about, before some are removed. Returns whether they may be."""


def _approve(_found_bytes: int) -> bool:
    return True


def _unlearned() -> ages.Worth:
    return ages.worth_of(ages.new_model())


@dataclass(frozen=True, slots=True)
class Evicted:
    """The result of an eviction or sweep."""

    leftover_bytes: int = 0  # that no engine could use any more
    chunks: int = 0  # removed for room or for ``ttl_s``
    chunk_bytes: int = 0  # of these, and of directories that became empty
    failures: Failures = field(default_factory=Counter)  # files that could not be removed or read
    problems: Sequence[str] = ()  # leftovers that could not be removed, in words

    @property
    def bytes(self) -> int:
        """All bytes removed."""
        return self.leftover_bytes + self.chunk_bytes


_Part = tuple[str, str]
"""An epoch's directory, and one below it with chunks: hashes spread over these."""


class Evictor:
    """Makes room below a root. All calls block, and raise OSError if the root cannot be read.

    ``make_room`` and ``expire`` do nothing and return None while another process does either.

    Args:
        ours: writers that live in this process.
        only: names of the namespaces to work on; None for all.
        worth: the value of keeping chunks. Default: a model that has learned nothing.
    """

    def __init__(
        self,
        root_fd: int,
        stop: StopFlag,
        gone: Gone = ignore,
        ours: frozenset[str] = frozenset(),
        only: Container[str] | None = None,
        worth: Callable[[], ages.Worth] = _unlearned,
    ) -> None:
        self._only = only
        self._worth = worth
        self._root_fd = root_fd
        self._stop = stop
        self._gone = gone
        self._ours = ours

    def sweep(self, freed: Freed = ignore, *, orphans: bool) -> Evicted:
        """Remove data that no engine can use, and quarantined files beyond the bound; report to ``freed``."""
        with Root(self._root_fd, self._only) as root:
            sweeper = Sweeper(root, self._stop, self._ours, freed)
            sweeper.sweep()
            if orphans:
                sweeper.sweep_orphans()
        return Evicted(sweeper.bytes, failures=sweeper.failures, problems=sweeper.problems)

    def make_room(
        self, need_bytes: int, freed: Freed = ignore, approve: Approve = _approve
    ) -> Evicted | None:
        """Remove ``need_bytes``, or everything if there is less, and report to ``freed``."""
        with self._elected() as now_ns, Root(self._root_fd, self._only) as root:
            if now_ns is None:
                return None
            sweeper = Sweeper(root, self._stop, self._ours, freed, need_bytes)
            sweeper.remove_leftovers()
            scan = self._remove_least(root, now_ns, need_bytes - sweeper.bytes, freed, approve)
        return Evicted(sweeper.bytes, scan.removed, scan.removed_bytes, sweeper.failures + scan.failures)

    def expire(self, ttl_s: float, freed: Freed = ignore) -> Evicted | None:
        """Remove what was not used for ``ttl_s``, and report to ``freed``."""
        with self._elected() as now_ns, Root(self._root_fd, self._only) as root:
            if now_ns is None:
                return None
            scan = ChunkScan(now_ns, leaving=ages.expired(ttl_s), want_bytes=ALL_BYTES)
            self._scan_parts(self._parts(root), scan, freed)
        return Evicted(0, scan.removed, scan.removed_bytes, scan.failures)

    @contextmanager
    def _elected(self) -> Iterator[int | None]:
        """Become the one process that removes. Yields the time in ns, None where another process does.

        It is the time of the root's file system, which a server may have.
        """
        with ledger.elected(self._root_fd, ledger.EVICTING) as lock:
            if lock is not None:
                os.utime(lock)
            yield None if lock is None else os.fstat(lock).st_mtime_ns

    def _parts(self, root: Root) -> list[_Part]:
        """List the directories with chunks, of all namespaces that kvtier has made."""
        return [
            (found.name, name)
            for namespace in root.namespaces()
            if namespace.is_kvtiers
            for found in namespace.data_dirs
            for name in root.names(found.name)
            if layout.PART.fullmatch(name)
        ]

    def _remove_least(
        self, root: Root, now_ns: int, need_bytes: int, freed: Freed, approve: Approve
    ) -> ChunkScan:
        scan = ChunkScan(now_ns, want_bytes=max(0, need_bytes))
        parts = self._parts(root)
        for _ in range(_ROUNDS):  # the sample can say a little too little of the whole
            if scan.is_done or self._stop:
                break
            random.shuffle(parts)
            # Plan again for files that could not be removed: others leave in their place.
            need = scan.want_bytes - scan.removed_bytes + scan.failed_bytes
            leaving, found_bytes = self._plan(parts, now_ns, need)
            if not approve(found_bytes + scan.removed_bytes) or not any(leaving):
                break
            scan.follow(leaving)
            # The round with most failures counts, because such a file fails again in each round.
            before, scan.failures, scan.failed_bytes = scan.failures, Counter(), 0
            self._scan_parts(parts, scan, freed)
            scan.failures |= before
        return scan

    def _plan(self, parts: Sequence[_Part], now_ns: int, need_bytes: int) -> tuple[Plan, int]:
        """Return what leaves, and the bytes of all chunks, about."""
        histogram = ages.new_histogram()
        sample, scanned = ChunkScan(now_ns, histogram), 0
        for part in parts:
            if sample.seen >= SAMPLE_FILES or self._stop:
                break
            self._scan_parts((part,), sample)
            scanned += 1
        share = scanned / max(1, len(parts))
        return ages.plan(histogram, share, need_bytes, self._worth()), int(sum(histogram) / (share or 1))

    def _scan_parts(self, parts: Iterable[_Part], scan: ChunkScan, freed: Freed = ignore) -> None:
        for data_dir, part in parts:
            if self._stop or (scan.want_bytes and scan.is_done):
                break
            before, path = scan.removed_bytes, f"{data_dir}/{part}"
            removed: list[str] = []
            try:
                removed = scan.scan(self._root_fd, path, self._stop)
            except OSError as error:  # it has vanished, or cannot be read: then the others
                count_failure(scan.failures, error)
            if removed:
                scan.removed_bytes += remove_if_empty(self._root_fd, path)
                freed(scan.removed_bytes - before)
                self._gone(data_dir, [f"{part}/{path}" for path in removed])
