"""The file tier's background work: counts, sweeps, evicts, sets times, lists chunks.

Counting, listing and sweeping may take minutes on a cold disk. They have their own thread, so that eviction
continues in another. A failure is logged and the work repeated; it fails no put or get.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import Final

import anyio

from kvtier._core.tiers.backoff import Backoff
from kvtier._log import GuardedLogger, LogLimit
from kvtier.tiers._base import TierContext
from kvtier.tiers._waiting import call_soon
from kvtier.tiers.fs._config import FsConfig
from kvtier.tiers.fs._epoch import OpenEpoch
from kvtier.tiers.fs._files import chunk_files
from kvtier.tiers.fs._files.native_call import Failures, FileCall, Place, StopFlag, errno_name
from kvtier.tiers.fs._files.workers import Workers
from kvtier.tiers.fs._layout import key_of, owner_of
from kvtier.tiers.fs._maintenance.evict import Evictor
from kvtier.tiers.fs._maintenance.scan import Freed
from kvtier.tiers.fs._maintenance.uses import WAITING, Uses
from kvtier.tiers.fs._namespace import OpenNamespace
from kvtier.tiers.fs._quota import ledger
from kvtier.tiers.fs._quota.quota import Quota

TICK_S: Final = 2.0  # between two reads of the ledger, which contains other writers' needs
EVICTION_PAUSE_S: Final = (0.1, 30.0)  # first and longest pause after a futile eviction
_UNCOUNTED_S: Final = 1.0  # between two attempts at a first count
_ROOM_EVERY_S: Final = 0.02  # between two attempts of a put, because another process may make room
_TOUCHED_A_CALL: Final = 1024
_PUBLISHED_BEFORE_EVICTION: Final = 4096  # Number of chunks. Puts wait until their uses are published.
_DOUBT_AT_MOST_S: Final = 600.0  # without eviction until a count; some take hours
_LINES_EVERY_S: Final = 30.0
# errors caused by other users or dead mounts
_FOREIGN: Final = frozenset({errno.EACCES, errno.EPERM, errno.ENOTCONN})
_log = GuardedLogger("kvtier.tiers.fs")


class Maintenance:
    """The background work of one open tier.

    The thread ``slow`` does work that may take minutes, ``quick`` everything else. The context's ``lost`` is
    called if the root was replaced or is writable again.
    """

    def __init__(
        self,
        config: FsConfig,
        context: TierContext,
        namespace: OpenNamespace,
        quota: Quota,
        closing: StopFlag,
        epoch: OpenEpoch,
        *,
        slow: Workers,
        quick: Workers,
    ) -> None:
        self.evicted_chunks = 0
        self.evicted_bytes = 0
        self.counted = asyncio.Event()  # set after the first count, even if it failed
        self.uses: Final = Uses(ttl_s=config.ttl_s)
        self._epoch = epoch
        self._config = config
        self._context = context
        self._namespace = namespace
        self._quota = quota
        self._closing = closing
        self._loop = asyncio.get_running_loop()
        self._slow = slow
        self._quick = quick
        self._evictor = Evictor(
            namespace.root_fd, closing, self._gone, ours=frozenset({namespace.writer}), worth=self.uses.worth
        )
        self._timers: dict[Workers, asyncio.TimerHandle] = {}
        self._requested: set[str] = set()  # work that waits or runs
        self._room_made = asyncio.Event()
        self._eviction_pause = Backoff(*EVICTION_PAUSE_S)
        self._eviction_paused_until = 0.0
        self._is_warned = False
        self._rest_bytes = 0  # bytes of foreign files below the root
        self._doubted_until = 0.0  # until then, eviction waits for a count, because the ledger is wrong
        self._log_limit = LogLimit(_LINES_EVERY_S)

    # In the event loop:

    def start(self) -> None:
        """Start the background work, now and at intervals."""
        self._slow.submit(self._do_slow_work)
        self._after(TICK_S, self._quick, self._do_tick)

    def follow(self, epoch: OpenEpoch) -> None:
        """Work on a new epoch from now on."""
        self._epoch = epoch
        self.uses.clear()
        self.start()

    def stop(self) -> None:
        """Start nothing more. The caller has set ``closing``."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._wake_puts()

    def make_room_soon(self) -> None:
        """Request an eviction if one is due. Any thread may call it."""
        if self._namespace.can_evict and not self._is_eviction_paused:
            self._request(self._quick, self._evict, "eviction")

    async def room_made(self, give_up_at: float) -> bool:
        """Request an eviction and wait for room. Return whether a refused put should try again.

        Return after a moment even without room, because another process may make it unnoticed. ``give_up_at``
        is on the loop's clock.
        """
        left_s = give_up_at - self._loop.time()
        if left_s <= 0 or self._closing or not self._quota.can_make_room or self._is_eviction_paused:
            return False
        if self._quota.should_be_counted:
            self._request(self._slow, self._count, "counting its bytes")
        self.make_room_soon()
        with anyio.move_on_after(min(left_s, _ROOM_EVERY_S)):
            await self._room_made.wait()
        return True

    @property
    def _is_eviction_paused(self) -> bool:
        return time.monotonic() < self._eviction_paused_until

    def _wake_puts(self) -> None:
        self._room_made.set()
        self._room_made = asyncio.Event()

    def _request(self, workers: Workers, work: Callable[[], None], what: str) -> None:
        """Submit work unless it already waits or runs. Any thread may call it."""
        if not self._closing and what not in self._requested:
            self._requested.add(what)
            workers.submit(partial(self._do_requested, work, what))

    def _do_requested(self, work: Callable[[], None], what: str) -> None:
        try:
            self._try(work, what)
        finally:
            self._requested.discard(what)
            call_soon(self._loop, self._wake_puts)

    def _after(self, seconds: float, workers: Workers, work: Callable[[], None]) -> None:
        """Schedule a thread's regular work, in place of an earlier schedule."""
        if workers in self._timers:
            self._timers[workers].cancel()
        if not self._closing:
            self._timers[workers] = self._loop.call_later(seconds, workers.submit, work)

    # In the two threads:

    def _do_slow_work(self) -> None:
        epoch, ttl_s = self._epoch, self._config.ttl_s
        self._try(self._count, "counting its bytes")
        call_soon(self._loop, self.counted.set)
        if self._namespace.read_only is None:
            self._try(self._sweep, "removing leftovers")
            if ttl_s is not None:
                self._try(partial(self._expire, ttl_s), "removing expired chunks")
        self._try(partial(epoch.list, self._closing), "listing its chunks")
        every_s = min(self._config.recount_s, ttl_s or inf)
        if self._quota.used_bytes is None:
            every_s = min(every_s, _UNCOUNTED_S)
        call_soon(self._loop, partial(self._after, every_s, self._slow, self._do_slow_work))

    def _do_tick(self) -> None:
        epoch = self._epoch
        if (limit := self._quota.limit) is not None:
            self.uses.room = limit // epoch.place.chunk_bytes
        self._try(self._report_change, "looking for a change of its directory")
        self._try(self._refresh, "reading its ledger")
        if self._quota.excess:
            self.make_room_soon()
        if self._quota.should_be_counted:
            self._request(self._slow, self._count, "counting its bytes")
        if self._namespace.read_only is None:
            self._try(partial(self._publish, epoch.place, WAITING), "noting uses in its files")
        call_soon(self._loop, partial(self._after, TICK_S, self._quick, self._do_tick))

    def _report_change(self) -> None:
        if self._namespace.is_replaced():
            self._context.lost(f"{self._config.root_dir} was replaced by another directory or removed")
        elif (refusal := self._namespace.try_to_write()) == 0:
            self._context.lost(f"{self._config.root_dir} can be written now")
        elif refusal in ledger.NO_ROOM:
            self.note_full(refusal)

    def _refresh(self) -> None:
        try:
            self._quota.refresh()
        except OSError as error:
            if error.errno not in ledger.NO_ROOM:
                raise
            self.note_full(error.errno)

    def note_full(self, number: int, removals: tuple[str, int] | None = None) -> None:
        """Record a write that failed because there was no room, perhaps due to a quota.

        Blocks. See ``lower_limit``.
        """
        is_new = False
        with suppress(OSError), ledger.elected(self._namespace.root_fd, ledger.EVICTING) as lock:
            is_new = lock is not None and self._quota.lower_limit(removals)
        if is_new:
            what = "%s: a write was refused (%s) at %d bytes, and statvfs shows free space: this is a quota; "
            remedy = "chunks are evicted to stay below it: set max_bytes below the quota, or raise it"
            _log.warning(what + remedy, self._config.root_dir, errno_name(number), self._quota.limit)

    def _count(self) -> None:
        if not self._quota.count_is_due(self._config.recount_s):
            return
        if self._namespace.read_only is not None:
            self._quota.count(self._add_up)
            return
        with ledger.elected(self._namespace.root_fd, ledger.COUNTING) as lock:
            if lock is not None:
                self._quota.count(self._add_up)

    def _add_up(self) -> int:
        failures: Failures = Counter()
        counted = chunk_files.tree_bytes(self._namespace.root_fd, ".", self._closing, failures)
        for number in failures.keys() - _FOREIGN:  # the sum may be far too low
            raise OSError(number, os.strerror(number))
        return counted

    def _sweep(self) -> None:
        swept = self._evictor.sweep(self._count_freed(), orphans=False)
        for problem in swept.problems:
            self.warn("quarantine", problem)

    def _expire(self, ttl_s: float) -> None:
        expired = self._evictor.expire(ttl_s, self._count_freed())
        if expired is not None:
            self.evicted_chunks += expired.chunks

    def _evict(self) -> None:
        self._refresh()
        need = self._quota.excess
        if not need or self._namespace.is_replaced():  # the next tick reports a replaced root
            return
        self._publish(self._epoch.place, _PUBLISHED_BEFORE_EVICTION)
        evicted = self._evictor.make_room(need, self._count_freed(), self._compare)
        if evicted is None or self._awaits_count:
            return
        self.evicted_chunks += evicted.chunks
        if evicted.failures:
            reasons = ", ".join(f"{os.strerror(n)} ({count})" for n, count in evicted.failures.items())
            self.warn("failures", f"files or directories could not be removed or read: {reasons}")
        self._pause_eviction_if_futile(need, evicted.bytes)

    def _compare(self, found_bytes: int) -> bool:
        """Compare the ledger with the estimated bytes of chunks; return whether eviction may proceed.

        It may not if the ledger has far more: the root is counted first. Any difference after a count is due
        to foreign files.
        """
        accounts, rest_bytes = self._quota.accounts, self._rest_bytes
        self._rest_bytes = max(0, accounts.used - found_bytes)
        if accounts.used - rest_bytes > 2 * (found_bytes + accounts.leased):
            self._quota.doubt()
            self._doubted_until = time.monotonic() + _DOUBT_AT_MOST_S
        return not self._awaits_count

    @property
    def _awaits_count(self) -> bool:
        return self._quota.is_doubted and time.monotonic() < self._doubted_until

    def _pause_eviction_if_futile(self, need: int, removed: int) -> None:
        """Pause eviction if it removed nothing.

        During puts there is no pause: their files take room, and can be evicted when complete.
        """
        if removed or self._quota.accounts.leased > 0:
            self._eviction_pause.reset()
            self._eviction_paused_until = 0.0
            return
        self._eviction_paused_until = time.monotonic() + self._eviction_pause.next_s()
        if self._eviction_pause.pause_s == EVICTION_PAUSE_S[1] and not self._is_warned:
            self._is_warned = True
            _log.warning(
                "%s: over the limit by %d bytes; no chunks are left to evict: free space, or raise max_bytes",
                self._config.root_dir,
                need,
            )

    def _count_freed(self) -> Freed:
        """Return a callback that subtracts removed bytes from the ledger."""
        since, untold = self._quota.mark(), 0

        def freed(count: int) -> None:
            nonlocal since, untold
            self.evicted_bytes += count
            untold += count
            try:
                since, untold = self._quota.removed(untold, since), 0
            except OSError as error:  # a full disk must not stop an eviction
                if error.errno not in ledger.NO_ROOM:
                    raise

        return freed

    def _gone(self, data_dir: str, paths: Sequence[str]) -> None:
        epoch = self._epoch
        if data_dir == epoch.place.data_dir:
            keys = [key for path in paths if (key := key_of(path)) is not None]
            epoch.forget(keys)
            self._context.removed(keys)

    def _publish(self, place: Place, most: int) -> None:
        used = self.uses.take_unpublished(most)
        for first in range(0, len(used), _TOUCHED_A_CALL):
            keys, classes = zip(*used[first : first + _TOUCHED_A_CALL], strict=True)
            chunk_files.touch(FileCall(place, keys), classes)
            if self._closing:
                return

    def _try(self, work: Callable[[], None], what: str) -> None:
        try:
            work()
        except OSError as error:
            if not self._closing:
                why = f"{error.strerror or error} ({errno_name(error.errno)})"
                self.warn(what, f"{what} failed: {why}{owner_of(error, self._config.root_dir)}")
        except Exception:
            if not self._closing:
                self.warn(what, f"{what} failed", exc_info=True)

    def warn(self, subject: str, text: str, *, exc_info: bool = False) -> None:
        """Log a warning about the root, unless one on the subject was logged a moment ago."""
        added = self._log_limit.allow(subject, time.monotonic())
        if added is not None:
            _log.warning("%s: %s%s", self._config.root_dir, text, added, exc_info=exc_info)
