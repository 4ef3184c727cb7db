"""Evicts the least recently used chunks first, and among chunks of one request the prompt's tail."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.keys import OffloadKey
from kvtier.policies._aged import AgedKeys, run_of
from kvtier.policies._base import EvictionPolicy, Run


class LRU(EvictionPolicy):
    """Least recently used."""

    def __init__(self, capacity: int = 0) -> None:
        super().__init__(capacity)
        self._order = AgedKeys()
        self._now = 0

    def add(self, keys: Sequence[OffloadKey], *, used: bool) -> None:
        self.add_run(run_of(keys, self._now + 1), keys, used=used)

    def add_run(self, run: Run, keys: Sequence[OffloadKey], *, used: bool) -> None:  # noqa: ARG002
        self._now = max(self._now, run.time)
        self._order.add(run, keys)

    def pin(self, keys: Sequence[OffloadKey]) -> None:
        self._order.remove(keys)

    def evict(self, count: int) -> list[OffloadKey]:
        return self._order.pop_oldest(count)

    def clear(self) -> None:
        self._order.clear()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: object) -> bool:
        return key in self._order
