"""Publishes uses of chunks to all processes through the files' times, and learns from them.

A table of fixed size remembers use counts beyond eviction. If a root holds more chunks than the table, it
remembers a sample of all keys.
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

# A chunk's use is published once in an interval, because that costs a write. An interval ends after:
PUBLISH_EVERY_S: Final = 300.0
_PUBLISHED_IN_TTL: Final = 4  # a quarter of ``ttl_s``, if that is shorter
_PUBLISHED_IN_PUTS: Final = 0.05  # puts of this share of the chunks that the root has room for
WAITING: Final = 65_536  # chunks whose use is to be published or was in this interval; some 150 bytes each
_REMEMBERED: Final = 1 << 20  # chunks in the table; 8 bytes each
_REMEMBERED_IN_ROOM: Final = 4  # remembered keys for each chunk that the root has room for
_TIME_BITS: Final = 42  # bits of a record for milliseconds; the higher ones are the use count
_TIME: Final = (1 << _TIME_BITS) - 1
_UNIT_MS: Final = ages.UNIT_US // 1000


class Uses:
    """Notes uses and puts of chunks, to publish them and to learn from them. Any thread may call it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, ttl_s: float | None = None) -> None:
        self._clock = clock
        self._every_s = PUBLISH_EVERY_S if ttl_s is None else min(PUBLISH_EVERY_S, ttl_s / _PUBLISHED_IN_TTL)
        self._lock = threading.Lock()
        self._table = Ghosts()
        self._table.resize(_REMEMBERED)
        self.room = 0  # number of chunks that the root has room for; 0 if not known yet
        self._began_at = self._interval_at = clock()
        self._reset()

    def _reset(self) -> None:
        self.model = ages.new_model()
        self._waiting: dict[OffloadKey, int] = {}
        self._uses = 0  # since the last update of the model
        self._updated_at = self._clock()
        self._start_interval()

    def _start_interval(self) -> None:
        """Start an interval; publish and learn from each chunk's first use in it."""
        self._published: set[OffloadKey] = set()
        now = self._clock()
        self._interval_s, self._interval_at, self._puts = now - self._interval_at, now, 0

    def worth(self) -> ages.Worth:
        with self._lock:
            # A chunk's file has the time of its first use in this interval or in the one before.
            lag_s = max(self._clock() - self._interval_at, self._interval_s)
            return ages.worth_of(self.model, min(lag_s, self._every_s))

    def note_put(self, keys: Sequence[OffloadKey]) -> None:
        """Note puts of chunks, in prompt order."""
        with self._lock:
            for key, uses in self._learn(keys, least=1, in_order=True):
                if uses > 1 and len(self._waiting) < WAITING:
                    self._waiting[key] = uses
            self._puts += len(keys)
            if self.room and self._puts >= _PUBLISHED_IN_PUTS * self.room:
                self._start_interval()

    def note(self, keys: Sequence[OffloadKey], *, in_order: bool) -> None:
        """Note uses of chunks that exist; ``in_order``: in prompt order."""
        with self._lock:
            if self._clock() - self._interval_at >= self._every_s or len(self._published) >= WAITING:
                self._start_interval()
            if self._published.issuperset(keys):
                return
            fresh = [key for key in keys if key not in self._published]
            self._published.update(fresh)
            if len(self._waiting) < WAITING:  # Otherwise the disk hangs, and the notes are dropped.
                self._waiting.update(self._learn(fresh, least=2, in_order=in_order))

    def _learn(
        self, keys: Sequence[OffloadKey], *, least: int, in_order: bool
    ) -> list[tuple[OffloadKey, int]]:
        """Note uses in the table and the model. Returns each chunk's use count, in reverse order.

        ``least`` is the use count of chunks that are not remembered.
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
            # A chunk was used whenever a later one of its prompt was: this fills gaps in the table.
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
        """Teach the model ``count`` uses of chunks with a record. Each is a chunk's ``uses``th use."""
        self.model.used[ages.CLASS_OF_USES[uses]] += count
        if record:
            bin_ = self.model.bin_of((now_ms - (record & _TIME)) / _UNIT_MS)
            self.model.reused[ages.CLASS_OF_USES[record >> _TIME_BITS]][bin_] += count

    def take_unpublished(self, most: int) -> list[tuple[OffloadKey, int]]:
        """Remove and return up to ``most`` chunks to publish, each with its class of ``ages``."""
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
        """Forget everything, for another epoch."""
        with self._lock:
            self._table.clear()
            self._reset()


def _next(record: int, least: int, now_ms: int) -> tuple[int, int]:
    """Return the minimum use count of a chunk after a use now, and its new record."""
    uses = record >> _TIME_BITS
    # get and touch of one request, or concurrent requests
    if record and now_ms - (record & _TIME) < _UNIT_MS:
        return max(least, uses), record
    uses = max(least, min(uses + 1, MAX_USES))
    return uses, uses << _TIME_BITS | now_ms
