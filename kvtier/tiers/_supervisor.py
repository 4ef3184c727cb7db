"""Supervises one tier: opens, resets and restarts it, and retries each step until it succeeds."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio

from kvtier._core.tiers.backoff import Backoff, RandomSource
from kvtier._log import GuardedLogger, LogLimit
from kvtier.tiers._base import SecondaryTier, TierContext
from kvtier.tiers._faults import require_fault, words_of
from kvtier.tiers._loop_clock import LoopClock

logger = GuardedLogger("kvtier.tiers")

AnyTier = SecondaryTier[Any]

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_STEP_LIMIT_S = 60.0
_IDLE_POLL_S = 0.02
_LOG_EVERY_S = 60.0


class NamedTier:
    """The name of a tier in logs and metrics, and the factory of its object for each opening."""

    def __init__(self, name: str, make: Callable[[], AnyTier]) -> None:
        self.name = name
        self.make = make
        self.tier = make()  # the first object, not opened yet


class Epoch:
    """The time between two resets of one tier.

    A command belongs to the epoch of its submission. It must not start in a later one: its bytes would come
    back after the reset.
    """

    def __init__(self, number: int) -> None:
        self.number = number  # number of earlier resets
        # Set once the tier is usable in this epoch or down, or the epoch is over.
        self.settled = anyio.Event()


class TierSupervisor:
    """Keeps one tier usable: a task that opens, resets and restarts it.

    A tier that could not be opened or reset is down and gets no commands; the supervisor retries with growing
    pauses. Chunks from before a missed reset look valid, so the tier stays down until a reset succeeds that
    started after the last request. After a failed reset it is opened again first, because a tier that is down
    gets no command that would notice another primary, new credentials or a new mount.

    ``on_change`` gets the reason when the tier goes down, and None when it is up in an epoch. ``is_idle``
    returns whether no command of the tier is in flight.
    """

    def __init__(
        self,
        named: NamedTier,
        on_change: Callable[[str | None], None],
        chance: RandomSource,
        clock: LoopClock,
        is_idle: Callable[[], bool],
    ) -> None:
        self.tier = named.tier  # a new one at each later opening
        self.epoch = Epoch(0)  # the epoch of commands submitted now
        self.down: str | None = None  # why the tier cannot be used
        self.is_open = False  # whether it has to be closed
        self._name = named.name
        self._make = named.make
        self._on_change = on_change
        self._deadline_s = named.tier.config.deadline_s
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, chance)
        self._log_limit = LogLimit(_LOG_EVERY_S)
        self._was_opened = False  # whether ``open`` was ever called
        self._is_reset = True  # whether the tier is in the current epoch
        self._requested = anyio.Event()
        self._is_idle = is_idle
        self._clock = clock
        self._restart_reason: str | None = None
        self._reopened_s = -math.inf  # when the tier was last closed after a loss

    async def run(self, context: TierContext) -> None:
        """Open, reset and restart the tier until this task is cancelled."""
        try:
            while True:
                try:
                    await self._bring_up(context)
                except _StepError as error:
                    self._go_down(str(error))
                    await anyio.sleep(self._backoff.next_s())
                else:
                    self._come_up()
                    if self._restart_reason is None:  # a restart may be requested already
                        await self._requested.wait()
        finally:
            self._release_waiters()

    async def close(self, limit_s: float) -> None:
        """Close the tier if it is open, and wait at most ``limit_s`` seconds."""
        if not self.is_open:
            return
        self.is_open = False
        with anyio.move_on_after(limit_s) as scope:
            try:
                await self.tier.aclose()
            except BaseException as error:
                require_fault(error)
                # Without the traceback: it would repeat the error, which may contain a secret.
                logger.error("tier %s: closing failed: %s", self._name, words_of(error, self.tier.config))
        if scope.cancelled_caught:
            logger.error("tier %s: did not close within %g s; abandoned", self._name, limit_s)

    def request_reset(self, number: int) -> None:
        """Start epoch ``number``: the tier is reset before it is used again."""
        self.epoch.settled.set()  # refuses commands that wait for this epoch
        self.epoch = Epoch(number)
        self._is_reset = False
        if self.down is not None:
            self.epoch.settled.set()
        self._wake_up()

    def request_restart(self, reason: str) -> None:
        """Close the tier and open a new object, which finds durable chunks again."""
        if self._restart_reason is None:
            self._restart_reason = reason
            self._wake_up()

    def _wake_up(self) -> None:
        requested, self._requested = self._requested, anyio.Event()
        requested.set()

    async def _bring_up(self, context: TierContext) -> None:
        """Bring the tier to the latest epoch; restart and open it first if needed."""
        if self._restart_reason is not None and self.is_open:
            await self._close_lost(self._restart_reason)
        self._restart_reason = None
        if not self.is_open:
            await self._step(partial(self._open, context), "cannot be opened", "is not opened yet")
            self.is_open = True
        while not self._is_reset:
            epoch = self.epoch
            failure = f"cannot be reset to epoch {epoch.number}"
            try:
                await self._step(self.tier.reset, failure, "is not reset yet")
            except _StepError as error:
                self._restart_reason = str(error)
                raise
            self._is_reset = self.epoch is epoch  # otherwise another reset was requested meanwhile
        self.epoch.settled.set()

    async def _open(self, context: TierContext) -> None:
        if self._was_opened:
            self.tier = self._make()
        self._was_opened = True
        await self.tier.open(context)

    async def _close_lost(self, reason: str) -> None:
        """Close a tier that lost its backend, when no command is in flight.

        A tier that is lost again and again is closed at most once in ``_FIRST_PAUSE_S``.
        """
        self._go_down(f"is being reopened: {reason}")
        await asyncio.sleep(0)  # the loop posts the change first: a closing tier may block it
        while not self._is_idle():  # noqa: ASYNC110 (short, and rare in the life of a tier)
            await anyio.sleep(_IDLE_POLL_S)
        await anyio.sleep(max(0.0, self._reopened_s + _FIRST_PAUSE_S - self._clock.now()))
        self._reopened_s = self._clock.now()
        await self.close(self._deadline_s)
        self._is_reset = not self.epoch.number  # a new object must not see chunks that a reset hid

    async def _step(self, work: Callable[[], Awaitable[None]], failure: str, slow: str) -> None:
        """Run one step; after ``deadline_s`` the tier is down. _StepError if it fails or takes too long."""
        reason = f"{slow} after {self._deadline_s:g} s"
        began_s = self._clock.now()
        unwatch = self._clock.call_at(began_s + self._deadline_s, partial(self._go_down, reason))
        try:
            async with self._clock.timeout_at(began_s + max(_STEP_LIMIT_S, self._deadline_s)):
                await work()
        except BaseException as error:
            require_fault(error)
            raise _StepError(f"{failure}: {words_of(error, self.tier.config)}") from None
        finally:
            unwatch()

    def _go_down(self, reason: str) -> None:
        was_down, self.down = self.down is not None, reason
        self.epoch.settled.set()
        suffix = self._log_limit.allow("down", self._clock.now())
        if not was_down or suffix is not None:
            logger.error("tier %s disabled, retrying: it %s%s", self._name, reason, suffix or "")
        if not was_down:
            self._on_change(reason)

    def _come_up(self) -> None:
        self._backoff.reset()
        self.down = None
        self._on_change(None)

    def _release_waiters(self) -> None:
        """Release waiting commands at shutdown; log a missed reset."""
        if not self._is_reset:
            logger.error(
                "tier %s: shut down before its reset to epoch %d ended: the next engine may get older chunks",
                self._name,
                self.epoch.number,
            )
        self.epoch.settled.set()


class _StepError(Exception):
    """A step failed; the text names the step and the cause."""
