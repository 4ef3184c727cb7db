"""When chunks are used, published to all processes through their files; and what is learned from that.

How often a chunk was used outlives its file, in a table of fixed size: a chunk that is put again was evicted
in between. In a root with more chunks than the table has room for, it remembers a sample of all keys.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final

from kvtier.keys import OffloadKey
from kvtier.policies._ghosts import Ghosts
from kvtier.policies._reuse import MAX_USES
from kvtier.tiers.fs._maintenance import ages

PUBLISH_EVERY_S: Final = 300.0
"""A chunk's use is published about so often, at least: each time costs a write."""

_PUBLISHED_IN_TTL: Final = 4
"""It is published so often in a ``ttl_s``, where that is shorter."""

_PUBLISHED_IN_PUTS: Final = 0.05
"""And each time that this share of the chunks that there is room for was put."""

WAITING: Final = 65_536
"""Chunks whose use waits to be published, or was not long ago; with some 150 bytes for each."""

_REMEMBERED: Final = 1 << 20
"""Chunks whose uses are remembered, with 8 bytes for each."""

_REMEMBERED_IN_ROOM: Final = 4
"""So many are remembered for each chunk that there is room for."""

_TIME_BITS: Final = 42  # of milliseconds, in what is remembered of a chunk; its uses are above
_TIME: Final = (1 << _TIME_BITS) - 1
_UNIT_MS: Final = ages.UNIT_US // 1000


class Uses:
    """Notes which chunks are used and put, to publish it and to learn from it. Any thread may call it.

    Args:
        ttl_s: how long after its last use a chunk is removed.

    Attributes:
        room: how many chunks the root has room for; 0: not known yet.
        model: what is learned.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, ttl_s: float | None = None) -> None:
        self._clock = clock
        self._every_s = PUBLISH_EVERY_S if ttl_s is None else min(PUBLISH_EVERY_S, ttl_s / _PUBLISHED_IN_TTL)
        self._lock = threading.Lock()
        self._table = Ghosts()
        self._table.resize(_REMEMBERED)
        self.room = 0
        self._began_at = self._begun_at = clock()
        self._reset()

    def _reset(self) -> None:
        self.model = ages.new_model()
        self._waiting: dict[OffloadKey, int] = {}
        self._uses = 0  # since the model was updated
        self._updated_at = self._clock()
        self._begin()

    def _begin(self) -> None:
        """Have each chunk's next use published, and learn from it. Until then the others are no news."""
        self._published: set[OffloadKey] = set()
        now = self._clock()
        self._interval_s, self._begun_at, self._puts = now - self._begun_at, now, 0

    def worth(self) -> ages.Worth:
        """Return what keeping chunks is worth, as far as is known."""
        with self._lock:
            # A chunk's file says when it was used first in this interval, or in the one before.
            lag_s = max(self._clock() - self._begun_at, self._interval_s)
            return ages.worth_of(self.model, min(lag_s, self._every_s))

    def note_put(self, keys: Sequence[OffloadKey]) -> None:
        """Note that chunks were put, in the order of their prompt."""
        with self._lock:
            for key, uses in self._learn(keys, least=1, in_order=True):
                if uses > 1 and len(self._waiting) < WAITING:
                    self._waiting[key] = uses
            self._puts += len(keys)
            if self.room and self._puts >= _PUBLISHED_IN_PUTS * self.room:
                self._begin()

    def note(self, keys: Sequence[OffloadKey], *, in_order: bool) -> None:
        """Note that chunks were used that are there; ``in_order``: in the order of their prompt."""
        with self._lock:
            if self._clock() - self._begun_at >= self._every_s or len(self._published) >= WAITING:
                self._begin()
            if self._published.issuperset(keys):
                return
            fresh = [key for key in keys if key not in self._published]
            self._published.update(fresh)
            if len(self._waiting) < WAITING:  # else the disk hangs
                self._waiting.update(self._learn(fresh, least=2, in_order=in_order))

    def _learn(
        self, keys: Sequence[OffloadKey], *, least: int, in_order: bool
    ) -> list[tuple[OffloadKey, int]]:
        """Note uses in the table and the model. Returns how often each chunk was used, the last one first.

        ``least`` is how often it was used where nothing is remembered of it.
        """
        now_ms = 1 + int(1000 * (self._clock() - self._began_at))
        recall, remember = self._table.recall, self._table.remember
        remembered = max(1, 256 * _REMEMBERED // max(_REMEMBERED, _REMEMBERED_IN_ROOM * self.room))
        known, (uses, record) = 0, _next(0, least, now_ms)
        learned: dict[tuple[int, int], int] = {}
        found = []
        for key in reversed(keys):
            is_remembered = key[-5] < remembered
            old = recall(key) if is_remembered else 0
            # A chunk was used whenever one behind it was: this mends what the table does not remember.
            if old != known and not (in_order and old < known):
                known, (uses, record) = old, _next(old, least, now_ms)
            if is_remembered and record != known:
                remember(key, record)
                learned[known, uses] = learned.get((known, uses), 0) + 1
            found.append((key, uses))
        for (known, uses), count in learned.items():
            self._teach(known, uses, now_ms, count)
        self._uses += len(keys)
        return found

    def _teach(self, record: int, uses: int, now_ms: int, count: int) -> None:
        """Have the model learn that so many chunks of a record are used, now for the ``uses``th time."""
        self.model.used[ages.CLASS_OF_USES[uses]] += count
        if record:
            bin_ = self.model.bin_of((now_ms - (record & _TIME)) / _UNIT_MS)
            self.model.reused[ages.CLASS_OF_USES[record >> _TIME_BITS]][bin_] += count

    def take(self, most: int) -> list[tuple[OffloadKey, int]]:
        """Return chunks whose uses are to be published, each with its class of ``ages``, and forget them."""
        with self._lock:
            keys = list(islice(self._waiting, most))
            taken = [(key, ages.CLASS_OF_USES[self._waiting.pop(key)]) for key in keys]
            self._update()
        return taken

    def _update(self) -> None:
        now = self._clock()
        units = (now - self._updated_at) * 1000 / _UNIT_MS
        if units >= 1.0 and self.room:
            self.model.update(units, self._uses / self.room)
            self._updated_at, self._uses = now, 0

    def clear(self) -> None:
        """Forget everything: the chunks are those of another epoch."""
        with self._lock:
            self._table.clear()
            self._reset()


def _next(record: int, least: int, now_ms: int) -> tuple[int, int]:
    """Return how often a chunk was used, at least, after a use now, and its record then."""
    uses = record >> _TIME_BITS
    if record and now_ms - (record & _TIME) < _UNIT_MS:  # a request gets and uses it, or several at once
        return max(least, uses), record
    uses = max(least, min(uses + 1, MAX_USES))
    return uses, uses << _TIME_BITS | now_ms
