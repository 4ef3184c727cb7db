"""The bounds of the file tier: how many chunks may be written now.

Two bounds hold at once, for all processes that use the root: ``max_bytes`` for everything below it,
and ``min_free_bytes`` for the file system. Bytes are leased from the root's ledger before they are
written, many at a time, so that no number of jobs and processes oversteps them. What is leased and not
used goes back when no more is written.

What the root holds is known from the ledger, and is counted where the ledger is new or was counted
long ago. Before the first count the root is taken to hold all that the file system holds: that is
never too little, so the bound holds from the first put on. Puts that only this refuses are refused
as ``COUNTING``.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from kvtier.tiers.fs import ledger
from kvtier.tiers.fs.accounts import Accounts, Bounds, FileSystem, Watermarks, room_for
from kvtier.tiers.fs.call import Result
from kvtier.tiers.fs.config import FsConfig
from kvtier.tiers.fs.ledger import Books

DEFAULT_FREE_SHARE: Final = 0.05
DEFAULT_FREE_BYTES: Final = 32 * 2**30
LOOK_EVERY_S: Final = 1.0
_FEW_FILES: Final = 64


def look_at(root_fd: int) -> FileSystem:
    """Ask the file system that an open directory is on. It blocks.

    Where hardly any file can be made any more, its free bytes are of no use, and none are said to be free: a
    chunk may need directories as well, and where it gets some of them alone, nothing would ever make room.
    """
    found = os.fstatvfs(root_fd)
    unit = found.f_frsize
    few = min(_FEW_FILES, found.f_files // 16)
    has_inodes = found.f_favail > few or found.f_files == 0  # 0 in all: it makes them as they are needed
    free = found.f_bavail * unit if has_inodes else 0
    return FileSystem(found.f_blocks * unit, (found.f_blocks - found.f_bfree) * unit, free)


def bounds_of(config: FsConfig, disk: FileSystem) -> Bounds:
    """Return the bounds that settings ask for on a file system."""
    min_free = config.min_free_bytes
    if min_free is None:
        min_free = min(int(disk.total * DEFAULT_FREE_SHARE), DEFAULT_FREE_BYTES)
    return Bounds(config.max_bytes, min_free)


class Space:
    """What may be written. Any thread may call it.

    Args:
        config: the tier's settings.
        file_bytes: the most bytes that writing one chunk can take.
        books: the root's accounts.
        look: returns the file system's state; it blocks.
        clock: seconds.

    Raises:
        OSError: the file system cannot be asked.
    """

    def __init__(
        self,
        config: FsConfig,
        file_bytes: int,
        books: Books,
        look: Callable[[], FileSystem],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock = threading.Lock()
        self._file_bytes = file_bytes
        self._books = books
        self._look = look
        self._clock = clock
        self._seen = look()
        self._seen_at = clock()
        self._bounds = bounds_of(config, self._seen)
        self._marks = Watermarks(config.high_watermark, config.low_watermark)
        self._evicts = config.eviction != "none"
        self._generation = ""
        self._free_lease = 0  # leased, and not reserved
        self._waiting: deque[tuple[int, int]] = deque()  # reservations to be settled
        self._reserved = 0  # reserved, and perhaps not written yet
        self._unreported = 0  # written since the last report
        self._since_look = 0  # reserved or written since the last look at the file system
        self._excess = 0
        self._is_exact = False
        self._used_at_report = 0
        self._limit: int | None = config.max_bytes
        self.refresh()

    @property
    def used_bytes(self) -> int | None:
        """Bytes below the root, as far as known; None before the first count.

        Without the lock, which is held while the file system is asked, and that may hang: for who may
        not wait it is a moment old.
        """
        return max(0, self._used_at_report + self._unreported) if self._is_exact else None

    @property
    def limit_bytes(self) -> int | None:
        """Bytes that may be below the root; None before the default is known."""
        return self._limit

    @property
    def excess_bytes(self) -> int:
        """Bytes that should be evicted now, as of the last look at the ledger."""
        return self._excess

    def reserve(self, chunks: int) -> tuple[int, Result]:
        """Reserve bytes for new files.

        Returns:
            How many of ``chunks`` may be written, and why the others may not.

        Raises:
            OSError: the file system or the ledger does not answer.
        """
        with self._lock:
            reason = Result.MAX_BYTES
            wanted = chunks * self._file_bytes
            if self._free_lease < wanted:
                reason = self._lease(wanted - self._free_lease)
            above_free = self._above_free()
            if above_free < min(wanted, self._free_lease):
                reason = Result.MIN_FREE
            granted = max(0, min(wanted, self._free_lease, above_free) // self._file_bytes)
            taken = granted * self._file_bytes
            self._free_lease -= taken
            self._reserved += taken
            self._since_look += taken
            return granted, reason

    def reserve_at_once(self, chunks: int) -> bool:
        """Reserve bytes for all of ``chunks`` if nobody has to be asked or waited for. Never blocks."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._settle_waiting()
            wanted = chunks * self._file_bytes
            fresh = self._clock() - self._seen_at < LOOK_EVERY_S
            above_free = self._seen.free - self._bounds.min_free - self._since_look
            if not fresh or wanted > min(self._free_lease, above_free):
                return False
            self._free_lease -= wanted
            self._reserved += wanted
            self._since_look += wanted
            return True
        finally:
            self._lock.release()

    def settle_soon(self, granted: int, added: int) -> None:
        """Do as ``settle`` does, when nobody has to be waited for. Never blocks."""
        self._waiting.append((granted, added))
        if self._lock.acquire(blocking=False):
            try:
                self._settle_waiting()
            finally:
                self._lock.release()

    def _settle_waiting(self) -> None:
        while self._waiting:
            granted, added = self._waiting.popleft()
            taken = granted * self._file_bytes
            self._reserved -= taken
            self._free_lease += taken - added
            self._since_look += added - taken
            self._unreported += added

    def settle(self, granted: int, added: int) -> None:
        """Replace a reservation of ``granted`` chunks by the bytes that were really added."""
        with self._lock:
            self._waiting.append((granted, added))
            self._settle_waiting()

    def changed(self, count: int) -> None:
        """Note that so many bytes were added without a reservation, or, where negative, removed.

        Raises:
            OSError: the ledger does not answer.
        """
        if count:
            with self._lock, self._change() as accounts:
                # A ledger that is new may have been made when they were gone already.
                is_known = accounts.generation == self._generation
                self._report(accounts)
                accounts.added += max(0, count)
                accounts.removed += max(0, -count) if is_known else 0
                self._learn(accounts, self._look_again())

    def refresh(self) -> None:
        """Learn what others wrote and removed, and give back the lease if nothing is being written.

        Raises:
            OSError: the file system or the ledger does not answer.
        """
        with self._lock, self._change() as accounts:
            self._report(accounts)
            self._books.bury_dead(accounts)
            if not self._reserved:
                accounts.give_back(self._books.writer, self._free_lease)
                self._free_lease = 0
            self._learn(accounts, self._look_again())

    def count_is_due(self, every_s: float) -> bool:
        """Say whether nobody has counted the root for so many seconds."""
        with self._lock, self._change() as accounts:
            age_s = ledger.now() - accounts.counted_at
            return not accounts.is_exact or not 0 <= age_s < every_s

    def count(self, add_up: Callable[[], int]) -> None:
        """Count what the root holds. Blocks as long as ``add_up`` does.

        Raises:
            OSError: it could not be counted; the last count stays.
        """
        with self._lock, self._change() as accounts:
            self._report(accounts)
            start = accounts.begin_count()
        counted = add_up()
        with self._lock, self._change() as accounts:
            self._report(accounts)
            accounts.end_count(start, counted, ledger.now())
            self._learn(accounts, self._look_again())

    @contextmanager
    def _change(self) -> Iterator[Accounts]:
        """Hold the accounts. Where they cannot be stored nothing was reported and nothing leased."""
        before = self._unreported, self._generation, self._free_lease
        try:
            with self._books.change() as accounts:
                yield accounts
        except BaseException:
            self._unreported, self._generation, self._free_lease = before
            raise

    def _lease(self, missing: int) -> Result:
        """Get some more bytes from the ledger. Returns which bound it is that there are no more."""
        with self._change() as accounts:
            self._report(accounts)
            disk = self._look_again()
            below_limit, above_free = room_for(accounts, self._bounds, disk)
            if min(below_limit, above_free) < missing:
                self._books.bury_dead(accounts)
                below_limit, above_free = room_for(accounts, self._bounds, disk)
            room = min(below_limit, above_free)
            granted = accounts.grant(self._books.writer, missing, room, self._free_lease, self._file_bytes)
            self._free_lease += granted
            self._learn(accounts, disk, missing if granted < missing else 0)
        if above_free < below_limit:
            return Result.MIN_FREE
        return Result.MAX_BYTES if self._is_exact else Result.COUNTING

    def _report(self, accounts: Accounts) -> None:
        """Say what was written since the last report; where the lease is no more, do without it."""
        self._settle_waiting()
        writer = self._books.writer
        accounts.report(writer, self._unreported, self._generation)
        self._unreported = 0
        self._generation = accounts.generation
        if writer not in accounts.leases:
            self._free_lease = 0
            accounts.leases[writer] = self._reserved

    def _learn(self, accounts: Accounts, disk: FileSystem, wanted: int = 0) -> None:
        self._is_exact = accounts.is_exact
        self._used_at_report = accounts.used
        if accounts.is_exact:
            self._limit = self._bounds.limit(accounts.used, disk)
        if self._evicts:
            self._excess = self._marks.excess(accounts, self._bounds, disk, wanted, self._file_bytes)

    def _above_free(self) -> int:
        """Return how many bytes may be written before the file system has too few free ones."""
        if self._clock() - self._seen_at >= LOOK_EVERY_S:
            self._look_again()
        return self._seen.free - self._bounds.min_free - self._since_look

    def _look_again(self) -> FileSystem:
        self._seen = self._look()
        self._seen_at = self._clock()
        # What is reserved and not written is not in use yet: it is held against what is free.
        self._since_look = self._reserved
        return self._seen
