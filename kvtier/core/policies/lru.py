"""Least recently used goes first; of chunks stored together, the tail of the prompt goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from kvtier.core.policies.base import EvictionPolicy
from kvtier.keys import OffloadKey


class LRU(EvictionPolicy):
    """Least recently used."""

    def __init__(self, capacity: int = 0) -> None:
        super().__init__(capacity)
        self._order: OrderedDict[OffloadKey, None] = OrderedDict()

    def add(self, keys: Sequence[OffloadKey], *, used: bool) -> None:  # noqa: ARG002
        self._order.update(dict.fromkeys(reversed(keys)))

    def pin(self, keys: Sequence[OffloadKey]) -> None:
        order = self._order
        for key in keys:
            del order[key]

    def evict(self, count: int) -> list[OffloadKey]:
        victims = list(islice(self._order, count))
        self.pin(victims)
        return victims

    def forget(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            self._order.pop(key, None)

    def clear(self) -> None:
        self._order.clear()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: object) -> bool:
        return key in self._order
