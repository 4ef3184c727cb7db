"""A clock that stands still while its event loop is blocked, so a blocked loop costs no tier its deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kvtier._log import GuardedLogger, LogLimit

logger = GuardedLogger("kvtier.tiers")

_TICK_S = 0.1
_MAX_STEP_S = 0.25  # maximum advance of the clock between two ticks
_BLOCKED_S = 1.0
_LOG_EVERY_S = 10.0
_PRECISION_S = 1e-6


class LoopClock:
    """The time of the running event loop, minus the time it was blocked since ``start``."""

    def __init__(self) -> None:
        self.blocks = 0  # times that the loop was blocked for a second or longer
        self._lost_s = 0.0
        self._ticked_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._log_limit = LogLimit(_LOG_EVERY_S)

    def now(self) -> float:
        now_s = asyncio.get_running_loop().time()
        if self._ticked_s is not None:
            now_s = min(now_s, self._ticked_s + _MAX_STEP_S)
        return now_s - self._lost_s

    def start(self) -> None:
        """Watch the running event loop until ``stop``."""
        loop = asyncio.get_running_loop()
        self._ticked_s = loop.time()
        self._timer = loop.call_later(_TICK_S, self._tick, self._ticked_s)

    def stop(self) -> None:
        """Continue as an ordinary clock."""
        self._ticked_s = None
        if self._timer is not None:
            self._timer.cancel()

    def call_at(self, when_s: float, callback: Callable[[], object]) -> Callable[[], object]:
        """Call ``callback`` on the running event loop at a time of this clock. Return its canceller."""
        loop = asyncio.get_running_loop()
        handle: asyncio.TimerHandle

        def fire() -> None:
            nonlocal handle
            if (left_s := when_s - self.now()) > _PRECISION_S:  # the loop was blocked meanwhile
                handle = loop.call_later(left_s, fire)
            else:
                callback()

        handle = loop.call_later(max(0.0, when_s - self.now()), fire)
        return lambda: handle.cancel()

    @asynccontextmanager
    async def timeout_at(self, when_s: float) -> AsyncIterator[asyncio.Timeout]:
        """Work as ``asyncio.timeout_at``, on this clock."""
        async with asyncio.timeout(None) as timeout:
            cancel = self.call_at(when_s, lambda: timeout.reschedule(0.0))
            try:
                yield timeout
            finally:
                cancel()

    def _tick(self, last_s: float) -> None:
        now_s = asyncio.get_running_loop().time()
        passed_s = now_s - last_s
        self._lost_s += max(0.0, passed_s - _MAX_STEP_S)
        if passed_s >= _BLOCKED_S:
            self.blocks += 1
            if (suffix := self._log_limit.allow("", now_s)) is not None:
                text = "the event loop was blocked for %.1f s%s; tiers are not charged; compute in a thread"
                logger.warning(text, passed_s, suffix)
        self.start()
