"""Write admission: whether a tier gets all chunks, or those that were asked for more than once.

A put costs bandwidth and SSD life. It pays when the chunk is read back. While everything is put, the tier's
hits show that. Otherwise a repeated offer of a chunk is a hit that a put would have made, if the tier is
large enough.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Literal

from kvtier._core.chunks import Chunk
from kvtier.keys import GROUP_BYTES, OffloadKey

WritePolicy = Literal["all", "adaptive", "reused"]

_SAMPLED = 16  # one key in this many is sampled
_LEAST_WINDOW = 256  # offers of sampled keys before the share of reuse is judged
_LOW, _HIGH = 0.02, 0.05  # puts stop paying below this share of reuse, and pay again above
_TRIAL_CHUNKS = 256  # consecutive offers that are all put although puts do not pay ...
_TRIAL_SHARE = 16  # ... in one of this many such series
_BURST_S = 3600.0  # the budget for this time may be used at once
_DAY_S = 86_400.0
_NONE: Mapping[str, int] = {}


class WriteAdmission:
    """Selects the chunks to put into one tier.

    Args:
        policy: ``all``; ``reused``: chunks that were offered or loaded before; ``adaptive``: as ``reused``
            while less than one chunk in fifty is asked for again.
        chunks_per_day: most chunks to put; None for no bound. Half of an hour's share is kept for reused
            chunks.
        remembered: least number of keys to remember that were not put, and of sampled ones.
    """

    def __init__(
        self, policy: WritePolicy = "all", chunks_per_day: float | None = None, remembered: int = 64_000
    ) -> None:
        self.skipped: OrderedDict[OffloadKey, None] = OrderedDict()  # keys that were not put, oldest first
        self.pays = True  # the share of reuse is high enough
        self.put_chunks = self.got_chunks = 0  # kept by the tier, and loaded from it, so far
        self._policy = policy
        self._remembered = remembered
        self._sample: OrderedDict[OffloadKey, None] = OrderedDict()
        self._window = _LEAST_WINDOW
        self._offers = self._reuses = 0.0  # recent ones of sampled keys
        self._offered = 0
        self._per_s = inf if chunks_per_day is None else chunks_per_day / _DAY_S
        self._left = self._most_left = max(1.0, self._per_s * _BURST_S)
        self._filled_s: float | None = None

    @property
    def is_selective(self) -> bool:
        return self._policy != "all" or self._per_s < inf

    def resize(self, slots: int) -> None:
        """Note the size of the primary tier: before it was filled twice, reuse is unknown."""
        self._window = max(_LEAST_WINDOW, 2 * slots // _SAMPLED)
        self._remembered = max(self._remembered, 2 * slots)

    def choose(
        self, chunks: Sequence[Chunk], now_s: float, *, reused: bool
    ) -> tuple[Sequence[Chunk], Mapping[str, int]]:
        """Return the chunks to put, and the number of others by reason.

        ``reused``: they were asked for again; otherwise they were computed and are offered.
        """
        if not self.is_selective:
            return chunks, _NONE
        self._refill(now_s)
        once = set() if reused else {chunk.key for chunk in chunks if chunk.key not in self.skipped}
        wanted = chunks
        if once and self._policy != "all" and not (self._policy == "adaptive" and self.pays):
            wanted = [
                chunk
                for place, chunk in enumerate(chunks, self._offered)
                if chunk.key not in once or self._is_in_trial(place)
            ]
        not_reused = len(chunks) - len(wanted)
        if self._per_s < inf:
            wanted = self._within_budget(wanted, once)
        if self._policy == "adaptive" and not reused:
            self._note_offers(chunks)
        if len(wanted) == len(chunks):
            return chunks, _NONE
        put = {chunk.key for chunk in wanted}
        self.skip(chunk.key for chunk in chunks if chunk.key not in put)
        return wanted, {"not_reused": not_reused, "write_budget": len(chunks) - not_reused - len(wanted)}

    def note_put(self, keys: Sequence[OffloadKey]) -> None:
        self._left -= len(keys)
        self._forget(keys)

    def note_kept(self, count: int) -> bool:
        """Note chunks that the tier kept; return, once, whether all are put and none was ever loaded."""
        before, self.put_chunks = self.put_chunks, self.put_chunks + count
        is_enough = before < self._window * _SAMPLED <= self.put_chunks
        return is_enough and not self.got_chunks and not self.is_selective

    def note_loaded(self, keys: Sequence[OffloadKey]) -> None:
        """Note that requests loaded chunks from the tier."""
        self.got_chunks += len(keys)
        if self._policy == "adaptive":
            most = 2 * _HIGH * self._window  # otherwise old loads would count for too long
            self._reuses = min(self._reuses + sum(map(_is_sampled, keys)), most)
        self._forget(keys)

    def skip(self, keys: Iterable[OffloadKey]) -> None:
        """Remember keys that were not put or not kept: they are put at their next use."""
        if self.is_selective:
            for key in keys:
                self.skipped[key] = None
                self.skipped.move_to_end(key)
            _shorten(self.skipped, self._remembered)

    def _forget(self, keys: Iterable[OffloadKey]) -> None:
        if self.skipped:
            for key in keys:
                self.skipped.pop(key, None)

    def _is_in_trial(self, place: int) -> bool:
        """Return whether the offer of this number is put as a trial."""
        return self._policy == "adaptive" and place // _TRIAL_CHUNKS % _TRIAL_SHARE == 0

    def _within_budget(self, chunks: Sequence[Chunk], once: set[OffloadKey]) -> Sequence[Chunk]:
        left = int(self._left)
        left_once = max(0, int(self._left - self._most_left / 2)) if self._most_left >= 2 else left
        wanted = []
        for chunk in chunks:
            is_once = chunk.key in once
            if left > 0 and (left_once > 0 or not is_once):
                wanted.append(chunk)
                left -= 1
                left_once -= is_once
        return wanted

    def _note_offers(self, chunks: Sequence[Chunk]) -> None:
        self._offered += len(chunks)
        sample = self._sample
        for chunk in chunks:
            if _is_sampled(chunk.key):
                self._offers += 1
                self._reuses += not self.pays and chunk.key in sample
                sample[chunk.key] = None
                sample.move_to_end(chunk.key)
        _shorten(sample, self._remembered)
        if self._offers >= self._window:
            self._judge()

    def _judge(self) -> None:
        """Update ``pays`` after a window of offers, and halve the weight of older ones."""
        share = self._reuses / self._offers
        self.pays = share > (_LOW if self.pays else _HIGH)
        self._offers /= 2
        self._reuses /= 2

    def _refill(self, now_s: float) -> None:
        if self._per_s < inf:
            passed_s = 0.0 if self._filled_s is None else now_s - self._filled_s
            self._filled_s = now_s
            self._left = min(self._most_left, self._left + self._per_s * passed_s)


def _is_sampled(key: OffloadKey) -> bool:
    return key[-GROUP_BYTES - 1] % _SAMPLED == 0


def _shorten(keys: OrderedDict[OffloadKey, None], most: int) -> None:
    while len(keys) > most:
        keys.popitem(last=False)
