"""The file tier's background work: counts, sweeps, evicts, sets times, lists what is there.

Two threads do it. Counting, listing and sweeping, which may take minutes on a cold disk, have one of their
own, so that room is made meanwhile. A failure is logged, fails no put or get, and the work is repeated.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import anyio

from kvtier._log import GuardedLogger
from kvtier._telemetry.log_limit import LogLimit
from kvtier.keys import OffloadKey
from kvtier.tiers._drain import call_soon
from kvtier.tiers.fs._config import FsConfig
from kvtier.tiers.fs._files import chunk_files
from kvtier.tiers.fs._files.call import FileCall, Place, StopFlag
from kvtier.tiers.fs._files.workers import Workers
from kvtier.tiers.fs._layout import key_of
from kvtier.tiers.fs._maintenance.evict import Evictor, Freed
from kvtier.tiers.fs._maintenance.known import KnownChunks
from kvtier.tiers.fs._maintenance.recency import Recency
from kvtier.tiers.fs._namespace import Epoch, Namespace
from kvtier.tiers.fs._quota import ledger
from kvtier.tiers.fs._quota.quota import Quota, stat_file_system

TICK_S: Final = 2.0
"""Between two reads of the ledger, which see what others need."""

EVICTION_PAUSE_S: Final = (0.1, 30.0)
"""After nothing could be removed, so long nothing is tried again: at first, and at most."""

_UNCOUNTED_S: Final = 1.0  # between two tries to count a root that was never counted
_ROOM_EVERY_S: Final = 0.02  # between two tries of a put that waits for room that another process makes
_TOUCHED_A_CALL: Final = 1024
_LINES_EVERY_S: Final = 30.0
_log = GuardedLogger("kvtier.tiers.fs")


class Maintenance:
    """The background work of one open tier.

    Args:
        removed: see ``TierContext``.
        lost: see ``TierContext``: the root was replaced or removed, or is writable again.
        epoch: the one whose chunks are listed until ``follow`` names another.
        name: of the tier, for its threads.
    """

    def __init__(
        self,
        config: FsConfig,
        namespace: Namespace,
        quota: Quota,
        closing: StopFlag,
        removed: Callable[[Sequence[OffloadKey]], None],
        lost: Callable[[str], None],
        epoch: Epoch,
        name: str,
    ) -> None:
        self.evicted_chunks = 0
        self.evicted_bytes = 0
        self.counted = asyncio.Event()  # set when the root's bytes are known, or could not be counted
        self.known = KnownChunks(epoch.place)
        self.recency: Final = Recency()
        self._config = config
        self._namespace = namespace
        self._quota = quota
        self._closing = closing
        self._removed = removed
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._slow = Workers(f"{name}-maintain", 1)
        self._quick = Workers(f"{name}-evict", 1)
        self.workers: Final = (self._slow, self._quick)
        self._evictor = Evictor(namespace.root_fd, closing, self._gone, frozenset({namespace.writer}))
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._requested: set[str] = set()  # what is under way, or waits for its thread
        self._room_made = asyncio.Event()
        self._eviction_pause_s = 0.0
        self._eviction_paused_until = 0.0
        self._is_warned = False
        self._log_limit = LogLimit(_LINES_EVERY_S)

    # ------------------------------------------------------------------------- in the event loop

    def begin(self) -> None:
        """Begin the background work: at once, and from time to time."""
        self._begin_slow_work()
        self._after("tick", TICK_S, self._tick)

    def follow(self, epoch: Epoch) -> None:
        """Work on this epoch from now on, of which nothing is known yet."""
        self.known = KnownChunks(epoch.place)
        self.recency.clear()
        self.begin()

    def stop(self) -> None:
        """Begin nothing more. ``closing`` is set already."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._wake_puts()

    def make_room_soon(self) -> None:
        """Request an eviction if one is due. Any thread may call it."""
        if self._namespace.can_evict and not self._is_eviction_paused:
            self._request(self._quick, self._evict, "eviction")

    async def room_made(self, give_up_at: float) -> bool:
        """Request an eviction, and wait for room. Returns whether a put that was refused should try again.

        Another process may be the one that makes room, unseen, so this returns after a moment.
        ``give_up_at`` is on the loop's clock.
        """
        left_s = give_up_at - self._loop.time()
        if left_s <= 0 or self._closing or not self._quota.can_make_room or self._is_eviction_paused:
            return False
        if self._quota.known.unconfirmed:
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
        """Have something done soon, once for all who request it meanwhile. Any thread may call it."""
        if not self._closing and what not in self._requested:
            self._requested.add(what)
            workers.submit(partial(self._do_requested, work, what))

    def _do_requested(self, work: Callable[[], None], what: str) -> None:
        try:
            self._try(work, what)
        finally:
            self._requested.discard(what)
            call_soon(self._loop, self._wake_puts)

    def _after(self, name: str, seconds: float, action: Callable[[], None]) -> None:
        if name in self._timers:
            self._timers[name].cancel()
        if not self._closing:
            self._timers[name] = self._loop.call_later(seconds, action)

    def _begin_slow_work(self) -> None:
        if not self._closing:
            self._slow.submit(partial(self._do_slow_work, self.known))

    def _tick(self) -> None:
        self._quick.submit(partial(self._do_tick, self.known.place))

    def _plan_next(self) -> None:
        every_s = min(self._config.recount_s, self._config.ttl_s or self._config.recount_s)
        if self._quota.used_bytes is None:
            every_s = min(every_s, _UNCOUNTED_S)
        self._after("slow work", every_s, self._begin_slow_work)

    # ---------------------------------------------------------------------------- in two threads

    def _do_slow_work(self, known: KnownChunks) -> None:
        self._try(self._count, "counting its bytes")
        call_soon(self._loop, self.counted.set)
        if self._namespace.read_only is None:
            self._try(self._sweep, "removing leftovers")
            if self._config.ttl_s is not None:
                self._try(partial(self._expire, self._config.ttl_s), "removing expired chunks")
        self._try(partial(known.list, self._namespace, self._closing), "listing its chunks")
        call_soon(self._loop, self._plan_next)

    def _do_tick(self, place: Place) -> None:
        self._try(self._look_for_change, "looking for a change of its directory")
        self._try(self._quota.refresh, "reading its ledger")
        if self._quota.known.excess:
            self.make_room_soon()
        if self._quota.known.unconfirmed or self._quota.used_bytes is None:
            self._request(self._slow, self._count, "counting its bytes")
        if self._namespace.read_only is None:
            self._try(partial(self._touch, place), "setting the access times of its files")
        call_soon(self._loop, partial(self._after, "tick", TICK_S, self._tick))

    def _look_for_change(self) -> None:
        if self._namespace.is_replaced():
            self._lost(f"{self._config.root_dir} was replaced by another directory or removed")
        elif self._namespace.is_writable_again(self._try_ledger):
            self._lost(f"{self._config.root_dir} can be written now")

    def _try_ledger(self) -> None:
        root_fd = self._namespace.root_fd
        ledger.SharedLedger(root_fd, partial(stat_file_system, root_fd)).close()

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
        return chunk_files.tree_bytes(self._namespace.root_fd, ".", self._closing)

    def _sweep(self) -> None:
        freed = self._count_freed()
        swept = self._evictor.sweep(orphans=False)
        freed(swept.bytes)
        for problem in swept.problems:
            self.warn("quarantine", problem)

    def _expire(self, ttl_s: float) -> None:
        expired = self._evictor.expire(ttl_s, self._count_freed())
        if expired is not None:
            self.evicted_chunks += expired.chunks

    def _evict(self) -> None:
        try:
            self._quota.refresh()
        except OSError as error:  # by what the ledger said last, each try would remove as much again
            if error.errno not in ledger.NO_ROOM:
                raise
        need = self._quota.known.excess
        if not need:
            return
        evicted = self._evictor.make_room(need, self._count_freed())
        if evicted is None:
            return
        self.evicted_chunks += evicted.chunks
        if evicted.failures:
            reasons = ", ".join(f"{os.strerror(n)} ({count})" for n, count in evicted.failures.items())
            self.warn("failures", f"files or directories could not be removed or read: {reasons}")
        self._pause_eviction_if_futile(need, evicted.bytes)

    def _pause_eviction_if_futile(self, need: int, removed: int) -> None:
        """Pause eviction for a while if it could remove nothing.

        While puts are under way there is no pause: their files take room, and can be evicted once complete.
        """
        first_s, most_s = EVICTION_PAUSE_S
        can_leave = removed or self._quota.known.leased > 0
        self._eviction_pause_s = 0.0 if can_leave else min(most_s, 2 * self._eviction_pause_s or first_s)
        self._eviction_paused_until = time.monotonic() + self._eviction_pause_s
        if self._eviction_pause_s == most_s and not self._is_warned:
            self._is_warned = True
            _log.warning(
                "%s: over the limit by %d bytes; no chunks are left to evict: free space, or raise max_bytes",
                self._config.root_dir,
                need,
            )

    def _count_freed(self) -> Freed:
        """Return a callback for the bytes that are removed from now on, called as often as there are some."""
        since = self._quota.mark()

        def freed(count: int) -> None:
            nonlocal since
            self.evicted_bytes += count
            since = self._quota.removed(count, since)

        return freed

    def _gone(self, data_dir: str, paths: Sequence[str]) -> None:
        known = self.known
        if data_dir == known.place.data_dir:
            keys = [key for path in paths if (key := key_of(path)) is not None]
            known.forget(keys)
            self._removed(keys)

    def _touch(self, place: Place) -> None:
        keys = self.recency.take()
        for first in range(0, len(keys), _TOUCHED_A_CALL):
            call = FileCall(place, keys[first : first + _TOUCHED_A_CALL])
            chunk_files.touch(call)
            if self._closing:
                return

    def _try(self, work: Callable[[], None], what: str) -> None:
        try:
            work()
        except Exception:
            if not self._closing:
                self.warn(what, f"{what} failed", exc_info=True)

    def warn(self, subject: str, text: str, *, exc_info: bool = False) -> None:
        """Write a line about the root to the log, unless there was one about the subject a moment ago."""
        added = self._log_limit.allow(subject, time.monotonic())
        if added is not None:
            _log.warning("%s: %s%s", self._config.root_dir, text, added, exc_info=exc_info)
