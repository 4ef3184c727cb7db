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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from kvtier.tiers.fs._config import FsConfig
from kvtier.tiers.fs._files.call import Result
from kvtier.tiers.fs._quota import ledger
from kvtier.tiers.fs._quota.accounts import UNKNOWN, Accounts, Bounds, FileSystem, Mark, Watermarks, room_for
from kvtier.tiers.fs._quota.ledger import Ledger

DEFAULT_FREE_SHARE: Final = 0.05
DEFAULT_FREE_BYTES: Final = 32 * 2**30
LOOK_EVERY_S: Final = 1.0
RENEWED_AT: Final = 0.5
"""With so much of a lease left, or of the time for which a look is fresh gone, both are renewed."""

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


@dataclass(slots=True)
class _Undo:
    """What was reported to the ledger, to be taken back where that cannot be stored.

    Attributes:
        generation: the one that the lease was from before.
        spent: bytes that were reported.
        dropped: bytes of the lease that were given up.
    """

    generation: str
    spent: int = 0
    dropped: int = 0


class Quota:
    """What may be written. Any thread may call it.

    One thread at a time asks the ledger and the file system; meanwhile others go on to reserve and to
    settle, out of what is leased already.

    Args:
        config: the tier's settings.
        file_bytes: the most bytes that writing one chunk can take.
        shared: the root's ledger.
        look: returns the file system's state; it blocks.
        clock: seconds.

    Raises:
        OSError: the file system cannot be asked.
    """

    def __init__(
        self,
        config: FsConfig,
        file_bytes: int,
        shared: Ledger,
        look: Callable[[], FileSystem],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._asking = threading.Lock()  # held by the one who asks the ledger or the file system
        self._lock = threading.Lock()  # of the numbers below; nobody is asked while it is held
        self._file_bytes = file_bytes
        self._ledger = shared
        self._look = look
        self._clock = clock
        self._seen = look()
        self._seen_at = clock()
        self._bounds = bounds_of(config, self._seen)
        self._marks = Watermarks(config.high_watermark, config.low_watermark)
        self._evicts = config.eviction != "none"
        self._generation = ""
        self._free_lease = 0  # leased, and not reserved
        self._least_lease = 0  # with less of it, more should be leased
        self._aside = 0  # leased for the one who asks; nobody else reserves it
        self._undo = _Undo("")
        self._reserved = 0  # reserved, and perhaps not written yet
        self._unreported = 0  # written since the last report
        self._since_look = 0  # reserved or written since the last look at the file system
        self._excess = 0
        self._is_exact = False
        self._unconfirmed = 0
        self._leased = 0
        self._used_at_report = 0
        self._limit: int | None = config.max_bytes
        self.refresh()

    @property
    def used_bytes(self) -> int | None:
        """Bytes below the root, as far as known; None before the first count.

        Without a lock: for who may not wait it is a moment old.
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

    @property
    def unconfirmed_bytes(self) -> int:
        """Bytes that writers who have died may have written, until the root is counted again."""
        return self._unconfirmed

    @property
    def can_make_room(self) -> bool:
        """Whether anything may be evicted: not before it is known what the root holds."""
        return self._evicts and self._is_exact

    @property
    def has_puts_under_way(self) -> bool:
        """Whether some writer may be writing a chunk now, as of the last look at the ledger."""
        return self._leased >= self._file_bytes

    @property
    def needs_renewal(self) -> bool:
        """Whether ``reserve_at_once`` will soon need more of a lease, or a newer look at the file system."""
        return self._is_low or self._clock() - self._seen_at >= RENEWED_AT * LOOK_EVERY_S

    @property
    def _is_low(self) -> bool:
        return self._free_lease < self._least_lease

    def reserve(self, chunks: int) -> tuple[int, Result]:
        """Reserve bytes for new files.

        Returns:
            How many of ``chunks`` may be written, and why the others may not.

        Raises:
            OSError: the file system or the ledger does not answer.
        """
        wanted = chunks * self._file_bytes
        with self._asking:
            self._set_aside(wanted)
            try:
                reason = Result.MAX_BYTES
                if self._aside < wanted:
                    reason = self._lease(wanted)
                elif not self._is_fresh():
                    self._look_again()
                return self._take_aside(wanted, reason)
            finally:
                self._put_back()

    def reserve_at_once(self, chunks: int) -> bool:
        """Reserve bytes for all of ``chunks`` if nobody has to be asked, nor waited for while he asks."""
        wanted = chunks * self._file_bytes
        with self._lock:
            if not self._is_fresh() or wanted > min(self._free_lease, self._above_free()):
                return False
            self._free_lease -= wanted
            self._reserve(wanted)
            return True

    def _set_aside(self, wanted: int) -> None:
        """Keep what of the lease is needed from being reserved by others while more is asked for."""
        with self._lock:
            self._aside = min(self._free_lease, wanted)
            self._free_lease -= self._aside

    def _put_back(self) -> None:
        with self._lock:
            self._free_lease += self._aside
            self._aside = 0

    def _take_aside(self, wanted: int, reason: Result) -> tuple[int, Result]:
        """Reserve what was set aside, as many whole files as it is enough for."""
        with self._lock:
            above_free, leased = self._above_free(), min(wanted, self._aside)
            if above_free < leased:
                reason = Result.MIN_FREE
            granted = max(0, min(leased, above_free) // self._file_bytes)
            self._aside -= granted * self._file_bytes
            self._reserve(granted * self._file_bytes)
            return granted, reason

    def _reserve(self, taken: int) -> None:
        self._reserved += taken
        self._since_look += taken

    def settle(self, granted: int, added: int) -> None:
        """Replace a reservation of ``granted`` chunks by the bytes that were really added. Asks nobody."""
        taken = granted * self._file_bytes
        with self._lock:
            self._reserved -= taken
            self._free_lease += taken - added
            self._since_look += added - taken
            self._unreported += added

    def mark(self) -> Mark:
        """Return the ledger's state, for ``changed`` with the bytes that are removed from now on.

        Where the ledger does not answer it fits no ledger: the bytes take room until the root is counted.
        """
        with suppress(OSError), self._asking, self._change() as accounts:
            return accounts.mark
        return UNKNOWN

    def changed(self, count: int, since: Mark) -> Mark:
        """Note that so many bytes were added without a reservation, or, where negative, removed.

        Args:
            count: bytes.
            since: from ``mark``, or from here, before the first of them was removed.

        Returns:
            The mark for the bytes that are removed from now on.

        Raises:
            OSError: the ledger does not answer.
        """
        if not count:
            return since
        with self._asking, self._change() as accounts:
            self._report(accounts)
            if count > 0:
                accounts.added += count
            else:
                accounts.remove(-count, since)
            self._learn(accounts, self._look_again())
            return accounts.mark

    def refresh(self) -> None:
        """Read what others wrote and removed, and give back the lease if nothing is being written.

        Raises:
            OSError: the file system or the ledger does not answer.
        """
        with self._asking, self._change() as accounts:
            self._report(accounts)
            self._ledger.expire_dead_leases(accounts)
            self._give_back_unused(accounts)
            self._learn(accounts, self._look_again())

    def renew(self) -> None:
        """Look at the file system, and lease ahead, before either is needed: see ``needs_renewal``.

        Raises:
            OSError: the file system or the ledger does not answer.
        """
        with self._asking:
            if not self._is_low:
                self._look_again()
                return
            with self._change() as accounts:
                self._report(accounts)
                disk = self._look_again()
                room = min(room_for(accounts, self._bounds, disk))
                granted = accounts.grant_ahead(self._ledger.writer, room, self._free_lease)
                self._learn(accounts, disk)
            self._add_lease(granted)

    def count_is_due(self, every_s: float) -> bool:
        """Return whether nobody has counted the root for so many seconds, or since a writer has died."""
        with self._asking, self._change() as accounts:
            age_s = ledger.now() - accounts.counted_at
            return accounts.unconfirmed > 0 or not accounts.is_exact or not 0 <= age_s < every_s

    def count(self, add_up: Callable[[], int]) -> None:
        """Count what the root holds. Blocks as long as ``add_up`` does.

        Raises:
            OSError: it could not be counted; the last count stays.
        """
        with self._asking, self._change() as accounts:
            self._report(accounts)
            start = accounts.begin_count()
        counted = add_up()
        with self._asking, self._change() as accounts:
            self._report(accounts)
            accounts.end_count(start, counted, ledger.now())
            self._learn(accounts, self._look_again())

    # ------------------------------------------------- in the thread that holds ``_asking``

    @contextmanager
    def _change(self) -> Iterator[Accounts]:
        """Hold the accounts. Where they cannot be stored nothing was reported and nothing given back.

        Puts go on meanwhile: what is leased is theirs only when it is written down.
        """
        self._undo = _Undo(self._generation)
        try:
            with self._ledger.change() as accounts:
                yield accounts
        except BaseException:
            with self._lock:
                self._unreported += self._undo.spent
                self._free_lease += self._undo.dropped
                self._generation = self._undo.generation
            raise

    def _lease(self, wanted: int) -> Result:
        """Set more bytes of the ledger's aside. Returns which bound it is that there are no more."""
        with self._change() as accounts:
            self._report(accounts)
            missing = wanted - self._aside
            disk = self._look_again()
            below_limit, above_free = room_for(accounts, self._bounds, disk)
            if min(below_limit, above_free) < missing:
                self._ledger.expire_dead_leases(accounts)
                below_limit, above_free = room_for(accounts, self._bounds, disk)
            room = min(below_limit, above_free)
            granted = accounts.grant(self._ledger.writer, missing, room, self._aside, self._file_bytes)
            self._learn(accounts, disk, missing if granted < missing else 0)
        self._aside += min(granted, missing)
        self._add_lease(granted - min(granted, missing))
        if above_free < below_limit:
            return Result.MIN_FREE
        return Result.MAX_BYTES if self._is_exact else Result.COUNTING

    def _add_lease(self, granted: int) -> None:
        with self._lock:
            self._free_lease += granted
            self._least_lease = int(RENEWED_AT * self._free_lease)

    def _report(self, accounts: Accounts) -> None:
        """Report what was written since the last report; where the lease is no more, do without it."""
        writer = self._ledger.writer
        with self._lock:
            self._undo.spent, self._unreported = self._unreported, 0
            accounts.report(writer, self._undo.spent, self._generation)
            self._generation = accounts.generation
            if writer not in accounts.leases:
                self._undo.dropped = self._free_lease + self._aside
                self._free_lease = self._aside = 0
                accounts.leases[writer] = self._reserved

    def _give_back_unused(self, accounts: Accounts) -> None:
        with self._lock:
            if not self._reserved:
                accounts.give_back(self._ledger.writer, self._free_lease)
                self._undo.dropped += self._free_lease
                self._free_lease = self._least_lease = 0

    def _learn(self, accounts: Accounts, disk: FileSystem, wanted: int = 0) -> None:
        self._is_exact = accounts.is_exact
        self._unconfirmed = accounts.unconfirmed
        self._leased = accounts.leased
        self._used_at_report = accounts.used
        if accounts.is_exact:
            self._limit = self._bounds.limit(accounts.used, disk)
        if self._evicts:
            self._excess = self._marks.excess(accounts, self._bounds, disk, wanted, self._file_bytes)

    def _look_again(self) -> FileSystem:
        with self._lock:
            written = self._since_look - self._reserved
        seen = self._look()
        with self._lock:
            self._seen = seen
            self._seen_at = self._clock()
            # What was not written when the look began may not be in use yet: it is held against what is free.
            self._since_look -= written
        return seen

    # --------------------------------------------------------------------- with ``_lock`` held

    def _is_fresh(self) -> bool:
        return self._clock() - self._seen_at < LOOK_EVERY_S

    def _above_free(self) -> int:
        """Return how many bytes may be written before the file system has too few free ones."""
        return self._seen.free - self._bounds.min_free - self._since_look
