"""Makes room below a root. It needs no engine; one process at a time does it for all.

What no engine can use goes first: orphaned chunks, old epochs, leftovers of dead writers, the quarantine.
Then chunks leave by their use (see ``ages``), from all namespaces alike. The root is never listed or sorted
as a whole: a random sample of its directories shows how often and when chunks were used, and decides which
leave. Directories are then visited in random order until there is room. Hashes spread chunks evenly over
directories, so any sample is like the whole.

A chunk that is removed while a reader has it open is read to its end. Unfinished files lie in their writer's
own directory and are not touched; nor are files that are not named as chunks, wherever they lie.
"""

from __future__ import annotations

import ctypes
import os
import random
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from kvtier._native import layouts
from kvtier.tiers.fs import _layout as layout
from kvtier.tiers.fs._files.call import Failures, StopFlag, count_failure
from kvtier.tiers.fs._files.chunk_files import require_library
from kvtier.tiers.fs._maintenance import ages
from kvtier.tiers.fs._maintenance.ages import Histogram, Plan
from kvtier.tiers.fs._maintenance.sweep import Sweeper
from kvtier.tiers.fs._quota import ledger
from kvtier.tiers.fs._root import Root

SAMPLE_FILES: Final = 32_768
"""Files in the sample that decides what leaves."""

NAMES_BYTES: Final = 1 << 20
"""Room for the paths of what one scan removes; what has none stays for the next one."""

_ROUNDS: Final = 4
_ALL: Final = 2**63 - 1  # bytes
Gone = Callable[[str, Sequence[str]], None]
"""Called with an epoch's directory and the paths below it of chunks that were removed."""

Freed = Callable[[int], None]
"""Called with the bytes removed since the last call, so that others can use them before all is done."""


Approve = Callable[[int], bool]
"""Called with the bytes of all chunks, about, before some are removed. Returns whether they may be."""


def _approve(found_bytes: int) -> bool:
    return True


def _unlearned() -> ages.Worth:
    return ages.worth_of(ages.new_model())


def _ignore(*details: object) -> None:
    """Do nothing with what was removed."""


@dataclass(frozen=True, slots=True)
class Evicted:
    """What was removed."""

    leftover_bytes: int = 0  # that no engine could use any more
    chunks: int = 0  # removed for room or for ``ttl_s``
    chunk_bytes: int = 0  # of these, and of directories that became empty
    failures: Failures = field(default_factory=Counter)  # what could not be removed or read
    problems: Sequence[str] = ()  # what had to be removed and could not be, in words

    @property
    def bytes(self) -> int:
        """All bytes removed."""
        return self.leftover_bytes + self.chunk_bytes


class ChunkScan(layouts.ChunkScan):
    """A scan of the chunks' files of several directories. The native library reads and adds up its fields.

    Files that are not named as chunks are left alone. A file's mtime is when it was written; a later atime is
    when it was used again, and its mode says how often.

    Args:
        now_ns: the file system's time, from which ages are counted.
        histogram: gets the files' bytes, if given.
        leaving: which files are removed; None: none.
        want_bytes: bytes after which removing stops.

    Attributes:
        seen: number of files that were scanned; ``removed`` of those removed.
        removed_bytes: directories that became empty included.
        failed_bytes: of the files that could not be removed; ``failures`` says why.
    """

    def __init__(
        self,
        now_ns: int,
        histogram: Histogram | None = None,
        leaving: Plan | None = None,
        want_bytes: int = 0,
    ) -> None:
        self.failures: Failures = Counter()
        self._room = ctypes.create_string_buffer(NAMES_BYTES if want_bytes else 1)
        self._histogram = histogram  # kept as long as there is its address
        super().__init__(
            now_ns=now_ns,
            want_bytes=want_bytes,
            histogram=histogram.buffer_info()[0] if histogram is not None else None,
            names=ctypes.addressof(self._room),
            names_room=len(self._room),
        )
        if leaving is not None:
            self.follow(leaving)

    def follow(self, leaving: Plan) -> None:
        """Remove the files that a plan names."""
        self._leaving = (ctypes.c_uint8 * len(leaving)).from_buffer(leaving)
        self.leaving = ctypes.addressof(self._leaving)

    @property
    def is_done(self) -> bool:
        return bool(self.removed_bytes >= self.want_bytes)

    def scan(self, root_fd: int, folder: str, stop: StopFlag) -> list[str]:
        """Scan the chunks' files below a directory of an epoch's first level. Blocks.

        Returns the paths of what was removed, relative to ``folder``. Raises OSError if the directory cannot
        be read or ``stop`` was set.
        """
        self.names_bytes = self.failed = 0
        scan = require_library().kvt_chunks_scan
        result = scan(root_fd, folder.encode(), stop.address, ctypes.byref(self))
        if self.failed:
            self.failures[self.error] += self.failed
        if result < 0:
            raise OSError(-result, os.strerror(-result), folder)
        return [name.decode() for name in self._room.raw[: self.names_bytes].split(b"\0")[:-1]]


_Part = tuple[str, str]
"""An epoch's directory, and one below it with chunks: hashes spread over these."""


class Evictor:
    """Makes room below a root. All calls block, and raise OSError if the root cannot be read.

    ``make_room`` and ``expire`` do nothing and return None while another process does either.

    Args:
        ours: writers that live in this process.
        only: names of the namespaces to work on; None for all.
        worth: what keeping chunks is worth; by default as if nothing had been learned.
    """

    def __init__(
        self,
        root_fd: int,
        stop: StopFlag,
        gone: Gone = _ignore,
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

    def sweep(self, *, orphans: bool) -> Evicted:
        """Remove what nobody can use any more, and of the quarantine what is beyond its bound."""
        with Root(self._root_fd, self._only) as root:
            sweeper = Sweeper(root, self._stop, self._ours)
            removed = sweeper.sweep() + (sweeper.sweep_orphans() if orphans else 0)
        return Evicted(removed, failures=sweeper.failures, problems=sweeper.problems)

    def make_room(
        self, need_bytes: int, freed: Freed = _ignore, approve: Approve = _approve
    ) -> Evicted | None:
        """Remove ``need_bytes``, or all there is if that is less, and report to ``freed``."""
        with self._elected() as now_ns, Root(self._root_fd, self._only) as root:
            if now_ns is None:
                return None
            sweeper = Sweeper(root, self._stop, self._ours)
            leftover = sweeper.remove_leftovers(need_bytes)
            freed(leftover)
            scan = self._remove_least(root, now_ns, need_bytes - leftover, freed, approve)
        return Evicted(leftover, scan.removed, scan.removed_bytes, sweeper.failures + scan.failures)

    def expire(self, ttl_s: float, freed: Freed = _ignore) -> Evicted | None:
        """Remove what was not used for ``ttl_s``, and report to ``freed``."""
        with self._elected() as now_ns, Root(self._root_fd, self._only) as root:
            if now_ns is None:
                return None
            scan = ChunkScan(now_ns, leaving=ages.expired(ttl_s), want_bytes=_ALL)
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
            # What cannot be removed is planned for again: as much of what comes next leaves instead.
            need = scan.want_bytes - scan.removed_bytes + scan.failed_bytes
            leaving, found_bytes = self._plan(parts, now_ns, need)
            if not approve(found_bytes + scan.removed_bytes) or not any(leaving):
                break
            scan.follow(leaving)
            # Of several rounds the one with most failures counts: what cannot be removed fails again, unless
            # there is room before it is scanned.
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

    def _scan_parts(self, parts: Iterable[_Part], scan: ChunkScan, freed: Freed = _ignore) -> None:
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
                scan.removed_bytes += _remove_if_empty(self._root_fd, path)
                freed(scan.removed_bytes - before)
                self._gone(data_dir, [f"{part}/{path}" for path in removed])


def _remove_if_empty(root_fd: int, path: str) -> int:
    """Remove a directory if nothing is in it. Returns the bytes removed."""
    try:
        found = os.stat(path, dir_fd=root_fd, follow_symlinks=False)
        os.rmdir(path, dir_fd=root_fd)
    except OSError:
        return 0
    return found.st_blocks * 512
