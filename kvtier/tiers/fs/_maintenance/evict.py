"""Makes room below a root. It needs no engine; one process at a time does it for all engines.

Useless data leaves first: orphans, old epochs, leftovers of dead writers, the quarantine. Then chunks leave
by their use (see ``ages``), in all namespaces alike. The root is never listed or sorted as a whole: a plan is
made from a random sample of its directories, then applied to directories in random order until there is room.
Hashes spread chunks evenly over directories, so any sample is representative.

A reader that has a removed chunk open can read it to its end. Unfinished files of living writers stay, and so
do files not named as chunks.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from kvtier.tiers._base import ignore
from kvtier.tiers.fs import _layout as layout
from kvtier.tiers.fs._files.native_call import Failures, StopFlag, count_failure
from kvtier.tiers.fs._maintenance import ages
from kvtier.tiers.fs._maintenance.ages import Plan
from kvtier.tiers.fs._maintenance.scan import ALL_BYTES, ChunkScan, Freed, remove_if_empty
from kvtier.tiers.fs._maintenance.sweep import Sweeper
from kvtier.tiers.fs._quota import ledger
from kvtier.tiers.fs._root import Root

SAMPLE_FILES: Final = 32_768  # number of chunks in the sample for a plan
_ROUNDS: Final = 4
Gone = Callable[[str, Sequence[str]], None]
"""Callback for removed chunks: an epoch's directory, and their paths below it."""

Approve = Callable[[int], bool]
"""Callback before an eviction, for the estimated bytes of all chunks. Returns whether it may proceed."""


@dataclass(frozen=True, slots=True)
class Evicted:
    """The result of an eviction or sweep."""

    leftover_bytes: int = 0  # useless to every engine
    chunks: int = 0  # removed to make room or after ``ttl_s``
    chunk_bytes: int = 0  # bytes of these chunks and of emptied directories
    failures: Failures = field(default_factory=Counter)  # files not removed or read
    problems: Sequence[str] = ()  # leftovers not removed, as text

    @property
    def bytes(self) -> int:
        return self.leftover_bytes + self.chunk_bytes


_Part = tuple[str, str]
"""An epoch's directory, and a first-level directory in it."""


class Evictor:
    """Makes room below a root. All calls block, and raise OSError if the root cannot be read.

    ``make_room`` and ``expire`` do nothing and return None while another process does either.

    Args:
        ours: living writers in this process.
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
        worth: Callable[[], ages.Worth] = lambda: ages.worth_of(ages.new_model()),
    ) -> None:
        self._only = only
        self._worth = worth
        self._root_fd = root_fd
        self._stop = stop
        self._gone = gone
        self._ours = ours

    def sweep(self, freed: Freed = ignore, *, orphans: bool) -> Evicted:
        """Remove useless data, and quarantined files beyond the bound; report to ``freed``."""
        with Root(self._root_fd, self._only) as root:
            sweeper = Sweeper(root, self._stop, self._ours, freed)
            sweeper.sweep()
            if orphans:
                sweeper.sweep_orphans()
        return Evicted(sweeper.bytes, failures=sweeper.failures, problems=sweeper.problems)

    def make_room(
        self, need_bytes: int, freed: Freed = ignore, approve: Approve = lambda _: True
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
        """Remove chunks not used for ``ttl_s``, and report to ``freed``."""
        with self._elected() as now_ns, Root(self._root_fd, self._only) as root:
            if now_ns is None:
                return None
            scan = ChunkScan(now_ns, leaving=ages.expired(ttl_s), want_bytes=ALL_BYTES)
            self._scan_parts(self._parts(root), scan, freed)
        return Evicted(0, scan.removed, scan.removed_bytes, scan.failures)

    @contextmanager
    def _elected(self) -> Iterator[int | None]:
        """Become the one process that evicts. Yields the file system's time in ns, or None if another evicts.

        A server's clock may differ from this host's.
        """
        with ledger.elected(self._root_fd, ledger.EVICTING) as lock:
            if lock is not None:
                os.utime(lock)
            yield None if lock is None else os.fstat(lock).st_mtime_ns

    def _parts(self, root: Root) -> list[_Part]:
        """List the directories with chunks, of all namespaces that kvtier made."""
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
        for _ in range(_ROUNDS):  # a sample may underestimate
            if scan.is_done or self._stop:
                break
            random.shuffle(parts)
            # Plan again for files that could not be removed: others leave instead.
            need = scan.want_bytes - scan.removed_bytes + scan.failed_bytes
            leaving, found_bytes = self._plan(parts, now_ns, need)
            if not approve(found_bytes + scan.removed_bytes) or not any(leaving):
                break
            scan.follow(leaving)
            # Keep only the round with most failures, because the same files fail in each round.
            before, scan.failures, scan.failed_bytes = scan.failures, Counter(), 0
            self._scan_parts(parts, scan, freed)
            scan.failures |= before
        return scan

    def _plan(self, parts: Sequence[_Part], now_ns: int, need_bytes: int) -> tuple[Plan, int]:
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
            except OSError as error:  # it vanished or is unreadable: continue with the others
                count_failure(scan.failures, error)
            if removed:
                scan.removed_bytes += remove_if_empty(self._root_fd, path)
                freed(scan.removed_bytes - before)
                self._gone(data_dir, [f"{part}/{path}" for path in removed])
