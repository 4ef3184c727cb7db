"""Requests that wait for chunks that no tier has yet, because another engine still computes or stores them.

Such a chunk is no miss until the request's time is over: its tiers are asked for it again, in growing
intervals. Meanwhile the request takes no turn in the line for promotions, and holds neither slots nor budget;
what arrives early is promoted as far as there is room, and may be evicted again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import inf

from kvtier.keys import OffloadKey

FIRST_PAUSE_S = 0.02
"""Seconds from an answer that a chunk is nowhere to the next question; doubled each time nothing is found."""

LONGEST_PAUSE_S = 0.25

MOST_KEYS = 64
"""Chunks that are asked for again at once: the first ones. Those behind them are of no use without them."""


class Wait:
    """What one request waits for, and until when.

    Args:
        longest_s: seconds, from when the request is deferred first.

    Attributes:
        until_s: when it ends, on the owner's clock; None before it has begun.
        keys: chunks that no tier had when asked last, in the order of the request's questions.
        again_s: when tiers are asked for them again.
        has_waited: whether there were such chunks.
        is_in_vain: whether it has ended without them.
        promoted: chunks that were promoted meanwhile; what of them was evicted since is promoted at the end.
    """

    __slots__ = (
        "_confirmed",
        "_longest_s",
        "_pause_s",
        "_wanted",
        "again_s",
        "has_waited",
        "is_in_vain",
        "keys",
        "promoted",
        "until_s",
    )

    def __init__(self, longest_s: float) -> None:
        self.until_s: float | None = None
        self.keys: dict[OffloadKey, None] = {}
        self.again_s = inf
        self.has_waited = False
        self.is_in_vain = False
        self.promoted: set[OffloadKey] = set()
        self._longest_s = longest_s
        self._pause_s = FIRST_PAUSE_S
        self._wanted: Collection[OffloadKey] = ()
        self._confirmed: set[OffloadKey] = set()  # a tier was asked, and does not have them

    @property
    def next_s(self) -> float:
        """When something is to be done for it, whatever happens."""
        return min(self.again_s, inf if self.until_s is None else self.until_s)

    def begin(self, now_s: float) -> float:
        """Start its time, unless it has begun before; return its end."""
        if self.until_s is None:
            self.until_s = now_s + self._longest_s
        return self.until_s

    def confirm(self, keys: Iterable[OffloadKey]) -> None:
        """Note that a tier was asked for these and does not have them. One that failed is not waited for."""
        self._confirmed.update(key for key in keys if key in self._wanted)

    def take(self, keys: Sequence[OffloadKey], now_s: float) -> list[OffloadKey]:
        """Wait for those of ``keys`` that are worth it: tiers say that they lack them; return the others.

        Where a chunk that was waited for is not worth it any more, those behind it are not either.
        """
        is_over = self.until_s is None or now_s >= self.until_s
        awaited = dict.fromkeys(key for key in keys if not is_over and key in self._confirmed)
        missed = [key for key in keys if key not in awaited]
        self._confirmed.difference_update(keys)
        if any(key in self.keys for key in missed):
            return [*missed, *awaited, *self.give_up()]
        if awaited:
            self.has_waited = True
            self.again_s = now_s + self._pause_s
            self.keys.update(awaited)
        return missed

    def update(
        self, wanted: Sequence[OffloadKey], found: Sequence[Collection[OffloadKey]], now_s: float
    ) -> None:
        """Wait no longer for what was found, or is not wanted any more."""
        self._wanted = frozenset(wanted)
        left = [key for key in wanted if key in self.keys and not any(key in keys for keys in found)]
        if len(left) < len(self.keys):
            self._pause_s, self.again_s = FIRST_PAUSE_S, now_s
        self.keys = dict.fromkeys(left)

    def ask_again(self, now_s: float) -> list[OffloadKey]:
        """Return the chunks that tiers are to be asked for now."""
        if now_s < self.again_s or not self.keys:
            return []
        self.again_s = now_s + self._pause_s
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
        return list(self.keys)[:MOST_KEYS]

    def give_up(self) -> list[OffloadKey]:
        """End it; return what it was for."""
        left, self.keys = list(self.keys), {}
        self.is_in_vain = self.is_in_vain or bool(left)
        self.until_s = -inf
        return left
