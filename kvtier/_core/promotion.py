"""Promotes chunks of the tiers for requests that wait, and holds for them what was found."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import dropwhile, takewhile

from msgspec.structs import replace

from kvtier._core.chunks import Chunk
from kvtier._core.messages import Answer, Get, GetEnded, TransferHealth
from kvtier._core.requests import Request
from kvtier._core.shared import Keys, SharedState
from kvtier._core.states import ChunkEvent, ChunkState
from kvtier._core.transfers import SlotUse, Transfer
from kvtier.keys import OffloadKey, group_index

Waiters = Mapping[Request, None]

_READY = ChunkState.READY
_WAIT = "wait"


class Promotions:
    """The gets in flight, and the chunks that they promoted and that no request has loaded yet.

    Requests share a get where they may be served from the same tiers. One that may not be served from
    a tier never waits for it; what was promoted for others is there for all.

    Attributes:
        promoting: chunks being promoted, or promoted and held for a request. They count against the
            promotion budget.
        pending: requests that wait for an answer, first come first.
        budget: slots that promotions may hold in all.
        reserve: slots to keep free, for chunks that a get may find.
    """

    def __init__(self, shared: SharedState, windowed_groups: frozenset[int]) -> None:
        self.promoting: set[Chunk] = set()
        self.pending: dict[Request, None] = {}
        self._shared = shared
        self._windowed = windowed_groups
        self._in_flight: defaultdict[frozenset[int] | None, dict[OffloadKey, Transfer]] = defaultdict(dict)
        self.resize(0)

    def resize(self, slots: int) -> None:
        """Compute the budget and the reserve for this number of slots."""
        limits = self._shared.limits
        self.budget = max(1, int(slots * limits.promotion_budget))
        self.reserve = min(self.budget, int(slots * limits.promotion_reserve)) if self._shared.tiers else 0

    @property
    def _room(self) -> int:
        return max(0, self.budget - len(self.promoting))

    @property
    def _first(self) -> Request | None:
        """The request that is first in line; one that only locates takes no turn."""
        return next((request for request in self.pending if not request.locates), None)

    def hold(self, request: Request) -> None:
        """Pin what a request was told is there, until it is served."""
        self.pending[request] = None
        if request.locates:  # it loads nothing
            request.hits.clear()
            return
        visible, held = self._shared.table.visible, request.held
        hits = [chunk for key in request.hits if (chunk := visible.get(key)) and chunk.state is _READY]
        added = [chunk for chunk in dict.fromkeys(hits) if chunk not in held]
        request.hits.clear()
        self._shared.table.pin(added)
        held.update(dict.fromkeys(hits, request.round))

    def unhold(self, request: Request) -> None:
        """Unpin what is held for a request."""
        self.pending.pop(request, None)
        request.answers_stand = False
        chunks, request.held = request.held, {}
        self._shared.table.unpin(chunks)
        self.free_budget(chunks)

    def unpin_unasked(self, request: Request) -> None:
        """Unpin what the request's last full scan did not ask for.

        It has that in its own cache by now, mostly because another request of the same prefix ran. The first
        key was asked for, though a scan that was begun as a repeated one does not show it.
        """
        if request.answers_stand or self._windowed:
            return
        now, first = request.round, request.first
        gone = [chunk for chunk, when in request.held.items() if when is not now and chunk.key != first]
        for chunk in gone:
            del request.held[chunk]
        self._shared.table.unpin(gone)
        self.free_budget(gone)

    def free_budget(self, chunks: Iterable[Chunk]) -> None:
        """Remove from the promotion budget those chunks that nothing pins any more."""
        self.promoting.difference_update([chunk for chunk in chunks if not chunk.pins])

    def promote_wanted(self, request: Request, now_s: float) -> None:
        """Start gets of the keys that the request wants, as far as the budget goes.

        Nothing is evicted for a key while the location of an earlier one is unknown, and nothing is promoted
        behind a key that no tier has.
        """
        in_flight, visible = self._in_flight[request.tiers], self._shared.table.visible
        located = request.located
        known: list[OffloadKey] = []
        unknown: list[OffloadKey] = []
        unsure = unsure_before = False
        request.answers_stand = not self._windowed
        for key in self._still_wanted(request):
            if key in visible:
                request.answers_stand = False
                continue
            transfer = in_flight.get(key)
            if transfer is not None:
                transfer.waiters[request] = None
            elif key not in located:
                unsure_before = unsure_before if unknown else unsure
                unknown.append(key)
            elif not unsure or self._is_windowed(key):
                known.append(key)
            unsure = unsure or not (key in located or self._is_windowed(key))
        if known:
            self._get_for(request, known, now_s)
        if unknown:
            slot_use = SlotUse.FREE if unsure_before else SlotUse.EVICT
            front = [key for key in unknown if not self._is_windowed(key)]
            self._ask(front, {request: None}, now_s, 0, slot_use)
            windowed = [key for key in unknown if self._is_windowed(key)]
            self._ask(windowed, {request: None}, now_s, 0, SlotUse.NONE)

    def locate_wanted(self, request: Request, now_s: float) -> None:
        """Look for the keys that the request wants, without bringing any of them."""
        in_flight, visible = self._in_flight[request.tiers], self._shared.table.visible
        unknown: list[OffloadKey] = []
        for key in dict.fromkeys(request.wanted):
            if key in visible or key in request.located or key in request.absent:
                continue
            if (transfer := in_flight.get(key)) is not None:
                transfer.waiters[request] = None
            else:
                unknown.append(key)
        self._ask(unknown, {request: None}, now_s, 0, SlotUse.NONE)

    def get_ended(self, event: GetEnded, now_s: float) -> list[Chunk]:
        """Process the end of a get, start those that follow, and return the chunks that it promoted."""
        transfer, in_time = self._shared.end(event, now_s)
        if self._shared.tiers[transfer.tier].failed_audit:
            event = replace(event, answers=(Answer.MISSING,) * len(event.answers))
        self._stop_expecting(transfer)
        waiters = _waiting(transfer) if in_time else {}
        for request in waiters:
            request.answers_stand = False
        if any(request.record for request in waiters):
            self._record_missing(waiters, transfer, event)
        copied = self._complete(transfer, event.answers, _loading(waiters))
        self._shared.announce_end(transfer, [it is not Answer.MISSING for it in event.answers])
        self._count(transfer, event, now_s)
        if waiters:
            self._ask_next_tier(transfer, event, waiters, now_s)
        return copied

    def _ask_next_tier(self, transfer: Transfer, event: GetEnded, waiters: Waiters, now_s: float) -> None:
        """Ask the next tier for the keys that this one lacks; get located chunks that waiters can use."""
        missing = _select(transfer.keys, event.answers, Answer.MISSING)
        located = _select(transfer.keys, event.answers, Answer.LOCATED)
        for request in waiters:
            request.located.update(dict.fromkeys(located, transfer.tier))
        self._ask(missing, waiters, now_s, transfer.tier + 1, transfer.slot_use)
        waiters = _loading(waiters)
        if waiters and transfer.slot_use is SlotUse.EVICT:
            visible = self._shared.table.visible
            run = [key for key in _run_after_copied(transfer.keys, event.answers) if key not in visible]
            run = self._obtainable(self._of_use(run, waiters), waiters, now_s)
            self._get_located(run, waiters, now_s)
            first = self._first
            if first in waiters and not any(other.held for other in self.pending if other is not first):
                self._trim_first(first, run)  # nobody can make way for it

    def give_up(self, transfer: Transfer, now_s: float) -> None:
        """Stop waiting for an overdue get: its keys are looked for elsewhere. Its slots stay out of use."""
        self._stop_expecting(transfer)
        self.promoting.difference_update(transfer.chunks)
        self._record(transfer.waiters, transfer.tier, transfer.keys, "timeout")
        self._ask(transfer.keys, _waiting(transfer), now_s, transfer.tier + 1, transfer.slot_use)

    def evict_to_reserve(self) -> None:
        """Evict until slots are free for chunks that a get may find.

        Slots of running gets count as free: unused ones are returned, so asking for chunks that no tier has
        evicts nothing.
        """
        short = self.reserve - len(self._shared.table.free)
        if short > 0:
            lent = sum(len(transfer.chunks) for transfer in self._shared.running if not transfer.is_put)
            self._shared.evict(short - lent)

    def reset(self) -> None:
        """Doom what is being promoted, and unpin what is held."""
        for transfer in self._shared.transfers.values():
            if not transfer.is_put:
                for chunk in transfer.chunks:
                    chunk.move(ChunkEvent.DROPPED)
                self._record(transfer.waiters, transfer.tier, transfer.keys, "reset")
                for request in transfer.waiters:
                    request.mark_absent(transfer.keys)
                transfer.waiters.clear()
        self._in_flight.clear()
        waiting = [request for request in self.pending if request.is_waiting]
        for request in list(self.pending):
            self.unhold(request)
            request.located.clear()
        self.pending.update(dict.fromkeys(waiting))  # their deadlines go on

    def _still_wanted(self, request: Request) -> Iterable[OffloadKey]:
        """Return the wanted keys, less those that turned out to be nowhere, or are behind such a key."""
        wanted, absent = dict.fromkeys(request.wanted), request.absent
        if absent.isdisjoint(wanted):
            return wanted
        request.answers_stand = False
        kept: list[OffloadKey] = []
        gaps: set[int] = set()  # groups that are looked up from the front and end there
        for key in wanted:
            group = group_index(key)
            if key in absent and not self._is_windowed(key):
                gaps.add(group)
            if key not in absent and group not in gaps:
                kept.append(key)
        return kept

    def _of_use(self, keys: list[OffloadKey], waiters: Waiters) -> list[OffloadKey]:
        """Return the keys that a waiter still wants: no key before them is nowhere, or was given up."""
        if not all(request.absent for request in waiters):
            return keys
        useless = set(keys)
        for request in waiters:
            useless &= set(request.wanted).difference(self._still_wanted(request))
        return [key for key in keys if key not in useless]

    def _is_windowed(self, key: OffloadKey) -> bool:
        return bool(self._windowed) and group_index(key) in self._windowed

    def _ask(self, keys: Keys, waiters: Waiters, now_s: float, first_tier: int, slot_use: SlotUse) -> None:
        """Look for keys in the next tier that may be asked; where there is none they are absent."""
        shared = self._shared
        keys = [key for key in keys if key not in shared.table.visible]
        if not keys or not waiters:
            return
        if all(request.locates for request in waiters):
            slot_use = SlotUse.NONE
        allowed = _allowed(waiters)
        for tier in range(first_tier, len(shared.tiers)):
            status = shared.tiers[tier]
            closed = status.get_refusal(now_s) if allowed is None or tier in allowed else "filter"
            if closed is None:
                gets = 1 if len(keys) <= min(self._room, len(shared.table.free)) else 2
                closed = self._gate(tier, keys, keys, gets, waiters, now_s, may_wait=not first_tier)
            if closed == _WAIT:
                return
            if closed is None:
                count = min(len(keys), self._room, len(shared.table.free)) if slot_use else 0
                self._get(tier, keys, count, waiters, now_s).slot_use = slot_use
                return
            shared.counts["skipped", status.name, closed] += len(keys)
            self._record(waiters, tier, keys, closed)
            if closed == "gate":
                if slot_use:
                    self._probe(tier, keys, now_s)
                self._ask(keys, _locating(waiters), now_s, tier, SlotUse.NONE)
                waiters = _loading(waiters)
        for request in waiters:
            request.mark_absent(keys)

    def _obtainable(self, keys: list[OffloadKey], waiters: Waiters, now_s: float) -> list[OffloadKey]:
        """Return the located keys whose tiers may be asked now; the others are looked for in later tiers."""
        if not keys:
            return keys
        shared, located = self._shared, next(iter(waiters)).located
        by_tier: dict[int, list[OffloadKey]] = {}
        for key in keys:
            by_tier.setdefault(located[key], []).append(key)
        refused: set[int] = set()
        for tier, found in sorted(by_tier.items()):
            reason = shared.tiers[tier].get_refusal(now_s)
            reason = reason or self._gate(tier, found, keys, 1, waiters, now_s)
            if reason:
                refused.add(tier)
            if reason and reason != _WAIT:
                shared.counts["skipped", shared.tiers[tier].name, reason] += len(found)
                self._record(waiters, tier, found, reason)
                self._ask(found, waiters, now_s, tier + 1, SlotUse.NONE)
        return [key for key in keys if located[key] not in refused] if refused else keys

    def _get_located(self, keys: Keys, waiters: Waiters, now_s: float) -> None:
        """Get keys that are known to be in a tier; evict for them, within the budget."""
        if not keys:
            return
        shared, first = self._shared, next(iter(waiters))
        room = min(len(keys), self._room)
        shared.evict(room - len(shared.table.free))
        room = min(room, len(shared.table.free))
        by_tier: dict[int, list[OffloadKey]] = {}
        for key in keys[:room]:
            by_tier.setdefault(first.located[key], []).append(key)
        for tier, found in sorted(by_tier.items()):
            if of_use := self._of_use(found, waiters):
                self._get(tier, of_use, len(of_use), waiters, now_s, located=True)

    def _get_for(self, request: Request, keys: list[OffloadKey], now_s: float) -> None:
        """Get located keys for a request in its turn. Whoever is first in line gets all it can."""
        is_first = self._first in (None, request)
        keys = self._obtainable(keys, {request: None}, now_s)
        if is_first:
            self._free_for_first(request, len(keys))
        self._get_located(keys, {request: None}, now_s)
        if is_first:
            self._trim_first(request, keys)

    def _free_for_first(self, first: Request, count: int) -> None:
        """Free for the request that is first in line what those behind it hold, as far as it needs it.

        Their share of the budget, and where no slot is left their slots: whose turn comes last loses
        first. Only between two rounds, for what was answered HIT in a round is there to its end.
        """
        table, promoting = self._shared.table, self.promoting
        behind = [other for other in reversed(self.pending) if other is not first]
        if count > self._room:
            held = dict.fromkeys(chunk for other in behind for chunk in other.held)
            spare = [chunk for chunk in held if chunk in promoting and chunk not in first.held]
            promoting.difference_update(spare[: count - self._room])
        count = min(count, self._room) - len(table.free)
        if count <= table.evictable:
            return
        for other in behind:
            table.unpin(other.held)
        self._shared.evict(count)
        for other in behind:
            other.held = {chunk: when for chunk, when in other.held.items() if chunk.state is _READY}
            other.answers_stand = False
            table.pin(other.held)
        self.free_budget(list(promoting))

    def _trim_first(self, first: Request, keys: Keys) -> None:
        """Drop keys of the request first in line that cannot fit, to avoid a deadlock.

        Gets for other requests are awaited: their slots can be evicted once the chunks are there.
        """
        in_flight = self._in_flight[first.tiers]
        left = [key for key in keys if key not in in_flight]
        under_way = [
            transfer
            for transfer in self._shared.running
            if transfer.waiters and transfer.chunks and not transfer.is_put
        ]
        if left and all(first in transfer.waiters for transfer in under_way):
            first.mark_absent(left)
            reason = self._shared.short_of("budget")
            self._shared.counts["miss", reason] += len(left)
            if first.record is not None:
                first.record.gave_up(left, reason)

    def _get(
        self, tier: int, keys: Keys, count: int, waiters: Waiters, now_s: float, *, located: bool = False
    ) -> Transfer:
        """Get keys from a tier, the first ``count`` of them into free slots."""
        chunks = self._shared.table.take(keys[:count], visible=False)
        self.promoting.update(chunks)
        transfer = self._shared.begin(tier, keys, chunks, now_s, is_put=False)
        transfer.located = located
        if self._shared.gate.is_on:
            gets = [
                other for other in self._shared.transfers.values() if other.tier == tier and not other.is_put
            ]
            transfer.load = sum(len(other.chunks) for other in gets)
        if waiters:  # nobody waits for a probe
            transfer.waiters.update(waiters)
            transfer.allowed = _allowed(waiters)
            self._in_flight[transfer.allowed].update(dict.fromkeys(keys, transfer))
        slots = [chunk.slot for chunk in chunks]
        self._shared.commands.append(Get(transfer.id, tier, keys, slots, located))
        return transfer

    def _gate(
        self,
        tier: int,
        keys: Keys,
        wanted: Keys,
        gets: int,
        waiters: Waiters,
        now_s: float,
        *,
        may_wait: bool = True,
    ) -> str | None:
        """Return "gate", and note it, where computing keys is quicker; None where they are got.

        Args:
            tier: the tier that is to give them.
            keys: what the tier is to give, ``wanted`` or a part of it.
            wanted: all that the waiters may get with them, however few slots there are.
            gets: how many gets that takes, one after the other.
            waiters: the requests. Those that only locate are not decided about.
            now_s: the time.
            may_wait: whether "wait" may be returned: that is to be decided in the next round.
        """
        gate, waiters = self._shared.gate, _loading(waiters)
        if not gate.is_active or self._windowed or not waiters:
            return None
        request = next(iter(waiters))
        asked = {key: index for index, key in enumerate(request.wanted)}
        held = sum(chunk.key not in asked for chunk in request.held)
        place = request.base + held + asked.get(keys[0], 0)
        if not gate.is_slower(tier, place, len(wanted), gets, now_s):
            return None
        if may_wait and self._first not in (None, *waiters) and gate.has_to_wait(now_s):
            for waiter in waiters:
                waiter.deadline_s = None  # it does not wait for a tier
            return _WAIT
        gate.computes(place, len(wanted))
        for waiter in waiters:
            waiter.gated.update(keys)
        return "gate"

    def _probe(self, tier: int, keys: Keys, now_s: float) -> None:
        """Get a few of the keys although computing is quicker, where that is due, to learn if it still is."""
        room = min(len(keys), self._room)
        if not room or not (count := min(room, self._shared.gate.probe_size(tier, now_s))):
            return
        self._shared.evict(count - len(self._shared.table.free))
        if count := min(count, len(self._shared.table.free)):
            self._shared.gate.probe_begins(tier, now_s)
            self._get(tier, keys[:count], count, {}, now_s).is_probe = True

    def _record(self, requests: Iterable[Request], tier: int, keys: Keys, word: str) -> None:
        """Note why a tier did not give keys, for those of the requests that are to be explained."""
        for request in requests:
            if request.record is not None:
                request.record.refused(keys, self._shared.tiers[tier].name, word)

    def _record_missing(self, waiters: Waiters, transfer: Transfer, event: GetEnded) -> None:
        """Note why a get did not bring its missing keys.

        The event counts the chunks that failed, by reason, and does not name them. They are among those that
        were given a slot, unless all of the get has failed. Where fewer failed than are missing there, each
        may have failed or be absent.
        """
        missing, failed = _select(transfer.keys, event.answers, Answer.MISSING), sum(event.reasons.values())
        in_slots = event.answers[: len(transfer.chunks)].count(Answer.MISSING)
        count = (in_slots if failed <= in_slots else len(missing)) if failed else 0
        rest = "audit" if self._shared.tiers[transfer.tier].failed_audit else "absent"
        words = {*event.reasons, rest} if failed < count else {*event.reasons}
        self._record(waiters, transfer.tier, missing[:count], ",".join(sorted(words)))
        self._record(waiters, transfer.tier, missing[count:], rest)

    def _stop_expecting(self, transfer: Transfer) -> None:
        in_flight = self._in_flight[transfer.allowed]
        for key in transfer.keys:
            if in_flight.get(key) is transfer:
                del in_flight[key]

    def _complete(self, transfer: Transfer, answers: Sequence[Answer], waiters: Waiters) -> list[Chunk]:
        """Make the copied chunks visible, unless their key got here another way; free the others."""
        table = self._shared.table
        good: list[Chunk] = []
        bad: list[Chunk] = []
        for chunk, answer in zip(transfer.chunks, answers, strict=False):
            arrived = answer is Answer.COPIED and chunk.key not in table.visible
            (good if arrived else bad).append(chunk)
        table.drop(bad)
        copied = table.filled(good, pins=len(waiters))
        for chunk in copied:
            chunk.origin = transfer.tier
            table.visible[chunk.key] = chunk
        for request in waiters:
            request.held.update(dict.fromkeys(copied, request.round))
            self.pending[request] = None
        self.free_budget(transfer.chunks)
        self._shared.kv_events.stored([chunk.key for chunk in copied], found=True)
        return copied

    def _count(self, transfer: Transfer, event: GetEnded, now_s: float) -> None:
        status = self._shared.tiers[transfer.tier]
        counts, name = self._shared.counts, status.name
        copied, missing = event.answers.count(Answer.COPIED), event.answers.count(Answer.MISSING)
        if copied and event.seconds and event.health is TransferHealth.GOOD:
            status.pressure.get_ended(copied, event.seconds, now_s, beside_puts=status.backlog > 0)
        if transfer.load and event.elapsed_s:
            unused = len(transfer.chunks) - copied if copied else 0
            self._shared.gate.get_ended(
                transfer.tier, transfer.load - unused, event.elapsed_s, now_s, at_least=not copied
            )
        if transfer.is_probe:
            found = copied or event.health is not TransferHealth.GOOD
            self._shared.gate.probe_ended(transfer.tier, now_s, found_any=bool(found))
        if not transfer.located:
            counts["asked", name] += len(event.answers)
            counts["found", name] += len(event.answers) - missing
        counts["fetched", name] += copied
        if copied:
            status.writes.fetched(_select(transfer.keys, event.answers, Answer.COPIED))
        counts["absent", name] += max(0, missing - sum(event.reasons.values()))


def _allowed(waiters: Waiters) -> frozenset[int] | None:
    """The tiers that these requests may be served from: the same for each of them."""
    return next(iter(waiters)).tiers


def _waiting(transfer: Transfer) -> dict[Request, None]:
    return {request: None for request in transfer.waiters if request.is_waiting}


def _loading(waiters: Waiters) -> dict[Request, None]:
    return {request: None for request in waiters if not request.locates}


def _locating(waiters: Waiters) -> dict[Request, None]:
    return {request: None for request in waiters if request.locates}


def _select(keys: Keys, answers: Sequence[Answer], wanted: Answer) -> list[OffloadKey]:
    return [key for key, answer in zip(keys, answers, strict=True) if answer is wanted]


def _run_after_copied(keys: Keys, answers: Sequence[Answer]) -> list[OffloadKey]:
    """Return the located keys that directly follow the copied ones at the front."""
    rest = dropwhile(lambda pair: pair[1] is Answer.COPIED, zip(keys, answers, strict=True))
    return [key for key, _ in takewhile(lambda pair: pair[1] is Answer.LOCATED, rest)]
