"""The requests that wait for other engines' chunks: tiers are asked again for them, a few at a time.

Whether the engine asks for such a request makes no difference: one that has no room for it does not.
"""

from __future__ import annotations

from math import inf

from kvtier._core.promotion.gets import Gets
from kvtier._core.promotion.holds import Holds
from kvtier._core.promotion.tier_order import TierOrder
from kvtier._core.requests import Request
from kvtier._core.shared import SharedState
from kvtier._core.transfers import SlotUse

MOST_POLLS = 2
"""Gets in flight for chunks that may not exist. A tier works on few gets at once, and others are for hits."""


class Waits:
    """Asks tiers again for what requests await, the one that is due longest first, and ends waits."""

    def __init__(self, shared: SharedState, holds: Holds, gets: Gets, tiers: TierOrder) -> None:
        self._shared = shared
        self._holds = holds
        self._gets = gets
        self._tiers = tiers

    def follow(self, now_s: float) -> list[Request]:
        """Ask again where that is due; return the requests for which something may be promoted now.

        Chunks held for requests that go on waiting are unpinned, since the rest may never come.
        """
        news: list[Request] = []
        due: list[Request] = []
        for request in list(self._holds.awaiting):
            wait = request.wait
            if wait is None or wait.has_news or not wait.keys:
                self.update(request, now_s)
                news.append(request)
            if wait is None or not wait.keys:
                continue
            if request.held:
                self._holds.release(request)
            if wait.again_s <= now_s < wait.ends_s:
                due.append(request)
            elif wait.again_s <= now_s:
                self.end(request, now_s)
                news.append(request)
        if due:
            self._poll(due, now_s)
        return news

    def update(self, request: Request, now_s: float) -> None:
        """Stop waiting for what was found; put a request that awaits nothing more in line again."""
        wait = request.wait
        if wait is not None:
            found = (self._shared.table.visible, request.located)
            wait.update(request.wanted, request.absent, found, now_s)
        if request in self._holds.awaiting and not request.awaits_any:
            self._holds.rejoin(request, now_s)

    def end(self, request: Request, now_s: float) -> None:
        """Answer MISS for awaited chunks that no tier has."""
        self.update(request, now_s)
        request.end_wait(now_s)
        self.update(request, now_s)

    def next_s(self) -> float:
        """Return when ``follow`` has something to do at the latest, whatever happens."""
        waits = [it.wait for it in self._holds.awaiting if it.wait is not None and it.wait.again_s < inf]
        if self._polls < MOST_POLLS:
            return min((wait.again_s for wait in waits), default=inf)
        return min((wait.ends_s for wait in waits), default=inf)

    @property
    def _polls(self) -> int:
        return sum(transfer.is_poll for transfer in self._shared.running)

    def _poll(self, due: list[Request], now_s: float) -> None:
        """Ask tiers for the first chunks of the requests, as far as polls may begin."""
        room = MOST_POLLS - self._polls
        for request in sorted(due, key=lambda it: it.wait.again_s if it.wait else inf):
            if room <= 0:
                return
            self.update(request, now_s)  # what it awaits may have been promoted for others
            if request.wait is None or not request.wait.keys:
                request.answers_stand = False
                continue
            if request.wait.is_over(now_s):
                request.addresses = ()  # its last question is for all
            expected = self._gets.expected[request.tiers]
            keys = request.wait.ask_again()
            if keys[0] not in expected:
                self._tiers.ask(keys, {request: None}, now_s, 0, SlotUse.NONE)
                room -= keys[0] in expected
            if keys[0] in expected:
                expected[keys[0]].waiters[request] = None
            else:
                request.wait.postpone(now_s)
