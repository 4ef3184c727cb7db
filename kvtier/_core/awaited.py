"""Requests that wait for chunks that no tier has yet, because another engine still computes or stores them.

Such a chunk is no miss until the request's time is over. Tiers are asked for it again, after pauses that grow
with the time since the last arrival. ``Wait`` is the state of one request. ``kvtier._core.promotion.waits``
asks the tiers for all requests.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice
from math import inf

from kvtier.keys import OffloadKey

FIRST_PAUSE_S = 0.02
"""Least seconds between an answer that a chunk is nowhere and the next question."""

LONGEST_PAUSE_S = 0.25

PAUSE_SHARE = 1 / 8
"""The same, as a share of the time since the last arrival: it bounds how late the next arrival is noticed."""

FEW_KEYS = 8
"""Chunks asked for again at once: the first ones. Later chunks are of no use without them."""

MOST_KEYS = 64
"""The same, directly after an arrival, when more chunks are likely to be there."""

LAST_S = 1.0
"""Seconds after the end of a request's time within which tiers can be asked for the last time."""


class Wait:
    """The wait of one request. It lasts ``longest_s`` seconds from the first chunk that is deferred."""

    def __init__(self, longest_s: float) -> None:
        self.until_s: float | None = None  # when its time is over; None before it begins
        self.keys: dict[OffloadKey, None] = {}  # keys that no tier had, in the order of the request's lookups
        self.again_s = inf  # when tiers are to be asked for them again; infinite while they are
        self.has_waited = False  # ``keys`` was not empty at some time
        self.outcome = ""  # a word of ``reasons.WAITS``; empty before the end, and if all arrived
        self.leading = 0  # chunks found by the request's last scan and not held for it
        self.promoted: set[OffloadKey] = set()  # promoted while it waits; again at the end if evicted since
        self._longest_s = longest_s
        self._news_s = 0.0  # when it began, or the last chunk arrived
        self._most = FEW_KEYS
        self._wanted: Collection[OffloadKey] = ()
        self._confirmed: set[OffloadKey] = set()  # a tier was asked and lacks them
        self._failed: set[OffloadKey] = set()  # a tier failed to answer, or to return them

    @property
    def ends_s(self) -> float:
        """Return when it ends even if no tier could be asked for the last time."""
        return -inf if self.until_s is None else self.until_s + LAST_S

    def start_clock(self, now_s: float) -> None:
        """Start its time, unless it has started."""
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
    ) -> None:
        """Note a tier's answer for ``keys``. Chunks that a tier failed to return are not awaited."""
        self.postpone(now_s)
        if failed:
            self._failed.update(key for key in keys if key in self._wanted)
            self._confirmed.difference_update(keys)
        else:
            self._confirmed.update(key for key in missing if key in self._wanted and key not in self._failed)

    def await_missing(self, keys: Sequence[OffloadKey], now_s: float) -> list[OffloadKey]:
        """Wait for the ``keys`` that tiers report missing; return the others.

        If the others include an awaited key, the wait ends and all keys return: the prompt has a gap there.
        """
        is_over = self.is_over(now_s)
        awaited = dict.fromkeys(key for key in keys if not is_over and key in self._confirmed)
        missed = [key for key in keys if key not in awaited]
        self._confirmed.difference_update(keys)
        self._failed.difference_update(keys)
        if any(key in self.keys for key in missed):
            self.give_up(now_s)
            return [*missed, *awaited]
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
        """Drop keys that were found, are no longer wanted, or follow an absent one."""
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
        """Return the chunks to ask tiers for now. Call ``postpone`` if no tier can be asked."""
        self._most, most = FEW_KEYS, self._most
        self.again_s = inf
        return list(islice(self.keys, most))

    def postpone(self, now_s: float) -> None:
        """Delay the next question by a pause, or to the end of the time if that is earlier."""
        pause_s = PAUSE_SHARE * (now_s - self._news_s)
        self.again_s = now_s + min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, pause_s))
        if self.until_s is not None and now_s < self.until_s:
            self.again_s = min(self.again_s, self.until_s)

    def give_up(self, now_s: float) -> list[OffloadKey]:
        left, self.keys = list(self.keys), {}
        if left:
            self.outcome = "in_vain" if self.is_over(now_s) else "gave_up"
        self.until_s = -inf
        return left
