"""Finds chunks in the tiers for requests that wait, and holds for them what was found."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from kvtier._core.chunks import Chunk
from kvtier._core.messages import Answer, Fetch, Fetched
from kvtier._core.requests import Request
from kvtier._core.shared import SharedState
from kvtier._core.states import ChunkEvent, ChunkState
from kvtier._core.transfers import Bring, Transfer
from kvtier.keys import OffloadKey, group_index

Keys = Sequence[OffloadKey]
Waiters = Mapping[Request, None]

_READY = ChunkState.READY


class Promotions:
    """The fetches under way, and the chunks they brought that nobody has loaded yet.

    Requests share a fetch where they may be served from the same tiers. One that may not be served from
    a tier never waits for it; what others had brought to the primary tier is there for all.

    Attributes:
        landing: chunks being fetched, or fetched and held for a request. They count against the
            promotion budget.
        holders: requests for which something is pending, first come first.
        budget: slots that promotions may hold in all.
        reserve: slots to keep free, for chunks that may land.
    """

    def __init__(self, shared: SharedState, windowed_groups: frozenset[int]) -> None:
        self.landing: set[Chunk] = set()
        self.holders: dict[Request, None] = {}
        self._shared = shared
        self._windowed = windowed_groups
        self._fetching: defaultdict[frozenset[int] | None, dict[OffloadKey, Transfer]] = defaultdict(dict)
        self.resize(0)

    def resize(self, slots: int) -> None:
        """Compute the budget and the reserve for this number of slots."""
        limits = self._shared.limits
        self.budget = max(1, int(slots * limits.promotion_budget))
        self.reserve = min(self.budget, int(slots * limits.landing_reserve)) if self._shared.tiers else 0

    @property
    def _room(self) -> int:
        return max(0, self.budget - len(self.landing))

    def hold(self, request: Request) -> None:
        """Pin what a request was told is there, until it is served."""
        self.holders[request] = None
        visible, held = self._shared.table.visible, request.held
        hits = [chunk for key in request.hits if (chunk := visible.get(key)) and chunk.state is _READY]
        added = [chunk for chunk in dict.fromkeys(hits) if chunk not in held]
        request.hits.clear()
        self._shared.table.pin(added)
        held.update(dict.fromkeys(hits, request.round))

    def unhold(self, request: Request) -> None:
        """Unpin what is held for a request."""
        self.holders.pop(request, None)
        request.answers_stand = False
        if request.held:
            chunks, request.held = request.held, {}
            self._shared.table.unpin(chunks)
            self.let_go(chunks)

    def keep_asked(self, request: Request) -> None:
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
        self.let_go(gone)

    def let_go(self, chunks: Iterable[Chunk]) -> None:
        """Remove from the promotion budget those chunks that nothing pins any more."""
        self.landing.difference_update([chunk for chunk in chunks if not chunk.pins])

    def fetch_wanted(self, request: Request, now_s: float) -> None:
        """Start fetches for the keys that the request wants, as far as the budget goes.

        Nothing is evicted for a key while the location of an earlier one is unknown, and nothing is fetched
        behind a key that no tier has.
        """
        fetching, visible = self._fetching[request.tiers], self._shared.table.visible
        located = request.located
        known: list[OffloadKey] = []
        unknown: list[OffloadKey] = []
        unsure = unsure_before = False
        request.answers_stand = not self._windowed
        for key in self._still_wanted(request):
            if key in visible:
                request.answers_stand = False
                continue
            transfer = fetching.get(key)
            if transfer is not None:
                transfer.waiters[request] = None
            elif key not in located:
                unsure_before = unsure_before if unknown else unsure
                unknown.append(key)
            elif not unsure or self._is_windowed(key):
                known.append(key)
            unsure = unsure or not (key in located or self._is_windowed(key))
        if known:
            self._fetch_for(request, known, now_s)
        if unknown:
            self._ask_grouped(unknown, {request: None}, now_s, Bring.FREE if unsure_before else Bring.ALL)

    def fetched(self, event: Fetched, now_s: float) -> list[Chunk]:
        """Process the end of a fetch, start those that follow, and return the chunks that it brought."""
        transfer, in_time = self._shared.end(event, now_s)
        if self._shared.tiers[transfer.tier].distrusted:
            event = replace(event, answers=(Answer.MISSING,) * len(event.answers))
        self._stop_expecting(transfer)
        waiters = _waiting(transfer) if in_time else {}
        for request in waiters:
            request.answers_stand = False
        landed = self._land(transfer, event.answers, waiters)
        self._shared.announce_end(transfer, [it is not Answer.MISSING for it in event.answers])
        self._count(transfer, event, now_s)
        if waiters:
            self._ask_next_tier(transfer, event, waiters, now_s)
        return landed

    def _ask_next_tier(self, transfer: Transfer, event: Fetched, waiters: Waiters, now_s: float) -> None:
        """Ask the next tier for the keys that this one lacks; fetch located chunks that waiters can use."""
        missing = _select(transfer.keys, event.answers, Answer.MISSING)
        located = _select(transfer.keys, event.answers, Answer.LOCATED)
        for request in waiters:
            request.located.update(dict.fromkeys(located, transfer.tier))
        visible = self._shared.table.visible
        unseen = [key for key in missing if key not in visible]
        self._ask(unseen, waiters, now_s, transfer.tier + 1, transfer.bring)
        if transfer.bring is Bring.ALL:
            run = [key for key in _run_after_landed(transfer.keys, event.answers) if key not in visible]
            run = self._of_use(run, waiters)
            self._fetch_located(run, waiters, now_s)
            first = next(iter(self.holders))  # of the waiters, who are all among them
            if first in waiters and not any(holder.held for holder in self.holders if holder is not first):
                self._trim_first(first, run)  # nobody can make way for it

    def give_up(self, transfer: Transfer, now_s: float) -> None:
        """Stop waiting for an overdue fetch: its keys are looked for elsewhere. Its slots stay out of use."""
        self._stop_expecting(transfer)
        self.landing.difference_update(transfer.chunks)
        waiters = _waiting(transfer)
        if waiters:
            visible = self._shared.table.visible
            keys = [key for key in transfer.keys if key not in visible]
            self._ask(keys, waiters, now_s, transfer.tier + 1, transfer.bring)

    def evict_to_reserve(self) -> None:
        """Evict until slots are free for chunks that may be fetched.

        Slots of running fetches count as free: unused ones are returned, so asking for chunks that no tier
        has evicts nothing.
        """
        short = self.reserve - len(self._shared.table.free)
        if short > 0:
            lent = sum(len(transfer.chunks) for transfer in self._shared.running if not transfer.is_put)
            self._shared.evict(short - lent)

    def reset(self) -> None:
        """Doom what is being fetched, and unpin what is held."""
        for transfer in self._shared.transfers.values():
            if not transfer.is_put:
                for chunk in transfer.chunks:
                    chunk.move(ChunkEvent.RESET)
                for request in transfer.waiters:
                    request.give_up(transfer.keys)
                transfer.waiters.clear()
        self._fetching.clear()
        waiting = [request for request in self.holders if request.is_waiting]
        for request in list(self.holders):
            self.unhold(request)
            request.located.clear()
        self.holders.update(dict.fromkeys(waiting))  # their deadlines go on

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

    def _ask_grouped(self, keys: Keys, waiters: Waiters, now_s: float, bring: Bring) -> None:
        self._ask([key for key in keys if not self._is_windowed(key)], waiters, now_s, 0, bring)
        self._ask([key for key in keys if self._is_windowed(key)], waiters, now_s, 0, Bring.NOTHING)

    def _ask(self, keys: Keys, waiters: Waiters, now_s: float, first_tier: int, bring: Bring) -> None:
        """Look for keys in the next tier that may be asked; where there is none they are absent."""
        if not keys:
            return
        shared, allowed = self._shared, _allowed(waiters)
        for tier in range(first_tier, len(shared.tiers)):
            gate = shared.tiers[tier]
            closed = gate.get_refusal(now_s) if allowed is None or tier in allowed else "filter"
            if closed is None:
                count = min(len(keys), self._room, len(shared.table.free)) if bring else 0
                self._fetch(tier, keys, count, waiters, now_s).bring = bring
                return
            shared.counts["skipped", gate.name, closed] += len(keys)
        for request in waiters:
            request.give_up(keys)

    def _fetch_located(self, keys: Keys, waiters: Waiters, now_s: float) -> None:
        """Fetch keys that are known to be in a tier; evict for them, within the budget."""
        if not keys:
            return
        shared, first = self._shared, next(iter(waiters))
        room = min(len(keys), self._room)
        shared.evict(room - len(shared.table.free))
        room = min(room, len(shared.table.free))
        by_tier: dict[int, list[OffloadKey]] = {}
        for key in keys[:room]:
            by_tier.setdefault(first.located[key], []).append(key)
        for tier in sorted(by_tier):  # a refusal makes a later tier be asked, which it may then refuse, too
            if reason := shared.tiers[tier].get_refusal(now_s):
                found = by_tier.pop(tier)
                shared.counts["skipped", shared.tiers[tier].name, reason] += len(found)
                self._ask(found, waiters, now_s, tier + 1, Bring.NOTHING)
        for tier, found in by_tier.items():
            if of_use := self._of_use(found, waiters):
                self._fetch(tier, of_use, len(of_use), waiters, now_s, located=True)

    def _fetch_for(self, request: Request, keys: Keys, now_s: float) -> None:
        """Fetch located keys for a request in its turn. Whoever is first in line gets all it can."""
        is_first = next(iter(self.holders), request) is request
        if is_first:
            self._free_for_first(request, len(keys))
        self._fetch_located(keys, {request: None}, now_s)
        if is_first:
            self._trim_first(request, keys)

    def _free_for_first(self, first: Request, count: int) -> None:
        """Free for the request that is first in line what those behind it hold, as far as it needs it.

        Their share of the budget, and where no slot is left their slots: whose turn comes last loses
        first. Only between two rounds, for what was answered HIT in a round is there to its end.
        """
        table, landing = self._shared.table, self.landing
        behind = [holder for holder in reversed(self.holders) if holder is not first]
        if count > self._room:
            held = dict.fromkeys(chunk for holder in behind for chunk in holder.held)
            spare = [chunk for chunk in held if chunk in landing and chunk not in first.held]
            landing.difference_update(spare[: count - self._room])
        count = min(count, self._room) - len(table.free)
        if count <= table.evictable:
            return
        for holder in behind:
            table.unpin(holder.held)
        self._shared.evict(count)
        for holder in behind:
            holder.held = {chunk: when for chunk, when in holder.held.items() if chunk.state is _READY}
            holder.answers_stand = False
            table.pin(holder.held)
        self.let_go(list(landing))

    def _trim_first(self, first: Request, keys: Keys) -> None:
        """Drop keys of the request first in line that cannot fit, to avoid a deadlock.

        Fetches for other requests are awaited: their slots can be evicted once the chunks are there.
        """
        fetching = self._fetching[first.tiers]
        left = [key for key in keys if key not in fetching]
        under_way = [transfer for transfer in self._shared.running if transfer.chunks and not transfer.is_put]
        if left and all(first in transfer.waiters for transfer in under_way):
            first.give_up(left)
            self._shared.counts["miss", self._shared.short_of("budget")] += len(left)

    def _fetch(
        self, tier: int, keys: Keys, count: int, waiters: Waiters, now_s: float, *, located: bool = False
    ) -> Transfer:
        """Fetch keys from a tier, the first ``count`` of them into free slots."""
        chunks = self._shared.table.take(keys[:count], visible=False)
        self.landing.update(chunks)
        transfer = self._shared.begin(tier, keys, chunks, now_s, is_put=False)
        transfer.located = located
        transfer.waiters.update(waiters)
        transfer.allowed = _allowed(waiters)
        self._fetching[transfer.allowed].update(dict.fromkeys(keys, transfer))
        slots = [chunk.slot for chunk in chunks]
        self._shared.commands.append(Fetch(transfer.id, tier, keys, slots, located))
        return transfer

    def _stop_expecting(self, transfer: Transfer) -> None:
        fetching = self._fetching[transfer.allowed]
        for key in transfer.keys:
            if fetching.get(key) is transfer:
                del fetching[key]

    def _land(self, transfer: Transfer, answers: Sequence[Answer], waiters: Waiters) -> list[Chunk]:
        """Show the chunks that have landed, unless their key got here another way; free the others."""
        table = self._shared.table
        good: list[Chunk] = []
        bad: list[Chunk] = []
        for chunk, answer in zip(transfer.chunks, answers, strict=False):
            arrived = answer is Answer.LANDED and chunk.key not in table.visible
            (good if arrived else bad).append(chunk)
        table.failed(bad)
        landed = table.filled(good, pins=len(waiters))
        for chunk in landed:
            chunk.origin = transfer.tier
            table.show(chunk)
        for request in waiters:
            request.held.update(dict.fromkeys(landed, request.round))
            self.holders[request] = None
        self.let_go(transfer.chunks)
        self._shared.announcements.stored([chunk.key for chunk in landed], found=True)
        return landed

    def _count(self, transfer: Transfer, event: Fetched, now_s: float) -> None:
        gate = self._shared.tiers[transfer.tier]
        gate.get_ended(event.answers.count(Answer.LANDED), event.health, event.seconds, now_s)
        counts, name = self._shared.counts, gate.name
        missing = event.answers.count(Answer.MISSING)
        if not transfer.located:
            counts["asked", name] += len(event.answers)
            counts["found", name] += len(event.answers) - missing
        counts["fetched", name] += event.answers.count(Answer.LANDED)
        counts["get_seconds", name] += event.seconds
        counts["absent", name] += max(0, missing - sum(event.reasons.values()))
        for reason, count in event.reasons.items():
            counts["get_failed", name, reason] += count


def _allowed(waiters: Waiters) -> frozenset[int] | None:
    """The tiers that these requests may be served from: the same for each of them."""
    return next(iter(waiters)).tiers


def _waiting(transfer: Transfer) -> dict[Request, None]:
    return {request: None for request in transfer.waiters if request.is_waiting}


def _select(keys: Keys, answers: Sequence[Answer], wanted: Answer) -> list[OffloadKey]:
    return [key for key, answer in zip(keys, answers, strict=True) if answer is wanted]


def _run_after_landed(keys: Keys, answers: Sequence[Answer]) -> list[OffloadKey]:
    """Return the located keys that directly follow the landed ones at the front."""
    run: list[OffloadKey] = []
    for key, answer in zip(keys, answers, strict=True):
        if answer is Answer.LOCATED:
            run.append(key)
        elif answer is Answer.MISSING or run:
            break
    return run
