"""The quota of one writer: how many chunks it may write now.

Two bounds hold for all processes that use the root: ``max_bytes`` for everything below it, and
``min_free_bytes`` for the file system. A put leases its bytes from the root's ledger before it writes them.
If there is plenty of room, it leases more ahead, so that puts of the next milliseconds need not ask it.

Before the first count the root is assumed to hold as much as the whole file system, so the bound holds from
the first put on. Puts that exceed only this assumed bound are refused as ``COUNTING``.
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
from kvtier.tiers.fs._files.native_call import Result
from kvtier.tiers.fs._quota.accounts import Accounts, Bounds, FileSystem
from kvtier.tiers.fs._quota.ledger import Ledger

_AHEAD_BYTES: Final = 64 * 2**20
_AHEAD_SHARE: Final = 64
_COUNT_PAUSE: Final = 20  # interval as a multiple of the duration of the last count
_DOUBT_PAUSE: Final = 5


@dataclass(slots=True)
class _Change:
    """The held accounts, and the bytes to lease in addition."""

    accounts: Accounts
    disk: FileSystem
    reserve: int = 0  # bytes that a put is going to write
    ahead: int = 0  # bytes for later puts


class Quota:
    """Keeps one writer within the bounds. Any thread may call it.

    Unless documented otherwise, methods ask the ledger and the file system: they block, and raise OSError if
    either fails. ``file_bytes`` are the most that writing one chunk can take.
    """

    def __init__(self, config: FsConfig, file_bytes: int, ledger: Ledger) -> None:
        self._asking = threading.Lock()  # held while asking the ledger or the file system
        self._lock = threading.Lock()  # guards the next three numbers; never held while asking
        self._reserved = 0  # part of the lease, for puts in flight
        self._ahead = 0  # part of the lease, for later puts
        self._unreported = 0  # written but not in the ledger; the lease covers it until then
        self._leased = 0  # the lease in the ledger
        self._refused = 0  # bytes that the last reservation lacked, to evict
        self._file_bytes = file_bytes
        self._ledger = ledger
        self._bounds = Bounds(config)
        self._evicts = config.eviction != "none"
        self._doubted = ""  # the mark of the ledger that was doubted
        self._is_contradicted = False  # whether the file system contradicts the ledger
        self.accounts = Accounts(0)  # the ledger at the last read
        self.limit: int | None = config.max_bytes  # below the root; None before the default is known
        self.excess = 0  # bytes to evict
        self.refresh()

    @property
    def used_bytes(self) -> int | None:
        """Bytes below the root; None before the first count. Does not block."""
        return self.accounts.used + self._unreported if self.accounts.is_exact else None

    @property
    def can_make_room(self) -> bool:
        """Whether chunks may be evicted: only after the first count."""
        return self._evicts and self.accounts.is_exact

    @property
    def should_be_counted(self) -> bool:
        """Whether the ledger may be too high, or the root was never counted."""
        is_sure = self.accounts.is_exact and not self.accounts.unconfirmed
        return not is_sure or self.is_doubted or self._is_contradicted

    @property
    def is_doubted(self) -> bool:
        """Whether ``doubt`` was called since the last count."""
        return self.accounts.mark == self._doubted

    @property
    def has_news(self) -> bool:
        """Whether the ledger lacks written bytes, or its lease is not what puts in flight need."""
        return self._unreported > 0 or self._reserved != self._leased

    def reserve_ahead(self, chunks: int) -> bool:
        """Reserve room for all ``chunks`` from the bytes leased ahead, or return False. Does not block.

        The reservation lasts until ``end_reservation``.
        """
        wanted = chunks * self._file_bytes
        with self._lock:
            if wanted > self._ahead:
                return False
            self._ahead -= wanted
            self._reserved += wanted
        return True

    def reserve(self, chunks: int) -> tuple[int, Result]:
        """Reserve room for ``chunks`` until ``end_reservation``.

        Returns how many chunks may be written, and the result of the rest.
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

    def end_reservation(self, granted: int, added: int) -> None:
        """End a reservation of ``granted`` chunks, which wrote ``added`` bytes. Does not block."""
        with self._lock:
            self._reserved -= granted * self._file_bytes
            self._unreported += added

    def flush(self) -> None:
        """Report settled bytes to the ledger, and return the bytes leased ahead.

        Raises nothing: if the ledger fails, the next put or refresh reports them.
        """
        if self.has_news:
            with suppress(OSError), self._change():
                pass

    def mark(self) -> str:
        """Return the ledger's mark, to pass to ``removed`` with bytes removed from now on.

        Raises nothing: if the ledger fails, the mark matches none, and the bytes take room until a count.
        """
        mark = ""
        with suppress(OSError), self._change() as change:
            mark = change.accounts.mark
        return mark

    def removed(self, nbytes: int, since: str) -> str:
        """Report bytes removed since the mark ``since``. Return the mark for later removals."""
        if not nbytes:
            return since
        with self._change() as change:
            change.accounts.remove(nbytes, since)
            return change.accounts.mark

    def refresh(self) -> None:
        """Report written bytes, and read the other writers' changes."""
        self._bounds.probe(self._file_bytes, time.monotonic())
        with self._change() as change:
            self._ledger.expire_dead_leases(change.accounts)

    def lower_limit(self, removals: tuple[str, int] | None = None) -> bool:
        """Record that the file system had no room for a write. Return whether it is the first time.

        ``removals`` are the ledger's before the write; None if unknown. If chunks were removed since then,
        they made the room that the file system shows now: nothing is lowered. No eviction may run meanwhile.
        Raises nothing: the assumed limit is this process's own, so it does not matter if the ledger fails.
        """
        was_known, is_lower = self._bounds.hidden is not None, False
        with suppress(OSError), self._change() as change:
            if removals in (None, change.accounts.removals):
                is_lower = self._bounds.lower(
                    change.accounts, change.disk, self._file_bytes, time.monotonic()
                )
            self._assess(change)
        return is_lower and not was_known

    def count_is_due(self, every_s: float) -> bool:
        """Return whether to count the root: ``every_s`` have passed, or the ledger is in doubt.

        Long counts are rarer: they take at most a twentieth of the time, or a fifth if in doubt.
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
        """Request a count, because the ledger has too many bytes."""
        self._doubted = self.accounts.mark

    def count(self, add_up: Callable[[], int]) -> None:
        """Count the root's bytes with ``add_up``. On OSError the last count stays."""
        with self._change() as change:
            start, start_s = copy(change.accounts), time.monotonic()
        counted = add_up()
        took_s = time.monotonic() - start_s
        with self._change() as change:
            change.accounts.end_count(start, counted, time.time(), change.disk, took_s)

    @contextmanager
    def _change(self) -> Iterator[_Change]:
        """Hold the accounts, with this writer's lease set to the reservations of its puts in flight.

        The bytes leased ahead are given up. If the accounts cannot be stored, nothing else changes. Puts that
        end meanwhile are reported the next time.
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
