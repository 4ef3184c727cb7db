"""Requests that wait for other engines' chunks: when a wait begins, ends, and asks the tiers again.

Whether the engine asks for such a request makes no difference: one that has no room for it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from kvtier._core.promotion.gets import Gets
from kvtier._core.promotion.holds import Holds
from kvtier._core.promotion.wanted import Waiters
from kvtier._core.requests import Request
from kvtier._core.shared import SharedState
from kvtier._core.transfers import SlotUse
from kvtier.keys import OffloadKey

Ask = Callable[[Sequence[OffloadKey], Waiters, float, int, SlotUse], None]
"""``TierOrder.ask``."""

MOST_POLLS = 2
"""Gets in flight for chunks that may not exist. A tier works on few gets at once, and others are for hits."""


class Waits:
    """Asks tiers again for awaited chunks, first those that are overdue longest, and ends waits."""

    def __init__(self, shared: SharedState, holds: Holds, gets: Gets) -> None:
        self._shared = shared
        self._holds = holds
        self._gets = gets

    def mark_nowhere(self, request: Request, keys: Sequence[OffloadKey], now_s: float) -> None:
        """Answer MISS for keys that no tier has or could give, unless the request waits for them."""
        if (wait := request.wait) is None:
            request.mark_absent(keys)
            return
        had_any, missed = request.awaits_any, wait.await_missing(keys, now_s)
        request.mark_absent(missed, "not_arrived" if had_any and wait.outcome == "in_vain" else "")
        if wait.keys and wait.until_s is not None:
            self._holds.leave_line(request, wait.until_s)

    def follow(self, now_s: float, ask: Ask) -> list[Request]:
        """Ask again where that is due; return the requests for which something may be promoted now.

        Chunks held for requests that go on waiting are unpinned, since the rest may never come.
        """
        news: list[Request] = []
        due: list[Request] = []
        for request in list(self._holds.awaiting):
            wait = request.wait
            if wait is None or not request.answers_stand or not wait.keys:
                self.update(request, now_s)
                news.append(request)
            if wait is None or not wait.keys:
                continue
            if request.held:
                self._holds.release(request)
            if wait.again_s <= now_s < wait.ends_s:
                due.append(request)
            elif wait.again_s <= now_s:
                self.give_up(request, now_s)
                news.append(request)
        if due:
            self._poll(due, now_s, ask)
        return news

    def update(self, request: Request, now_s: float) -> None:
        """Stop waiting for found chunks; put a request that awaits nothing more in line again."""
        wait = request.wait
        if wait is not None:
            found = (self._shared.table.visible, request.located)
            wait.update(request.wanted, request.absent, found, now_s)
        if request in self._holds.awaiting and not request.awaits_any:
            self._holds.rejoin(request, now_s)

    def give_up(self, request: Request, now_s: float) -> None:
        """Answer MISS for awaited chunks that no tier has."""
        self.update(request, now_s)
        if (wait := request.wait) is not None:
            left = wait.give_up(now_s)
            request.mark_absent(left, "not_arrived" if wait.outcome == "in_vain" else "")
        self.update(request, now_s)

    def close(self, request: Request, outcome: str = "") -> None:
        """End a request's wait for good, and count its outcome: by default, whether its chunks arrived."""
        wait, request.wait = request.wait, None
        if wait is not None and wait.has_waited:
            lacks_any = any(key not in self._shared.table.visible for key in wait.keys)
            known = wait.outcome or ("gave_up" if lacks_any else "arrived")
            self._shared.counts["waits", outcome or known] += 1

    def next_s(self) -> float:
        """Return when ``follow`` has something to do at the latest, whatever happens."""
        waits = [it.wait for it in self._holds.awaiting if it.wait is not None and it.wait.again_s < inf]
        if self._polls < MOST_POLLS:
            return min((wait.again_s for wait in waits), default=inf)
        return min((wait.ends_s for wait in waits), default=inf)

    @property
    def _polls(self) -> int:
        return sum(transfer.is_poll for transfer in self._shared.running)

    def _poll(self, due: list[Request], now_s: float, ask: Ask) -> None:
        """Ask tiers for the first chunks of the requests, as far as polls may begin."""
        room = MOST_POLLS - self._polls
        for request in sorted(due, key=lambda it: it.wait.again_s if it.wait else inf):
            if room <= 0:
                return
            self.update(request, now_s)  # its chunks may have been promoted for others
            if request.wait is None or not request.wait.keys:
                request.note_change()
                continue
            if request.wait.is_over(now_s):
                request.addresses = ()  # its last question is for all
            expected = self._gets.expected[request.tiers]
            keys = request.wait.ask_again()
            if keys[0] not in expected:
                ask(keys, {request: None}, now_s, 0, SlotUse.NONE)
                room -= keys[0] in expected
            if keys[0] in expected:
                expected[keys[0]].waiters[request] = None
            else:
                request.wait.postpone(now_s)
