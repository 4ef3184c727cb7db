"""Promotes chunks of the tiers for requests that wait, each in its turn."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, dropwhile, takewhile

from kvtier._core.chunks import Chunk
from kvtier._core.messages import Answer, GetEnded
from kvtier._core.promotion.gets import Gets, select
from kvtier._core.promotion.holds import Holds
from kvtier._core.promotion.tier_order import TierOrder
from kvtier._core.promotion.waits import Waits
from kvtier._core.promotion.wanted import Waiters, allowed_tiers, loading, of_use, refresh_wanted
from kvtier._core.requests import Request
from kvtier._core.shared import Keys, SharedState
from kvtier._core.transfers import SlotUse, Transfer
from kvtier.keys import OffloadKey, group_index


class Promotions:
    """Turns what requests want into gets, and the ends of gets into further ones."""

    def __init__(self, shared: SharedState) -> None:
        self.holds = Holds(shared)
        self._shared = shared
        self._windowed = shared.windowed
        self._gets = Gets(shared, self.holds)
        self.land_verified = self._gets.land_verified
        self.waits = Waits(shared, self.holds, self._gets)
        self._tiers = TierOrder(shared, self.holds, self._gets, self.waits)
        self._refusals: list[str | None] = []  # per tier, in the last round
        self._has_new_refusals = False
        self._tried: tuple[Request | None, int] = (None, 0)  # the last first in line, and ``holds.changes``

    def start_round(self, now_s: float) -> None:
        """Note whether a tier began to accept or to refuse gets since the last round."""
        refusals = [status.get_refusal(now_s) for status in self._shared.tiers]
        self._has_new_refusals, self._refusals = refusals != self._refusals, refusals

    def follow_waits(self, now_s: float) -> list[Request]:
        """Ask again for awaited chunks; return the requests for which something may be promoted now."""
        return self.waits.follow(now_s, self._tiers.ask)

    def promote_wanted(self, request: Request, now_s: float) -> None:
        """Start gets of the keys that the request wants, as far as the budget goes.

        Nothing is evicted for a key while the location of an earlier one is unknown, and nothing is promoted
        behind a key that no tier has.
        """
        if request.answers_stand and (request.awaits_any or self._is_blocked(request)):
            return
        if request.wait is not None and request.has_news:
            self.waits.update(request, now_s)
        expected, visible = self._gets.expected[request.tiers], self._shared.table.visible
        located, wait = request.located, request.wait if request.awaits_any else None
        known: list[OffloadKey] = []
        unknown: list[OffloadKey] = []
        unsure = unsure_before = False
        absent = request.absent
        stand = not self._windowed and (not absent or absent.isdisjoint(request.wanted))
        for key in refresh_wanted(request, self._windowed):
            if key in visible:
                stand = False
                continue
            transfer = expected.get(key)
            if transfer is not None and not self._has_to_decide(request, transfer):
                transfer.waiters[request] = None
            elif wait is not None and (key not in located or key in wait.promoted):
                unsure = True
                continue
            elif key not in located:
                unsure_before = unsure_before if unknown else unsure
                unknown.append(key)
            elif not unsure or self._is_windowed(key):
                known.append(key)
            unsure = unsure or not (key in located or self._is_windowed(key))
        request.answers_stand, request.has_news = stand, False
        if known:
            self._get_for(request, known, now_s)
        if unknown:
            slot_use = SlotUse.FREE if unsure_before else SlotUse.EVICT
            front = [key for key in unknown if not self._is_windowed(key)] if self._windowed else unknown
            self._tiers.ask(front, {request: None}, now_s, 0, slot_use)
            if self._windowed and (not front or front[0] in expected):
                # Else the prefix ends sooner, or that is not decided yet.
                windowed = [key for key in unknown if self._is_windowed(key)]
                self._tiers.ask(windowed, {request: None}, now_s, 0, SlotUse.NONE)
        if wait is not None:
            wait.promoted.update(key for key in known if key in expected)
        request.blocked = next((key for key in known if key not in expected), None)

    def _is_blocked(self, request: Request) -> bool:
        """Return whether a request whose answers stand can get nothing: all is in flight, or lacks a slot.

        Only its first keys are examined. Many requests can wait, each for thousands of keys.
        """
        table, holds, key = self._shared.table, self.holds, request.blocked
        if self._has_new_refusals or self._shared.gate.is_active or request.wanted[0] in table.visible:
            return False
        if key is None:
            return True
        if key in table.visible or key in self._gets.expected[request.tiers]:
            return False
        has_room = holds.room and (table.room or table.evictable)
        return not has_room and (holds.first is not request or self._tried == (request, holds.changes))

    def locate_wanted(self, request: Request, now_s: float) -> None:
        """Look for the keys that the request wants, without bringing any of them."""
        expected, visible = self._gets.expected[request.tiers], self._shared.table.visible
        unknown: list[OffloadKey] = []
        for key in dict.fromkeys(request.wanted):
            if key in visible or key in request.located or key in request.absent:
                continue
            if (transfer := expected.get(key)) is not None:
                transfer.waiters[request] = None
            else:
                unknown.append(key)
        self._tiers.ask(unknown, {request: None}, now_s, 0, SlotUse.NONE)

    def get_ended(self, event: GetEnded, now_s: float) -> list[Chunk]:
        """Process the end of a get, start those that follow, and return the chunks that it promoted."""
        transfer, answers, waiters, copied = self._gets.end_get(event, now_s)
        if waiters:
            self._ask_next_tier(transfer, answers, waiters, now_s)
        return copied

    def give_up_overdue(self, now_s: float) -> None:
        """Stop waiting for overdue gets: their keys are looked for elsewhere."""
        for transfer in self._shared.overdue(now_s):
            if not transfer.is_put:
                waiters = self._gets.give_up(transfer, now_s)
                keys = _drop_located_later(transfer.keys, waiters, transfer.tier)
                self._tiers.ask(keys, waiters, now_s, transfer.tier + 1, transfer.slot_use)

    def reset(self) -> None:
        """Doom what is being promoted, and unpin what is held."""
        self._gets.reset()
        self.holds.reset()

    def _ask_next_tier(
        self, transfer: Transfer, answers: Sequence[Answer], waiters: Waiters, now_s: float
    ) -> None:
        """Ask the next tier for the keys that this one lacks; get located chunks that waiters can use."""
        missing = select(transfer.keys, answers, Answer.MISSING)
        located = select(transfer.keys, answers, Answer.LOCATED)
        for request in waiters:
            request.located.update(dict.fromkeys(located, transfer.tier))
        if all(request.is_prefetch for request in waiters):
            missing = self._not_asked_by_others(missing, waiters)
        missing = _drop_located_later(missing, waiters, transfer.tier)
        self._tiers.ask(missing, waiters, now_s, transfer.tier + 1, transfer.slot_use)
        waiters = loading(waiters)
        if waiters and transfer.slot_use is SlotUse.EVICT:
            visible = self._shared.table.visible
            run = [key for key in _run_after_copied(transfer.keys, answers) if key not in visible]
            run = self._tiers.obtainable(of_use(run, waiters, self._windowed), waiters, now_s)
            self._tiers.get_located(run, waiters, now_s)
            first = self.holds.first
            others = chain(self.holds.pending, self.holds.awaiting)
            if first in waiters and not any(other.held for other in others if other is not first):
                self._trim_first(first, run)  # no other request can make way for it

    def _not_asked_by_others(self, keys: list[OffloadKey], waiters: Waiters) -> list[OffloadKey]:
        """Return the keys of prefetches that no request's get is to tell them about, or has told them."""
        expected = self._gets.expected[allowed_tiers(waiters)]
        others = [expected.get(key) for key in keys]
        keys = [
            key
            for key, get in zip(keys, others, strict=True)
            if get is None or not waiters.keys() <= get.waiters.keys()
        ]
        useful = of_use(keys, waiters, self._windowed)
        for request in waiters:  # else it asks for them again once earlier ones are stored
            request.mark_absent([key for key in keys if key not in useful])
        return useful

    def _has_to_decide(self, request: Request, transfer: Transfer) -> bool:
        """Return whether a request for keys of a get has to pass the gate: none of its waiters did."""
        if request.is_prefetch or not self._shared.gate.is_active:
            return False
        return all(waiter.is_prefetch for waiter in transfer.waiters)

    def _is_windowed(self, key: OffloadKey) -> bool:
        return bool(self._windowed) and group_index(key) in self._windowed

    def _get_for(self, request: Request, keys: list[OffloadKey], now_s: float) -> None:
        """Get located keys for a request in its turn. Whoever is first in line gets all it can."""
        is_first = not request.awaits_any and self.holds.first in (None, request)
        keys = self._tiers.obtainable(keys, {request: None}, now_s)
        if is_first:
            self.holds.free_for_first(request, len(keys))
        self._tiers.get_located(keys, {request: None}, now_s)
        if is_first:
            self._trim_first(request, keys)
            self._tried = (request, self.holds.changes)

    def _trim_first(self, first: Request, keys: Keys) -> None:
        """Drop keys of the request first in line that cannot fit, to avoid a deadlock.

        Gets for other requests are awaited: their slots can be evicted once the chunks are there.
        """
        expected = self._gets.expected[first.tiers]
        left = [key for key in keys if key not in expected]
        under_way = [
            transfer
            for transfer in self._shared.running
            if transfer.waiters and transfer.chunks and not transfer.is_put
        ]
        if left and all(first in transfer.waiters for transfer in under_way):
            first.mark_absent(left, self._shared.short_of("budget"))


def _drop_located_later(keys: Keys, waiters: Waiters, tier: int) -> list[OffloadKey]:
    """Return the keys to look for in the next tiers, without those that all waiters located in a later one.

    The waiters' answers change if there are such keys.
    """
    left = [key for key in keys if any(request.located.get(key, tier) <= tier for request in waiters)]
    for request in waiters if len(left) < len(keys) else ():
        request.note_change()
    return left


def _run_after_copied(keys: Keys, answers: Sequence[Answer]) -> list[OffloadKey]:
    """Return the located keys that directly follow the copied ones at the front."""
    rest = dropwhile(lambda pair: pair[1] is Answer.COPIED, zip(keys, answers, strict=True))
    return [key for key, _ in takewhile(lambda pair: pair[1] is Answer.LOCATED, rest)]
