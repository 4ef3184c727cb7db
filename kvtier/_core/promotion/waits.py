"""Requests that wait: their deadlines, and chunks that another engine still computes or stores.

A chunk that no tier has yet is no miss until the request's time is over. Tiers are asked for it again, after
pauses that grow with the time since the last arrival. Whether the engine asks for such a request makes no
difference: one that has no room for it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import islice
from math import inf

from kvtier._core.promotion.gets import Gets
from kvtier._core.promotion.holds import Holds
from kvtier._core.promotion.wanted import Waiters
from kvtier._core.requests import Request
from kvtier._core.shared import SharedState
from kvtier._core.states import RequestEvent
from kvtier._core.transfers import SlotUse
from kvtier.keys import OffloadKey

Ask = Callable[[Sequence[OffloadKey], Waiters, float, int, SlotUse], None]
"""``TierOrder.ask``."""

MOST_POLLS = 2
"""Gets in flight for chunks that may not exist. A tier works on few gets at once, and others are for hits."""

FIRST_PAUSE_S = 0.02
"""Least seconds between an answer that a chunk is nowhere and the next question."""

LONGEST_PAUSE_S = 0.25

PAUSE_SHARE = 1 / 8
"""The same, as a share of the time since the last arrival: it bounds how late the next arrival is noticed."""

FEW_KEYS = 8
"""Chunks asked for again at once: the first ones. Later chunks are of no use without them."""

MOST_KEYS = 64
"""The same, directly after an arrival, when more chunks are likely to be there."""

LAST_S = 1.0
"""Seconds after the end of a request's time within which tiers can be asked for the last time."""


class Wait:
    """The wait of one request. It lasts ``longest_s`` seconds from the first chunk that is deferred."""

    def __init__(self, longest_s: float) -> None:
        self.until_s: float | None = None  # when its time is over; None before it begins
        self.keys: dict[OffloadKey, None] = {}  # keys that no tier had, in the order of the request's lookups
        self.again_s = inf  # when tiers are to be asked for them again; infinite while they are
        self.has_waited = False  # ``keys`` was not empty at some time
        self.outcome = ""  # a word of ``reasons.WAITS``; empty before the end, and if all arrived
        self.leading = 0  # chunks found by the request's last scan and not held for it
        self.promoted: set[OffloadKey] = set()  # promoted while it waits; again at the end if evicted since
        self._longest_s = longest_s
        self._news_s = 0.0  # when it began, or the last chunk arrived
        self._most = FEW_KEYS
        self._wanted: Collection[OffloadKey] = ()
        # Keys that tiers were asked for: whether all lack them. A tier may fail to answer, or to return them.
        self._lacking: dict[OffloadKey, bool] = {}

    @property
    def ends_s(self) -> float:
        """Return when it ends even if no tier could be asked for the last time."""
        return -inf if self.until_s is None else self.until_s + LAST_S

    def start_clock(self, now_s: float) -> None:
        """Start its time, unless it has started."""
        if self.until_s is None:
            self.until_s, self._news_s = now_s + self._longest_s, now_s

    def is_over(self, now_s: float) -> bool:
        """Return whether the next answer is the last one."""
        return self.until_s is None or now_s >= self.until_s

    def note_answer(
        self, keys: Sequence[OffloadKey], missing: Sequence[OffloadKey], now_s: float, *, failed: bool
    ) -> None:
        """Note a tier's answer for ``keys``. Chunks that a tier failed to return are not awaited."""
        self.postpone(now_s)
        for key in keys if failed else missing:
            if key in self._wanted or key in self._lacking:
                self._lacking[key] = not failed and self._lacking.get(key, True)

    def await_missing(self, keys: Sequence[OffloadKey], now_s: float) -> list[OffloadKey]:
        """Wait for the ``keys`` that tiers report missing; return the others.

        If the others include an awaited key, the wait ends and all keys return: the prompt has a gap there.
        """
        is_over = self.is_over(now_s)
        awaited = dict.fromkeys(key for key in keys if self._lacking.pop(key, False) and not is_over)
        missed = [key for key in keys if key not in awaited]
        if any(key in self.keys for key in missed):
            self.give_up(now_s)
            return [*missed, *awaited]
        if awaited:
            self.has_waited = True
            self.keys.update(awaited)
            self.postpone(now_s)
        return missed

    def update(
        self,
        wanted: Sequence[OffloadKey],
        absent: Collection[OffloadKey],
        found: Sequence[Collection[OffloadKey]],
        now_s: float,
    ) -> None:
        """Drop keys that were found, are no longer wanted, or follow an absent one."""
        self._wanted = frozenset(wanted)
        left: dict[OffloadKey, None] = {}
        for key in wanted if self.keys else ():
            if key in absent:
                break
            if key in self.keys and not any(key in keys for keys in found):
                left[key] = None
        if len(left) < len(self.keys):
            self._news_s, self._most, self.again_s = now_s, MOST_KEYS, now_s
            if not left and not all(any(key in keys for keys in found) for key in self.keys):
                self.outcome = self.outcome or "gave_up"
        self.keys = left

    def ask_again(self) -> list[OffloadKey]:
        """Return the chunks to ask tiers for now. Call ``postpone`` if no tier can be asked."""
        self._most, most = FEW_KEYS, self._most
        self.again_s = inf
        return list(islice(self.keys, most))

    def postpone(self, now_s: float) -> None:
        """Delay the next question by a pause, or to the end of the time if that is earlier."""
        pause_s = PAUSE_SHARE * (now_s - self._news_s)
        self.again_s = now_s + min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, pause_s))
        if self.until_s is not None and now_s < self.until_s:
            self.again_s = min(self.again_s, self.until_s)

    def give_up(self, now_s: float) -> list[OffloadKey]:
        left, self.keys = list(self.keys), {}
        if left:
            self.outcome = "in_vain" if self.is_over(now_s) else "gave_up"
        self.until_s = -inf
        return left


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

        Chunks held for requests that go on waiting are unpinned: their next chunks, too, need the budget.
        """
        news: list[Request] = []
        due: list[Request] = []
        for request in list(self._holds.awaiting):
            wait = request.wait
            if wait is None or request.has_news or not wait.keys:
                self.update(request, now_s)
                news.append(request)
            if wait is None or not wait.keys:
                continue
            if wait.again_s <= now_s < wait.ends_s:
                due.append(request)
            elif wait.again_s <= now_s:
                self.give_up(request, now_s)
                news.append(request)
        if due:
            self._poll(due, now_s, ask)
        self._holds.release_awaiting()
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

    def expire(self, now_s: float) -> None:
        """End the waiting of requests whose deadlines have passed. Their pending keys are misses."""
        for request in [*self._holds.pending, *self._holds.awaiting]:
            if request.deadline_s is None or request.deadline_s > now_s:
                continue
            if request.wait is not None:
                self.give_up(request, now_s)
            if request.is_waiting:
                request.move(RequestEvent.OVERDUE)
                if not request.is_prefetch:
                    self._shared.counts["expired",] += 1
                for transfer in self._shared.running:
                    if request in transfer.waiters:
                        self._gets.record([request], transfer.tier, transfer.keys, "deadline")
            self._holds.unhold(request)

    def close(self, request: Request, outcome: str = "") -> None:
        """End a request's wait for good, and count its outcome: by default, whether its chunks arrived."""
        wait, request.wait = request.wait, None
        if wait is not None and wait.has_waited:
            lacks_any = any(key not in self._shared.table.visible for key in wait.keys)
            known = wait.outcome or ("gave_up" if lacks_any else "arrived")
            self._shared.counts["waits", outcome or known] += 1

    def next_s(self) -> float:
        """Return when ``expire`` or ``follow`` has something to do at the latest, whatever happens."""
        waiting, may_poll = [*self._holds.pending, *self._holds.awaiting], self._polls < MOST_POLLS
        times = [request.deadline_s for request in waiting if request.deadline_s is not None]
        waits = [request.wait for request in self._holds.awaiting if request.wait is not None]
        times += [wait.again_s if may_poll else wait.ends_s for wait in waits if wait.again_s < inf]
        return min(times, default=inf)

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
