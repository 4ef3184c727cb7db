"""Requests that wait for chunks that no tier has yet, because another engine still computes or stores them.

Such a chunk is no miss until the request's time is over: tiers are asked for it again, after pauses that grow
with the time since the last arrival.
``Wait`` is what one request waits for. ``kvtier._core.promotion.waits`` asks the tiers, for all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice
from math import inf

from kvtier.keys import OffloadKey

FIRST_PAUSE_S = 0.02
"""Seconds, at least, from an answer that a chunk is nowhere to the next question."""

LONGEST_PAUSE_S = 0.25

PAUSE_SHARE = 1 / 8
"""The same, as a share of the time since the last arrival: the next one is noticed so much late at most."""

FEW_KEYS = 8
"""Chunks that are asked for again at once: the first ones. Those behind them are of no use without them."""

MOST_KEYS = 64
"""The same, directly after an arrival: there may be more by now."""

LAST_S = 1.0
"""Seconds from the end of a request's time within which tiers can be asked for the last time."""


class Wait:
    """What one request waits for, ``longest_s`` seconds from when it is deferred first."""

    __slots__ = (
        "_confirmed",
        "_failed",
        "_longest_s",
        "_most",
        "_news_s",
        "_wanted",
        "again_s",
        "has_news",
        "has_waited",
        "keys",
        "leading",
        "outcome",
        "promoted",
        "until_s",
    )

    def __init__(self, longest_s: float) -> None:
        self.until_s: float | None = None  # when its time is over; None before it has begun
        self.keys: dict[OffloadKey, None] = {}  # no tier had these; in the order of the request's questions
        self.again_s = inf  # when tiers are to be asked for them again; infinite while they are
        self.has_news = True  # there was an answer, or a question, since the last ``update``
        self.has_waited = False  # whether ``keys`` ever had some
        self.outcome = ""  # a word of ``reasons.WAITS``; empty before the end, and where all arrived
        self.leading = 0  # chunks of the request's last scan that were there, and are not held for it
        self.promoted: set[OffloadKey] = set()  # promoted while it waits; again at the end if evicted since
        self._longest_s = longest_s
        self._news_s = 0.0  # when it began, or something arrived
        self._most = FEW_KEYS
        self._wanted: Collection[OffloadKey] = ()
        self._confirmed: set[OffloadKey] = set()  # a tier was asked, and does not have them
        self._failed: set[OffloadKey] = set()  # a tier could not say, or not give them

    @property
    def ends_s(self) -> float:
        """When it ends even if no tier could be asked for the last time."""
        return -inf if self.until_s is None else self.until_s + LAST_S

    def begin(self, now_s: float) -> None:
        """Start its time, unless it has begun before."""
        if self.until_s is None:
            self.until_s, self._news_s = now_s + self._longest_s, now_s

    def is_over(self, now_s: float) -> bool:
        """Return whether the next answer is the last one."""
        return self.until_s is None or now_s >= self.until_s

    def note_answer(
        self,
        keys: Sequence[OffloadKey],
        missing: Sequence[OffloadKey],
        now_s: float,
        *,
        failed: bool,
        is_news: bool = True,
    ) -> None:
        """Note what a tier that was asked for ``keys`` said. What one tier failed at is not waited for."""
        self.has_news = self.has_news or is_news
        self.postpone(now_s)
        if failed:
            self._failed.update(key for key in keys if key in self._wanted)
            self._confirmed.difference_update(keys)
        else:
            self._confirmed.update(key for key in missing if key in self._wanted and key not in self._failed)

    def take(self, keys: Sequence[OffloadKey], now_s: float) -> list[OffloadKey]:
        """Wait for those of ``keys`` that are worth it: tiers say that they lack them; return the others.

        It ends where a chunk that was waited for is not worth it any more: the prompt has a gap there.
        """
        is_over = self.is_over(now_s)
        awaited = dict.fromkeys(key for key in keys if not is_over and key in self._confirmed)
        missed = [key for key in keys if key not in awaited]
        self._confirmed.difference_update(keys)
        self._failed.difference_update(keys)
        if any(key in self.keys for key in missed):
            self.give_up(now_s)
            return [*missed, *awaited]
        self.has_news = self.has_news or bool(missed)
        if awaited:
            self.has_waited = True
            self.keys.update(awaited)
            self.postpone(now_s)
        return missed

    def update(
        self,
        wanted: Sequence[OffloadKey],
        absent: Collection[OffloadKey],
        found: Sequence[Collection[OffloadKey]],
        now_s: float,
    ) -> None:
        """Wait no longer for what was found, is not wanted any more, or comes behind what is absent."""
        self.has_news = False
        self._wanted = frozenset(wanted)
        left: dict[OffloadKey, None] = {}
        for key in wanted if self.keys else ():
            if key in absent:
                break
            if key in self.keys and not any(key in keys for keys in found):
                left[key] = None
        if len(left) < len(self.keys):
            self._news_s, self._most, self.again_s = now_s, MOST_KEYS, now_s
            if not left and not all(any(key in keys for keys in found) for key in self.keys):
                self.outcome = self.outcome or "gave_up"
        self.keys = left

    def ask_again(self) -> list[OffloadKey]:
        """Return the chunks that tiers are to be asked for now. ``postpone`` if none can be."""
        self._most, most = FEW_KEYS, self._most
        self.again_s = inf
        return list(islice(self.keys, most))

    def postpone(self, now_s: float) -> None:
        """Put the next question off by a pause, or to the end of the time where that is earlier."""
        pause_s = PAUSE_SHARE * (now_s - self._news_s)
        self.again_s = now_s + min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, pause_s))
        if self.until_s is not None and now_s < self.until_s:
            self.again_s = min(self.again_s, self.until_s)

    def give_up(self, now_s: float) -> list[OffloadKey]:
        """End it; return what it was for."""
        left, self.keys = list(self.keys), {}
        if left:
            self.outcome = "in_vain" if self.is_over(now_s) else "gave_up"
        self.until_s = -inf
        return left
