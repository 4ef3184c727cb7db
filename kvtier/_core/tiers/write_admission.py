"""Which chunks are put into a tier: all of them, or those that were asked for more than once.

A put costs bandwidth, and a part of an SSD's life. It pays when the chunk is read back. How often that would
happen is measured on a sample of all that is offered, put or not: an offer of a chunk that was offered before
is a hit that a put would have made.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Literal

from kvtier._core.chunks import Chunk
from kvtier.keys import GROUP_BYTES, OffloadKey

WritePolicy = Literal["all", "adaptive", "reused"]

_SAMPLED = 16  # one key in so many is in the sample
_LEAST_WINDOW = 256  # offers of sampled keys before the share of reuse is judged
_LOW, _HIGH = 0.02, 0.05  # the share of reuse below which puts do not pay, and above which they do again
_TRIAL_CHUNKS = 256  # offered in a row, of which all are put although puts do not pay ...
_TRIAL_SHARE = 16  # ... and how many times as many are not
_BURST_S = 3600.0  # of the budget, that may be used at once
_DAY_S = 86_400.0


class WriteAdmission:
    """Chooses what is put into one tier.

    Args:
        policy: ``all``; ``reused``: what was offered or loaded before; ``adaptive``: as ``reused`` while less
            than one chunk in fifty is asked for again.
        chunks_per_day: the most chunks to put; None for no such bound. While less than half of an hour's
            share is left, only reused chunks are put.
        remembered: how many keys that were not put are remembered, and how many sampled ones.

    Attributes:
        skipped: keys that were not put, the oldest first.
        pays: whether enough is asked for again.
        put_chunks: chunks that it has kept so far.
        got_chunks: chunks that it has given so far.
    """

    def __init__(
        self, policy: WritePolicy = "all", chunks_per_day: float | None = None, remembered: int = 64_000
    ) -> None:
        self.skipped: OrderedDict[OffloadKey, None] = OrderedDict()
        self.pays = True
        self.put_chunks = self.got_chunks = 0
        self._policy = policy
        self._remembered = remembered
        self._sample: OrderedDict[OffloadKey, None] = OrderedDict()
        self._window = _LEAST_WINDOW
        self._offers = self._reuses = 0.0  # of sampled keys, lately
        self._offered = 0
        self._per_s = None if chunks_per_day is None else chunks_per_day / _DAY_S
        self._left = self._most_left = (self._per_s or 0.0) * _BURST_S
        self._filled_s: float | None = None

    def resize(self, slots: int) -> None:
        """Note the size of the primary tier: until it has been filled twice, nothing is known of reuse."""
        self._window = max(_LEAST_WINDOW, 2 * slots // _SAMPLED)

    def choose(self, chunks: Sequence[Chunk], now_s: float, *, reused: bool) -> tuple[Sequence[Chunk], str]:
        """Return which of the chunks are put, and why the others are not.

        Args:
            chunks: what may be put.
            now_s: the time.
            reused: whether they were asked for again; else they were computed and are offered.
        """
        if self._policy == "adaptive" and not reused:
            self._note_offers(chunks)
        self._refill(now_s)
        chosen = chunks
        if not (reused or self._takes_all()):
            chosen = [chunk for chunk in chunks if chunk.key in self.skipped]
            self._skip(chunk.key for chunk in chunks if chunk.key not in self.skipped)
        if self._per_s is not None and len(chosen) > self._left:
            most = int(self._left)
            self._skip(chunk.key for chunk in chosen[most:])
            return chosen[:most], "write_budget"
        return chosen, "not_reused"

    def begun(self, keys: Sequence[OffloadKey]) -> None:
        """Note that chunks are being put."""
        self._left -= len(keys)
        if self.skipped:
            for key in keys:
                self.skipped.pop(key, None)

    def kept(self, count: int) -> bool:
        """Note that the tier has kept chunks; return whether it was only ever written to, once."""
        before, self.put_chunks = self.put_chunks, self.put_chunks + count
        enough = self._window * _SAMPLED
        return before < enough <= self.put_chunks and not self.got_chunks

    def fetched(self, keys: Sequence[OffloadKey]) -> None:
        """Note that the tier has given chunks to requests."""
        self.got_chunks += len(keys)
        if self._policy == "adaptive":
            self._reuses += sum(map(_is_sampled, keys))
            self._judge()

    def _takes_all(self) -> bool:
        if self._per_s is not None and self._left < self._most_left / 2:
            return False
        if self._policy != "adaptive":
            return self._policy == "all"
        return self.pays or self._offered // _TRIAL_CHUNKS % _TRIAL_SHARE == 0

    def _note_offers(self, chunks: Sequence[Chunk]) -> None:
        self._offered += len(chunks)
        sample = self._sample
        for chunk in chunks:
            if _is_sampled(chunk.key):
                self._offers += 1
                self._reuses += chunk.key in sample
                sample[chunk.key] = None
                sample.move_to_end(chunk.key)
        _shorten(sample, self._remembered)
        self._judge()

    def _judge(self) -> None:
        """Bring ``pays`` up to date where enough was offered, and let what is older count half."""
        if self._reuses > _HIGH * max(self._offers, self._window):
            self.pays = True
        if self._offers >= self._window:
            self.pays = self._reuses > self._offers * (_LOW if self.pays else _HIGH)
            self._offers /= 2
            self._reuses /= 2

    def _refill(self, now_s: float) -> None:
        if self._per_s is not None:
            passed_s = 0.0 if self._filled_s is None else now_s - self._filled_s
            self._filled_s = now_s
            self._left = min(self._most_left, self._left + self._per_s * passed_s)

    def _skip(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            self.skipped[key] = None
            self.skipped.move_to_end(key)
        _shorten(self.skipped, self._remembered)


def _is_sampled(key: OffloadKey) -> bool:
    return key[-GROUP_BYTES - 1] % _SAMPLED == 0


def _shorten(keys: OrderedDict[OffloadKey, None], most: int) -> None:
    while len(keys) > most:
        keys.popitem(last=False)
