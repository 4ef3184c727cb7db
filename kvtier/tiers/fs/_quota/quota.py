"""The bounds of the file tier: how many chunks may be written now.

Two bounds hold at once, for all processes that use the root: ``max_bytes`` for everything below it, and
``min_free_bytes`` for the file system. The bytes of a batch are leased from the root's ledger before it is
written. If there is plenty of room, a writer leases some more for the batches of the next milliseconds, which
then need not ask.

Before the first count the root is assumed to hold all that the file system holds, so the bound holds from the
first put on. Puts that only this refuses are refused as ``COUNTING``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from typing import Final

from kvtier.tiers.fs._config import FsConfig
from kvtier.tiers.fs._files.call import Result
from kvtier.tiers.fs._quota.accounts import Accounts, Bounds, FileSystem
from kvtier.tiers.fs._quota.ledger import Ledger

_AHEAD_BYTES: Final = 64 * 2**20
_AHEAD_SHARE: Final = 64
_COUNT_PAUSE: Final = 20  # times what the last count took
_DOUBT_PAUSE: Final = 5


@dataclass(slots=True)
class _Change:
    """The accounts while they are held, and the bytes to lease in addition."""

    accounts: Accounts
    disk: FileSystem
    reserve: int = 0  # bytes that a put is going to write
    ahead: int = 0  # bytes for later puts


class Quota:
    """The writes of one writer within the bounds. Any thread may call it.

    Methods that do not say otherwise ask the ledger and the file system: they block, and raise OSError if
    either does not answer.

    Args:
        file_bytes: the most bytes that writing one chunk can take.

    Attributes:
        accounts: the ledger as last read.
        limit: bytes that may be below the root; None before the default is known.
        excess: bytes to evict.
    """

    def __init__(self, config: FsConfig, file_bytes: int, ledger: Ledger) -> None:
        self._asking = threading.Lock()  # held while the ledger or the file system is asked
        self._lock = threading.Lock()  # of the three numbers below; nothing is asked while it is held
        self._reserved = 0  # of this writer's lease, by puts that have not ended
        self._ahead = 0  # of this writer's lease, for puts to come
        self._unreported = 0  # written, and not in the ledger yet: the lease there still covers it
        self._leased = 0  # the lease as the ledger has it
        self._refused = 0  # bytes that the last reservation was not granted: room should be made for them
        self._file_bytes = file_bytes
        self._ledger = ledger
        self._bounds = Bounds(config)
        self._evicts = config.eviction != "none"
        self._doubted = ""  # the mark of the ledger that is in doubt
        self._is_contradicted = False  # by the file system
        self.accounts = Accounts(0)
        self.limit: int | None = config.max_bytes
        self.excess = 0
        self.refresh()

    @property
    def used_bytes(self) -> int | None:
        """Bytes below the root, as far as known; None before the first count. Does not block."""
        return self.accounts.used + self._unreported if self.accounts.is_exact else None

    @property
    def can_make_room(self) -> bool:
        """Whether anything may be evicted: not before it is known what the root holds."""
        return self._evicts and self.accounts.is_exact

    @property
    def should_be_counted(self) -> bool:
        """Whether the ledger may have too many bytes, or the root was never counted."""
        accounts = self.accounts
        is_sure = accounts.is_exact and not accounts.unconfirmed and accounts.mark != self._doubted
        return not is_sure or self._is_contradicted

    @property
    def has_news(self) -> bool:
        """Whether the lease in the ledger differs from the need of puts, or bytes are not reported yet."""
        return self._unreported > 0 or self._reserved != self._leased

    def reserve_ahead(self, chunks: int) -> bool:
        """Reserve bytes for new files from the bytes leased ahead, all or none. ``settle`` ends it.

        Returns whether they are reserved. Does not block.
        """
        wanted = chunks * self._file_bytes
        with self._lock:
            if wanted > self._ahead:
                return False
            self._ahead -= wanted
            self._reserved += wanted
        return True

    def reserve(self, chunks: int) -> tuple[int, Result]:
        """Reserve bytes for new files. ``settle`` ends it.

        Returns how many of ``chunks`` may be written, and why the others may not.
        """
        wanted = chunks * self._file_bytes
        with self._change() as change:
            accounts, disk = change.accounts, change.disk
            below_limit, above_free = self._bounds.room(accounts, disk)
            if min(below_limit, above_free) < wanted:
                self._ledger.expire_dead_leases(accounts)
                below_limit, above_free = self._bounds.room(accounts, disk)
            room = max(0, min(below_limit, above_free))
            granted = min(chunks, room // self._file_bytes)
            change.reserve = granted * self._file_bytes
            if granted == chunks:
                change.ahead = min(_AHEAD_BYTES, (room - change.reserve) // _AHEAD_SHARE)
            self._refused = wanted - change.reserve
            reason = Result.MAX_BYTES if accounts.is_exact else Result.COUNTING
        return granted, Result.MIN_FREE if above_free < below_limit else reason

    def settle(self, granted: int, added: int) -> None:
        """End a reservation of ``granted`` chunks, which have added so many bytes. Does not block."""
        with self._lock:
            self._reserved -= granted * self._file_bytes
            self._unreported += added

    def flush(self) -> None:
        """Report to the ledger what was settled, and give back what was leased ahead.

        Raises nothing: if the ledger does not answer, the next put or refresh reports it.
        """
        if self.has_news:
            with suppress(OSError), self._change():
                pass

    def mark(self) -> str:
        """Return the ledger's mark, for ``removed`` with the bytes that are removed from now on.

        Raises nothing: if the ledger does not answer, the mark fits none, and the bytes take room until the
        root is counted.
        """
        mark = ""
        with suppress(OSError), self._change() as change:
            mark = change.accounts.mark
        return mark

    def removed(self, nbytes: int, since: str) -> str:
        """Report removed bytes, and return the mark for those that are removed from now on.

        Args:
            since: the mark from before the first of them was removed.
        """
        if not nbytes:
            return since
        with self._change() as change:
            change.accounts.remove(nbytes, since)
            return change.accounts.mark

    def refresh(self) -> None:
        """Report what was written, and read what others wrote and removed."""
        self._bounds.probe(self._file_bytes, time.monotonic())
        with self._change() as change:
            self._ledger.expire_dead_leases(change.accounts)

    def lower_limit(self) -> bool:
        """Note that the file system refused a write for want of room. Return whether no write was before.

        Raises nothing: the limit is this process's belief, whether or not the ledger can be written.
        """
        was_known, is_lower = self._bounds.hidden is not None, False
        with suppress(OSError), self._change() as change:
            is_lower = self._bounds.lower(change.accounts, change.disk, self._file_bytes, time.monotonic())
            self._assess(change)
        return is_lower and not was_known

    def count_is_due(self, every_s: float) -> bool:
        """Return whether to count the root: after so many seconds, or because the ledger is in doubt.

        Counts of a root that takes long are rarer: they take a twentieth of the time, in doubt a fifth.
        """
        with self._change() as change:
            accounts = change.accounts
            if not accounts.is_exact or accounts.unconfirmed or accounts.mark == self._doubted:
                return True
            pause_s = max(every_s, _COUNT_PAUSE * accounts.count_s)
            if accounts.is_contradicted(change.disk):
                pause_s = max(1.0, _DOUBT_PAUSE * accounts.count_s)
            return not 0 <= time.time() - accounts.counted_at < pause_s

    def doubt(self) -> None:
        """Request a count: fewer bytes are there than in the ledger."""
        self._doubted = self.accounts.mark

    def count(self, add_up: Callable[[], int]) -> None:
        """Count what the root holds, with ``add_up``. On OSError the last count stays."""
        with self._change() as change:
            start, start_s = copy(change.accounts), time.monotonic()
        counted = add_up()
        took_s = time.monotonic() - start_s
        with self._change() as change:
            change.accounts.end_count(start, counted, time.time(), change.disk, took_s)

    @contextmanager
    def _change(self) -> Iterator[_Change]:
        """Hold the accounts; this writer's lease in them is the bytes that its puts have reserved.

        The bytes leased ahead are given back. If the accounts cannot be stored, nothing has changed. Puts
        that end meanwhile are reported the next time.
        """
        with self._asking:
            with self._lock:
                self._ahead = 0
                reserved, spent = self._reserved, self._unreported
            with self._ledger.change() as accounts:
                writer = self._ledger.writer
                change = _Change(accounts, self._ledger.stat())
                accounts.add(spent)
                accounts.leases[writer] = reserved
                yield change
                accounts.leases[writer] += change.reserve + change.ahead
            with self._lock:
                self._leased = accounts.leases[writer]
                self._reserved += change.reserve
                self._ahead = change.ahead
                self._unreported -= spent
                self.accounts = accounts
                self._assess(change)

    def _assess(self, change: _Change) -> None:
        accounts, disk = change.accounts, change.disk
        self._is_contradicted = accounts.is_contradicted(disk)
        if accounts.is_exact:
            self.limit = self._bounds.limit(accounts.used, disk)
        if self._evicts:
            self.excess = self._bounds.excess(accounts, disk, self._refused, self._file_bytes)
