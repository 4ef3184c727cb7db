"""Adaptive replacement: recency and reuse share the room, shifted by chunks that were evicted too soon.

The algorithm is Megiddo's and Modha's "ARC: A Self-Tuning, Low Overhead Replacement Cache" (FAST 2003), with
two changes that pins need: pinned chunks are outside of both lists and remember their list, and evictions are
requested in batches, ahead of the insertions.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.keys import OffloadKey
from kvtier.policies._aged import AgedKeys, deepest, run_of, take_first
from kvtier.policies._base import EvictionPolicy, Run

_Ghosts = dict[OffloadKey, None]


class ARC(EvictionPolicy):
    """Adaptive replacement cache."""

    def __init__(self, capacity: int = 0) -> None:
        super().__init__(capacity)
        self.clear()

    def clear(self) -> None:
        self._recent = AgedKeys()  # seen once
        self._frequent = AgedKeys()  # seen more than once
        self._ghosts_recent: _Ghosts = {}  # evicted from _recent not long ago
        self._ghosts_frequent: _Ghosts = {}
        self._pinned: dict[OffloadKey, AgedKeys] = {}
        self._now = 0
        self._target = 0.0  # target number of chunks in _recent

    @property
    def target_share(self) -> float:
        """Target share of the slots for chunks seen once."""
        return self._target / self.capacity if self.capacity else 0.0

    def add(self, keys: Sequence[OffloadKey], *, used: bool) -> None:
        self.add_run(run_of(keys, self._now + 1), keys, used=used)

    def add_run(self, run: Run, keys: Sequence[OffloadKey], *, used: bool) -> None:
        self._now = max(self._now, run.time)
        pinned, ghosts_recent, ghosts_frequent = self._pinned, self._ghosts_recent, self._ghosts_frequent
        if all(known.keys().isdisjoint(keys) for known in (pinned, ghosts_recent, ghosts_frequent)):
            (self._frequent if used else self._recent).add(run, keys)
            return
        recent: list[OffloadKey] = []
        frequent: list[OffloadKey] = []
        for key in reversed(keys):
            if key in pinned:
                known = pinned.pop(key) is self._frequent
            elif key in ghosts_recent or key in ghosts_frequent:
                self._adapt_target(key)
                known = True
            else:
                known = False
            (frequent if used or known else recent).append(key)
        self._recent.add(run, recent[::-1])
        self._frequent.add(run, frequent[::-1])

    def _adapt_target(self, key: OffloadKey) -> None:
        """Shift the target: a ghost's return shows that its list should have had more room."""
        recent, frequent = self._ghosts_recent, self._ghosts_frequent
        if key in recent:
            self._target = min(self.capacity, self._target + max(1.0, len(frequent) / len(recent)))
            del recent[key]
        else:
            self._target = max(0.0, self._target - max(1.0, len(recent) / len(frequent)))
            del frequent[key]

    def pin(self, keys: Sequence[OffloadKey]) -> None:
        recent = [key for key in keys if key in self._recent]
        frequent = [key for key in keys if key in self._frequent]
        for home, those in ((self._recent, recent), (self._frequent, frequent)):
            home.remove(those)
            self._pinned.update(dict.fromkeys(those, home))

    def evict(self, count: int) -> list[OffloadKey]:
        recent, frequent = self._recent, self._frequent
        evicted: list[OffloadKey] = []
        surplus = len(recent) - int(self._target)
        while (left := min(count - len(evicted), len(self))) > 0:
            is_recent = surplus > 0 or not len(frequent)
            run = (recent if is_recent else frequent).oldest()
            most = min(left, surplus) if is_recent and len(frequent) else left
            homes = {part: home for home in (recent, frequent) if (part := home.part(run)) is not None}
            part, most = deepest(homes, most)
            taken = homes[part].pop_of(run, most)
            if homes[part] is recent:
                surplus -= len(taken)
                self._remember(self._ghosts_recent, taken)
            else:
                self._remember(self._ghosts_frequent, taken)
            evicted += taken
        return evicted

    def _remember(self, ghosts: _Ghosts, keys: list[OffloadKey]) -> None:
        ghosts.update(dict.fromkeys(keys))
        # Up to 1/16 too many is allowed, so that the walk to the front of a dict removes many at once.
        if len(ghosts) > self.capacity + self.capacity // 16:
            take_first(ghosts, len(ghosts) - self.capacity)

    def __len__(self) -> int:
        return len(self._recent) + len(self._frequent)

    def __contains__(self, key: object) -> bool:
        return key in self._recent or key in self._frequent
