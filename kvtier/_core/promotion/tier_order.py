"""Asks the tiers in their order for keys, each if it may be asked and is quicker than computing."""

from __future__ import annotations

from collections import Counter
from enum import Enum, auto
from itertools import groupby

from kvtier._core.promotion.gets import Gets
from kvtier._core.promotion.holds import Holds
from kvtier._core.promotion.waits import Waits
from kvtier._core.promotion.wanted import Waiters, allowed_tiers, loading, of_use
from kvtier._core.requests import Request
from kvtier._core.shared import Keys, SharedState
from kvtier._core.transfers import SlotUse
from kvtier.keys import GROUP_BYTES, OffloadKey, group_index


class Decision(Enum):
    """A decision about keys that a tier may have."""

    LOAD = auto()
    COMPUTE = auto()  # computing them is quicker
    WAIT = auto()  # the next round decides


class TierOrder:
    """Chooses the tier for each get. If there is none, the keys are absent for the waiting requests."""

    def __init__(self, shared: SharedState, holds: Holds, gets: Gets, waits: Waits) -> None:
        self._shared = shared
        self._holds = holds
        self._gets = gets
        self._waits = waits

    def ask(self, keys: Keys, waiters: Waiters, now_s: float, first_tier: int, slot_use: SlotUse) -> None:
        """Look for keys in the next tier that may be asked; if there is none, they are absent."""
        shared = self._shared
        keys = [key for key in keys if key not in shared.table.visible]
        if not keys or not waiters:
            return
        if all(request.locates for request in waiters):
            slot_use = SlotUse.NONE
        allowed = allowed_tiers(waiters)
        for tier in range(first_tier, len(shared.tiers)):
            status = shared.tiers[tier]
            is_allowed = allowed is None or tier in allowed or status.in_place
            closed = status.get_refusal(now_s) if is_allowed else "filter"
            if status.in_place:
                keys = keys if closed else self._ask_in_place(tier, keys, waiters, now_s, slot_use)
                if not keys:
                    return
                continue
            slots = min(len(keys), self._holds.room, shared.table.room)
            decision = Decision.LOAD
            if closed is None:
                gets = 1 if slots == len(keys) and not shared.windowed else 2
                decision = self._decide(tier, keys, keys, gets, waiters, now_s, may_wait=not first_tier)
            if decision is Decision.WAIT:
                return
            if closed is None and decision is Decision.LOAD:
                count = slots if slot_use else 0
                self._gets.start_get(tier, keys, count, waiters, now_s).slot_use = slot_use
                return
            self._skip(tier, keys, waiters, closed or "gate")
            if decision is Decision.COMPUTE:
                if slot_use or group_index(keys[0]) in shared.windowed:
                    self._probe(tier, keys, now_s)
                locating = dict.fromkeys(request for request in waiters if request.locates)
                self.ask(keys, locating, now_s, tier, SlotUse.NONE)
                waiters = loading(waiters)
        for request in waiters:
            self._waits.mark_nowhere(request, keys, now_s)

    def _ask_in_place(
        self, tier: int, keys: Keys, waiters: Waiters, now_s: float, slot_use: SlotUse
    ) -> list[OffloadKey]:
        """Get the adopted chunks among keys; return the other keys."""
        found, others = self._shared.table.split_adopted(keys)
        if found:
            count = min(len(found), self._holds.room) if slot_use else 0
            self._gets.start_get(tier, found, count, waiters, now_s).slot_use = slot_use
        return others

    def obtainable(self, keys: list[OffloadKey], waiters: Waiters, now_s: float) -> list[OffloadKey]:
        """Return the located keys whose tiers may be asked now; the others are looked for in later tiers."""
        if not keys:
            return keys
        refused: set[OffloadKey] = set()
        for tier, found in _by_tier(keys, next(iter(waiters)).located):
            status = self._shared.tiers[tier]
            reason = status.get_refusal(now_s)
            if status.in_place and not reason:  # their slots may hold other chunks by now
                gone = self._shared.table.split_adopted(found)[1]
                refused.update(gone)
                self.ask(gone, waiters, now_s, tier + 1, SlotUse.NONE)
                continue
            decision = Decision.LOAD if reason else self._decide(tier, found, keys, 1, waiters, now_s)
            if reason or decision is not Decision.LOAD:
                refused.update(found)
            if reason or decision is Decision.COMPUTE:
                self._skip(tier, found, waiters, reason or "gate")
                self.ask(found, waiters, now_s, tier + 1, SlotUse.NONE)
        return [key for key in keys if key not in refused] if refused else keys

    def get_located(self, keys: Keys, waiters: Waiters, now_s: float) -> None:
        """Get keys that are known to be in a tier; evict for them, within the budget.

        Nothing is evicted, and the reserve not used, for requests that await chunks which may never come.
        """
        if not keys:
            return
        table = self._shared.table
        room = min(len(keys), self._holds.room)
        if all(request.awaits_any for request in waiters):
            room = min(room, max(0, table.room - self._holds.reserve))
        else:
            self._shared.evict(room - table.room)
            room = min(room, table.room)
        for tier, found in _by_tier(keys[:room], next(iter(waiters)).located):
            if useful := of_use(found, waiters, self._shared.windowed):
                self._gets.start_get(tier, useful, len(useful), waiters, now_s, located=True)

    def _skip(self, tier: int, keys: Keys, waiters: Waiters, reason: str) -> None:
        self._shared.counts["skipped", self._shared.tiers[tier].name, reason] += len(keys)
        self._gets.record(waiters, tier, keys, reason)

    def _decide(
        self,
        tier: int,
        keys: Keys,
        wanted: Keys,
        gets: int,
        waiters: Waiters,
        now_s: float,
        *,
        may_wait: bool = True,
    ) -> Decision:
        """Decide whether keys are loaded or computed, and note that they are to be computed.

        The decision is not for waiters that only locate, or prefetch.

        Args:
            tier: the tier to get them from.
            keys: the keys to get from it, ``wanted`` or a part of them.
            wanted: all keys that the waiters may get with them, however few slots there are.
            gets: number of gets that this takes, one after the other.
            may_wait: whether the decision may be left to the next round.
        """
        gate = self._shared.gate
        waiters = {it: None for it in waiters if not (it.locates or it.is_prefetch)}
        request = next(iter(waiters), None)
        if not gate.is_active or request is None:
            return Decision.LOAD
        if self._shared.windowed and group_index(request.first or keys[0]) in self._shared.windowed:
            return Decision.LOAD  # no group has chunks of all of the prompt
        fetched, place, count = self._choice(request, keys[0], wanted)
        if not gate.decide_to_compute(tier, fetched, gets, place, count, now_s):
            return Decision.LOAD
        if may_wait and self._holds.first not in (None, *waiters) and gate.defer(now_s):
            for waiter in waiters:
                self._holds.stop_clock(waiter)
            return Decision.WAIT
        gate.count_computed(place, count)
        for waiter in waiters:
            waiter.why_absent.update(dict.fromkeys(keys, "gate"))
        return Decision.COMPUTE

    def _choice(self, request: Request, key: OffloadKey, wanted: Keys) -> tuple[int, int, int]:
        """Return the number of chunks to fetch for a request; then the place and number of chunks to compute.

        Place and number count chunks of the group that was asked first, from the front of the prompt. The
        request loads few chunks of other groups. Without these, earlier chunks are useless, and all of the
        prompt is computed.
        """
        front = (request.first or key)[-GROUP_BYTES:]
        windows = {group.to_bytes(GROUP_BYTES, "big") for group in self._shared.windowed}
        asked = dict.fromkeys(request.wanted)
        of_group = Counter([it[-GROUP_BYTES:] for it in asked])
        to_get = Counter([it[-GROUP_BYTES:] for it in wanted])
        held = sum(chunk.key not in asked and chunk.key.endswith(front) for chunk in request.held)
        held += 0 if request.wait is None else request.wait.leading
        fetched = sum(count for group, count in to_get.items() if group not in windows)
        fetched += min(self._shared.gate.window_chunks, sum(of_group[group] for group in windows))
        if not key.endswith(front):
            return fetched, request.base, held + of_group[front]
        index = request.wanted.index(key) if key in asked else 0  # the first ones are of this group
        return fetched, request.base + held + index, to_get[front]

    def _probe(self, tier: int, keys: Keys, now_s: float) -> None:
        """Get a few of the keys although computing is quicker, if a probe is due, to learn if it still is.

        It takes no adopted chunk's slot: the caller may be about to get that chunk.
        """
        room = min(len(keys), self._holds.room)
        if not room or not (count := min(room, self._shared.gate.probe_size(tier, now_s))):
            return
        free = self._shared.table.free
        self._shared.evict(count - len(free))
        if count := min(count, len(free)):
            self._shared.gate.note_probe(tier, now_s)
            self._gets.start_get(tier, keys[:count], count, {}, now_s).is_probe = True


def _by_tier(keys: Keys, located: dict[OffloadKey, int]) -> list[tuple[int, list[OffloadKey]]]:
    """Return the tiers that keys are in, and which they are, in the tiers' order."""
    by_tier: dict[int, list[OffloadKey]] = {}
    for tier, found in groupby(keys, located.__getitem__):
        by_tier.setdefault(tier, []).extend(found)
    return sorted(by_tier.items())
