"""Evicts as LHD, ARC or LRU would, whichever of them hits most in a simulation on a sample of the keys.

The chunks are kept in LHD's order: by number of uses, each class by time of its last use. It also contains
LRU's and ARC's order, so a change of the rule moves nothing. The hits of each rule are learned from small
caches of keys, as in Waldspurger et al., "Cache Modeling and Optimization using Miniature Simulations" (ATC
2017).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from kvtier.keys import OffloadKey
from kvtier.policies._arc import ARC
from kvtier.policies._base import EvictionPolicy, Run
from kvtier.policies._lhd import LHD, TIME, Part
from kvtier.policies._lru import LRU
from kvtier.policies._reuse import CLASSES, ReuseModel

_LHD, _ARC, _LRU = range(3)

_LEAST_SLOTS = 1024  # Minimum number of slots of simulated caches, because smaller caches prove little.
_LEAST_SAMPLED = 4  # out of 256 keys, that is 1 in 64
_SLACK = 64  # A 64th of the slots is freed at once, because a call costs more than a key.
_REVIEW_USES = 32
_HALF_LIFE = 4.0  # number of capacities of uses after which a hit counts half
_MARGIN = 0.01
_NOISE = 4.0  # hits


class _Follower(LHD):
    """LHD with the model of another LHD, which sees all keys and has ``slots`` slots."""

    def __init__(self, capacity: int, slots: int, model: ReuseModel) -> None:
        super().__init__(capacity)
        self._model = model
        self._set_pace(slots)  # the clock counts all uses, not only sampled ones

    def _note(self, record: int, is_use: bool, count: int) -> None:
        pass

    def _learn(self) -> None:
        pass


class _Contest:
    """A cache for each rule, with the sample's share of the slots."""

    def __init__(self, capacity: int, model: ReuseModel) -> None:
        self.chosen = _LHD  # the rule to follow
        self._bound = max(_LEAST_SAMPLED, min(256, _LEAST_SLOTS * 256 // max(1, capacity)))
        self._slots = slots = capacity * self._bound // 256
        self.arc = ARC(slots)
        self._policies: tuple[EvictionPolicy, ...] = (_Follower(slots, capacity, model), self.arc, LRU(slots))
        self._hits = [0.0] * len(self._policies)
        self._uses = 0
        self._run: Run | None = None  # the last one
        # All keys of that run so far were already looked up in each cache.
        self._is_whole = [True] * len(self._policies)

    def sample(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        bound = self._bound
        return [key for key in keys if key[-5] < bound]

    def use(self, run: Run, keys: Sequence[OffloadKey], *, is_use: bool) -> None:
        """Look up keys of a run in each cache, and store the missing ones."""
        if run is not self._run:
            self._run, self._is_whole = run, [True] * len(self._policies)
        for index, policy in enumerate(self._policies):
            found = [key for key in keys if key in policy]
            if is_use and self._is_whole[index]:
                self._hits[index] += sum(1 for _ in takewhile(policy.__contains__, keys))
                self._is_whole[index] = len(found) == len(keys)
            policy.pin(found)
            short = len(policy) + len(keys) - self._slots
            if short > 0:
                policy.evict(short + self._slots // _SLACK)
            if found:
                policy.add_run(run, found, used=is_use)
            if len(found) < len(keys):
                policy.add_run(run, [key for key in keys if key not in policy], used=False)
        if is_use:
            self._uses += len(keys)
            if self._uses >= _REVIEW_USES:
                self._review()

    def _review(self) -> None:
        hits = self._hits
        best = max(hits)
        if best > hits[self.chosen] * (1 + _MARGIN) + _NOISE:
            self.chosen = hits.index(best)
        decay = 0.5 ** (self._uses / (_HALF_LIFE * max(1, self._slots)))
        self._hits = [hit * decay for hit in hits]
        self._uses = 0


class Auto(LHD):
    """LHD, ARC or LRU, whichever hits most in a simulation on a sample of the keys."""

    # Created when needed, because memory arrives in many pieces, each of which is a resize.
    _contest: _Contest | None = None

    def resize(self, capacity: int) -> None:
        super().resize(capacity)
        self._contest = None

    def clear(self) -> None:
        super().clear()
        self._contest = None

    def add_run(self, run: Run, keys: Sequence[OffloadKey], *, used: bool) -> None:
        contest = self._contest = self._contest or _Contest(self.capacity, self._model)
        sampled = contest.sample(keys)
        if sampled:
            # A chunk that returns unread from a put was counted when it was stored.
            contest.use(run, sampled, is_use=used or sampled[0] not in self._pinned)
        super().add_run(run, keys, used=used)

    def _choose(self) -> Part:
        contest = self._contest
        if contest is None or contest.chosen == _LHD:
            return super()._choose()
        rings = [ring for ring in self._rings if ring.held]
        if contest.chosen == _ARC:
            recent = [ring for ring in self._rings[:CLASSES] if ring.held]
            surplus = sum(ring.held for ring in recent) - contest.arc.target_share * self.capacity
            rings = recent if surplus > 0 else rings[len(recent) :] or recent
        return min(map(self._oldest, rings), key=lambda part: part.record & TIME)
