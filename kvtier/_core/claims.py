"""Claims of clients on chunks: these stay in the primary tier for a time, or return to it.

A claim has a name, which the requests of a conversation may share. It keeps chunks while such requests run
and for some time after. Chunks that are needed again later may leave, and are promoted shortly before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Final

from kvtier._core.chunks import Chunk
from kvtier._core.promotion.holds import Holds
from kvtier._core.requests import Request, Terms
from kvtier._core.shared import Keys, SharedState
from kvtier._core.states import ChunkState, Lookup
from kvtier.keys import OffloadKey, group_index

MOST_PER_SLOT: Final = 16
"""Keys that all claims together may have, per slot."""

SPARE_ENTRIES: Final = 64
"""Stale entries that the heap of times may have."""

AT_ONCE: Final = 32
"""Chunks looked up in a round. It bounds the time that this takes from a step of the engine."""

LEAD_S: Final = 10.0
"""From the start of a promotion to the announced use; half the time if that is less."""

REMEMBERED_S: Final = 172_800.0
"""Chunks of an ended request are remembered at most this long: twice the longest announcement."""


@dataclass(slots=True, eq=False)
class _Claim:
    """A claim under a name."""

    name: str
    requests: int = 0  # running ones that extend it
    is_cut: bool = False  # the budget had no room for a chunk since a request extended it last
    keys: dict[OffloadKey, None] = field(default_factory=dict)  # kept, or to be when they arrive
    until_s: float = -inf  # end of that
    ahead: deque[OffloadKey] = field(default_factory=deque)  # to promote, in the order of their prompt
    from_s: float = inf  # start of that
    over_s: float = inf  # until when those are kept
    tiers: frozenset[int] | None = None  # to promote them from; None for all


class Claims:
    """Pins claimed chunks within a budget. Promotes announced ones, a few in each round.

    A chunk has one pin however many claims keep it. Chunks that are used beyond the budget are refused for
    good; those to promote wait for room in it, until their time is over. A promotion starts when no request
    waits, and takes at most half of the budget for that. A waiting request gets the slots that it holds. With
    sliding windows nothing is promoted: most of their chunks are useless.
    """

    def __init__(
        self,
        shared: SharedState,
        holds: Holds,
        lookup: Callable[[OffloadKey, Request], Lookup],
        close: Callable[[Request], None],
    ) -> None:
        self.pinned = shared.kept
        self._shared = shared
        self._holds = holds
        self._lookup = lookup
        self._close = close
        self._claims: dict[str, _Claim] = {}
        self.size = 0  # keys of all claims together
        self._times: list[tuple[float, str]] = []  # a heap: when to look at a claim
        self._holders: dict[OffloadKey, set[_Claim]] = {}  # claims that keep each key
        self.arriving: dict[OffloadKey, None] = {}  # not pinned yet: perhaps being stored
        self._due: dict[_Claim, None] = {}  # claims to promote chunks for now, first come first
        self._request: Request | None = None  # looks up chunks for the first one
        self._asked: list[OffloadKey] = []  # those chunks
        self._promoted: set[OffloadKey] = set()  # those that the primary tier lacked

    @property
    def is_empty(self) -> bool:
        """Whether nothing is claimed, or remembered."""
        return not (self._claims or self._holders or self.arriving or self.pinned or self._due or self.size)

    @property
    def is_promoting(self) -> bool:
        """Whether chunks are being promoted, or could be: due, with room, and no request waits."""
        may_begin = self._pin_room > 0 and self._holds.first is None
        return bool(self._due) and (self._request is not None or may_begin)

    def has(self, name: str) -> bool:
        return name in self._claims

    def is_cut(self, name: str) -> bool:
        """Return whether the budget had no room for chunks of a claim."""
        return name in self._claims and self._claims[name].is_cut

    # --- requests --------------------------------------------------------------------------------

    def start_request(self, request: Request, terms: Terms) -> None:
        """Give an arriving request its terms. Its conversation is back, so nothing is promoted ahead."""
        request.terms = terms
        claim = self._claims.setdefault(terms.name, _Claim(terms.name))
        self._stop(claim)
        claim.is_cut = False
        if terms.kept_s:
            claim.requests += 1
            claim.until_s = inf
        self._remove(claim)

    def use(self, request: Request, keys: Keys, *, is_offered: bool = False) -> None:
        """Claim chunks that a request loads or, in the order of its prompt, offers to be stored."""
        terms = request.terms
        if terms is not None and terms.kept_s:
            self._keep(self._claims[terms.name], keys)
        if terms is not None and terms.next_use_s:
            for key in keys if is_offered else ():
                terms.used.pop(key, None)
            terms.used.update(dict.fromkeys(keys))

    def end_request(self, request: Request, now_s: float) -> None:
        """Note a request's end: the times of its claim count from now."""
        if (terms := request.terms) is None:
            return
        for name in terms.releases:
            self.release(name)
        claim = self._claims.setdefault(terms.name, _Claim(terms.name))
        if terms.kept_s:
            claim.requests -= 1
            claim.until_s = inf if claim.requests else now_s + terms.kept_s
        if terms.next_use_s and not self._shared.windowed:
            self._announce(claim, terms, request.tiers if terms.tiers is None else terms.tiers, now_s)
        self._schedule(claim)
        self._remove(claim)

    def release(self, name: str) -> None:
        """End the claim of a name. Its running requests claim what they use from now on."""
        if (claim := self._claims.get(name)) is not None:
            self._stop(claim)
            self._remove(claim, [*claim.keys])

    def promote(self, name: str, kept_s: float, now_s: float, tiers: frozenset[int] | None) -> bool:
        """Promote the remembered chunks of a name now, and keep all of them; return whether it is known."""
        if (claim := self._claims.get(name)) is None:
            return False
        if claim.ahead:
            claim.from_s, claim.over_s, claim.tiers = now_s, now_s + kept_s, tiers
        if claim.keys:
            claim.until_s = max(claim.until_s, now_s + kept_s)
        self._schedule(claim)
        return True

    # --- rounds ----------------------------------------------------------------------------------

    def start_round(self, now_s: float) -> None:
        """End what is over. Ask for announced chunks in the round that is about to end, if any are due."""
        while self._times and self._times[0][0] <= now_s:
            if (claim := self._claims.get(heappop(self._times)[1])) is None:
                continue
            if claim.from_s <= now_s and claim.ahead:
                self._due[claim] = None
            if claim.over_s <= now_s:
                self._shared.counts["keep_refused", "budget"] += len(claim.ahead)
                self._stop(claim)
            self._remove(claim, [*claim.keys] if claim.until_s <= now_s else ())
        if self._request is not None or (self._due and self._begin_lookup()):
            self._ask()

    def pin_arrived(self) -> None:
        """Pin chunks that have arrived, within the budget: the one for promotions has them no more."""
        shared, arrived = self._shared, list[Chunk]()
        for key in [*self.arriving]:
            chunk = shared.table.visible.get(key)
            is_ready = chunk is not None and chunk.state is ChunkState.READY
            if chunk is None or (is_ready and len(self.pinned) >= shared.pin_budget):
                shared.counts["keep_refused", "budget" if is_ready else "absent"] += 1
                for claim in self._holders[key]:
                    claim.is_cut = is_ready
                self._forget(key)
            elif is_ready:
                del self.arriving[key]
                self.pinned[key] = chunk
                arrived.append(chunk)
        shared.table.pin(arrived)
        self._holds.promoting.difference_update(arrived)

    def drop_lost(self) -> None:
        """Unpin chunks that can no longer be looked up."""
        for key in [key for key, chunk in self.pinned.items() if chunk.state is not ChunkState.READY]:
            self._forget(key)

    def clear(self) -> None:
        """End all claims, as ``release`` does."""
        for name in [*self._claims]:
            self.release(name)

    # --- the table -------------------------------------------------------------------------------

    @property
    def _pin_room(self) -> int:
        """How many more chunks the budget allows to pin."""
        return max(0, self._shared.pin_budget - len(self.pinned) - len(self.arriving))

    @property
    def _room(self) -> int:
        """How many more keys claims may have."""
        return MOST_PER_SLOT * len(self._shared.table.all) - self.size

    def _schedule(self, claim: _Claim) -> None:
        """Have ``start_round`` look at a claim when its times have come."""
        claims = [claim]
        if len(self._times) > 3 * len(self._claims) + SPARE_ENTRIES:
            claims = [*self._claims.values()]
            self._times.clear()
        for it in claims:
            for time_s in (it.until_s, it.from_s, it.over_s):
                if time_s < inf:
                    heappush(self._times, (time_s, it.name))

    def _keep(self, claim: _Claim, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            if key in claim.keys:
                continue
            if self._room <= 0:
                self._shared.counts["keep_refused", "names"] += 1
                continue
            self.size += 1
            claim.keys[key] = None
            self._holders.setdefault(key, set()).add(claim)
            if key not in self.pinned:
                self.arriving[key] = None

    def _remove(self, claim: _Claim, keys: Collection[OffloadKey] = ()) -> None:
        """Remove keys from a claim; remove the claim if nothing is left of it."""
        self.size -= len(keys)
        unpinned: list[Chunk] = []
        for key in keys:
            del claim.keys[key]
            self._holders[key].remove(claim)
            if not self._holders[key]:
                del self._holders[key]
                self.arriving.pop(key, None)
                if (chunk := self.pinned.pop(key, None)) is not None:
                    unpinned.append(chunk)
        self._shared.table.unpin(unpinned)
        if not (claim.keys or claim.requests or claim.ahead or claim in self._due):
            del self._claims[claim.name]

    def _forget(self, key: OffloadKey) -> None:
        for claim in [*self._holders[key]]:
            self._remove(claim, [key])

    # --- promotion -------------------------------------------------------------------------------

    def _announce(self, claim: _Claim, terms: Terms, tiers: frozenset[int] | None, now_s: float) -> None:
        """Have chunks of an ended request promoted before their next use, in place of earlier ones."""
        self._stop(claim)
        after_s = terms.next_use_s
        kept = [*claim.keys] if after_s == inf else []
        ahead = dict.fromkeys([*kept, *terms.used])
        if len(ahead) - len(kept) > self._room:
            self._shared.counts["keep_refused", "names"] += len(ahead)
            return
        self.size += len(ahead)
        claim.ahead.extend(ahead)
        claim.from_s = now_s + max(after_s / 2, after_s - LEAD_S)
        claim.over_s = now_s + min(2 * after_s, REMEMBERED_S)
        claim.tiers = tiers
        if kept:
            self._remove(claim, kept)

    def _stop(self, claim: _Claim) -> None:
        """Promote nothing more for a claim. Chunks that were found stay until their time is over."""
        if claim is next(iter(self._due), None):
            self._close_request()
        self._due.pop(claim, None)
        self.size -= len(claim.ahead)
        claim.ahead.clear()
        claim.from_s = claim.over_s = inf

    def _begin_lookup(self) -> bool:
        """Start to look up the next chunks; return whether there is room for any and no request waits."""
        if self._holds.first is not None:
            return False
        claim = next(iter(self._due))
        self._asked = self._take(claim)
        if self._asked:
            self._request = Request(f"prefetch for {claim.name}", claim.tiers, is_prefetch=True)
        return bool(self._asked)

    def _take(self, claim: _Claim) -> list[OffloadKey]:
        """Take the next chunks that may be kept, up to the number for one round."""
        most = max(1, min(AT_ONCE, self._holds.budget // 2))
        room = self._pin_room
        taken: list[OffloadKey] = []
        while claim.ahead and len(taken) < most:
            room -= claim.ahead[0] not in self.pinned
            if room < 0:
                break
            taken.append(claim.ahead.popleft())
        self.size -= len(taken)
        return taken

    def _ask(self) -> None:
        """Look chunks up as an engine would. Keep them once nothing more may come."""
        assert self._request is not None
        hits: list[OffloadKey] = []
        ended: set[int] = set()  # groups that lack a chunk which later ones need
        waits = False
        for key in self._asked:
            if (group := group_index(key)) in ended:
                continue
            answer = self._lookup(key, self._request)
            if answer is Lookup.HIT:
                hits.append(key)
            elif answer is not Lookup.MISS:
                self._promoted.add(key)
                waits = True
            else:
                ended.add(group)
        if not waits:
            self._end_lookup(hits, ended)

    def _end_lookup(self, hits: list[OffloadKey], ended: set[int]) -> None:
        claim = next(iter(self._due))
        self._shared.counts["prefetched",] += sum(key in self._promoted for key in hits)
        self._close_request()
        self._keep(claim, hits)
        claim.until_s = max(claim.until_s, claim.over_s)
        left = [key for key in claim.ahead if group_index(key) not in ended]
        self.size -= len(claim.ahead) - len(left)
        claim.ahead = deque(left)
        if not left:
            self._stop(claim)
            self._remove(claim)

    def _close_request(self) -> None:
        if self._request is not None:
            self._close(self._request)
        self._request = None
        self._promoted.clear()
