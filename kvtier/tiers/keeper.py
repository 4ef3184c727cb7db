"""Keeps a tier usable: opens it, resets it, and repeats what has failed until it succeeds."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from kvtier.core.backoff import Backoff, Chance
from kvtier.telemetry.lines import Seldom
from kvtier.tiers.base import SecondaryTier, TierContext
from kvtier.tiers.faults import require_fault, words_of

logger = logging.getLogger("kvtier.tiers")

AnyTier = SecondaryTier[Any]

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_GIVEN_UP_AFTER_S = 60.0
_REST_PAUSE_S = 0.02
_LINES_EVERY_S = 60.0


class Keeper:
    """Whether a tier can be used, and the task that sees to it that it can.

    A tier that could not be opened or reset is down: nothing is asked of it. It is opened, and reset,
    again and again with growing pauses. What it holds from before a reset that it has missed can not be
    told apart from what is good, so it is used only when a reset has succeeded after the last that was
    asked for.

    Args:
        name: the tier's name.
        tier: the tier.
        again: makes another object of it, for an opening after one that failed; None to take the same.
        tell: called with the reason when it is down, and with None when it is up again.
        chance: the source of chance.
        is_at_rest: says whether nothing of the tier is under way.

    Attributes:
        tier: the tier; another object after an opening that failed.
        era: set when the tier may be used, or is down; another one after each reset. A command belongs to
            the era in which it was submitted, and is not begun in a later one: its bytes would come back.
        first_era: the era before the first reset.
        down: why it can not be used, or None.
        is_open: whether it has to be closed.
    """

    def __init__(
        self,
        name: str,
        tier: AnyTier,
        again: Callable[[], AnyTier] | None,
        tell: Callable[[str | None], None],
        chance: Chance,
        is_at_rest: Callable[[], bool] = lambda: True,
    ) -> None:
        self.tier = tier
        self.era = self.first_era = anyio.Event()
        self.down: str | None = None
        self.is_open = False
        self._name = name
        self._again = again
        self._tell = tell
        self._deadline_s = tier.config.deadline_s
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, chance)
        self._seldom = Seldom(_LINES_EVERY_S)
        self._owed: deque[tuple[int, anyio.Event]] = deque()
        self._asked = anyio.Event()
        self._is_spent = False
        self._is_at_rest = is_at_rest
        self._last: tuple[int, anyio.Event] | None = None
        self._lost: str | None = None

    async def keep(self, context: TierContext) -> None:
        """Open the tier and do its resets, for as long as nobody cancels this."""
        while True:
            try:
                await self._restore(context)
            except BaseException as error:
                what = f"cannot be reset to epoch {self._owed[-1][0]}" if self.is_open else "cannot be opened"
                self._fail(f"{what}: {words_of(error, self.tier.config)}")
                require_fault(error)
                await anyio.sleep(self._backoff.next_s())
            else:
                self._recover()
                if self._lost is None:  # or it has been lost again meanwhile
                    await self._asked.wait()

    def ask_for_reset(self, epoch: int) -> None:
        """Begin a new era: the tier is reset before it is used again."""
        self.era = anyio.Event()
        self._last = epoch, self.era
        self._owed.append(self._last)
        if self.down is not None:
            self._let_go()
        self._wake_up()

    def open_anew(self, why: str) -> None:
        """Close the tier and open another object of it. What it was given for good is there again then."""
        if self.is_open and self._lost is None:
            self._lost = why
            self._wake_up()

    def _wake_up(self) -> None:
        asked, self._asked = self._asked, anyio.Event()
        asked.set()

    async def _close(self, why: str) -> None:
        """Close a tier that has lost what it has opened, when nothing of it is under way."""
        self._fail(f"is opened anew: {why}")
        while not self._is_at_rest():  # noqa: ASYNC110 (a moment, and once in the life of a tier)
            await anyio.sleep(_REST_PAUSE_S)
        self.is_open = False
        try:
            async with asyncio.timeout(self._deadline_s):
                await self.tier.aclose()
        except BaseException as error:
            require_fault(error)
            logger.warning("tier %s: closing failed: %s", self._name, words_of(error, self.tier.config))
        if self._last is not None and not self._owed:
            self._owed.append(self._last)  # what a reset has hidden must not be seen by who opens later

    async def _restore(self, context: TierContext) -> None:
        if self._lost is not None and self.is_open:
            await self._close(self._lost)
        self._lost = None
        if not self.is_open:
            if self._is_spent and self._again is not None:
                self.tier = self._again()
            self._is_spent = True
            await self._in_time(self.tier.open(context), "opened")
            self.is_open = True
            self.first_era.set()
        while self._owed:
            _, era = self._owed[0]
            await self._in_time(self.tier.reset(), "reset")
            self._owed.popleft()
            era.set()

    async def _in_time(self, work: Awaitable[None], verb: str) -> None:
        """Wait for it, but let nobody else wait for longer than a deadline."""
        reason = f"is not {verb} yet after {self._deadline_s:g} s"
        watch = asyncio.get_running_loop().call_later(self._deadline_s, self._fail, reason)
        try:
            async with asyncio.timeout(max(_GIVEN_UP_AFTER_S, self._deadline_s)):
                await work
        finally:
            watch.cancel()

    def _fail(self, reason: str) -> None:
        was_down, self.down = self.down is not None, reason
        self._let_go()
        added = self._seldom.lets("down", asyncio.get_running_loop().time())
        if not was_down or added is not None:
            logger.error(
                "tier %s is not used, and tried again later: it %s%s", self._name, reason, added or ""
            )
        if not was_down:
            self._tell(reason)

    def _recover(self) -> None:
        self._backoff.start_anew()
        if self.down is not None:
            self.down = None
            logger.warning("tier %s is used again", self._name)
            self._tell(None)

    def _let_go(self) -> None:
        """Let nobody wait for a tier that is down. One reset will do for all that it has missed."""
        self.first_era.set()
        for _, era in self._owed:
            era.set()
        while len(self._owed) > 1:
            self._owed.popleft()
