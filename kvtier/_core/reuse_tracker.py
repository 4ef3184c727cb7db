"""Counts how often each chunk was offered: chunks that are offered once may not be worth a slot."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

from kvtier.keys import OffloadKey


class ReuseTracker:
    """Counts offers of keys, for ``store_threshold``."""

    def __init__(self, threshold: int, size: int) -> None:
        self._threshold = threshold
        self._size = size
        self._offers: OrderedDict[OffloadKey, int] = OrderedDict()

    def admitted(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        """Return the leading keys that this offer makes frequent enough."""
        if self._threshold < 2:
            return keys
        return list(takewhile(lambda key: self._offers.get(key, 0) + 1 >= self._threshold, keys))

    def count(self, keys: Sequence[OffloadKey]) -> None:
        """Count an offer of each key; of a long prompt only its front. Refused offers do not count."""
        if self._threshold < 2:
            return
        offers = self._offers
        for key in reversed(keys[: self._size]):
            offers[key] = offers.pop(key, 0) + 1  # moves the key to the end
        while len(offers) > self._size:
            offers.popitem(last=False)
