"""Adaptive replacement: recency and reuse share the room by what turned out to be evicted too soon.

The algorithm is that of Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache"
(FAST 2003), changed in two ways that the pins need: chunks that are pinned stand outside of both
lists and remember theirs, and eviction is asked for in batches, ahead of the insertions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvtier.core.policies.base import EvictionPolicy
from kvtier.keys import OffloadKey

_Keys = OrderedDict[OffloadKey, None]


class ARC(EvictionPolicy):
    """Adaptive replacement cache."""

    def __init__(self, capacity: int = 0) -> None:
        super().__init__(capacity)
        self._recent: _Keys = OrderedDict()  # seen once
        self._frequent: _Keys = OrderedDict()  # seen more than once
        self._ghosts_recent: _Keys = OrderedDict()  # evicted from _recent not long ago
        self._ghosts_frequent: _Keys = OrderedDict()
        self._pinned: dict[OffloadKey, _Keys] = {}
        self._target = 0.0  # how many chunks _recent should have

    def add(self, keys: Sequence[OffloadKey], *, used: bool) -> None:
        pinned, recent, frequent = self._pinned, self._recent, self._frequent
        for key in reversed(keys):
            home = pinned.pop(key, None)
            if home is None:
                home = self._first_home(key)
            if used:
                home = frequent
            (frequent if home is frequent else recent)[key] = None

    def _first_home(self, key: OffloadKey) -> _Keys:
        """Say where a key belongs that was not here; a ghost's return moves the target."""
        recent, frequent = self._ghosts_recent, self._ghosts_frequent
        if key in recent:
            self._target = min(self.capacity, self._target + max(1.0, len(frequent) / len(recent)))
            del recent[key]
            return self._frequent
        if key in frequent:
            self._target = max(0.0, self._target - max(1.0, len(recent) / len(frequent)))
            del frequent[key]
            return self._frequent
        return self._recent

    def pin(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            home = self._recent if key in self._recent else self._frequent
            del home[key]
            self._pinned[key] = home

    def evict(self, count: int) -> list[OffloadKey]:
        recent, frequent = self._recent, self._frequent
        count = min(count, len(recent) + len(frequent))
        surplus = max(0, len(recent) - int(self._target))
        from_recent = max(min(count, surplus), count - len(frequent))
        victims = [recent.popitem(last=False)[0] for _ in range(from_recent)]
        others = [frequent.popitem(last=False)[0] for _ in range(count - from_recent)]
        self._remember(self._ghosts_recent, victims)
        self._remember(self._ghosts_frequent, others)
        return victims + others

    def _remember(self, ghosts: _Keys, keys: list[OffloadKey]) -> None:
        ghosts.update(dict.fromkeys(keys))
        for _ in range(len(ghosts) - self.capacity):
            ghosts.popitem(last=False)

    def forget(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            self._pinned.pop(key, None)
            self._recent.pop(key, None)
            self._frequent.pop(key, None)

    def clear(self) -> None:
        for keys in (self._recent, self._frequent, self._ghosts_recent, self._ghosts_frequent, self._pinned):
            keys.clear()
        self._target = 0.0

    def __len__(self) -> int:
        return len(self._recent) + len(self._frequent)

    def __contains__(self, key: object) -> bool:
        return key in self._recent or key in self._frequent
