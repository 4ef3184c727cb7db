"""Which chunks were used, published to all processes through the times of their files, at long intervals.

A chunk that is put again was evicted in between, and its new file has no past. So puts are remembered, in a
table of fixed size, and a chunk that returns counts as used again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvtier.keys import OffloadKey
from kvtier.policies._ghosts import Ghosts

TOUCH_EVERY_S: Final = 300.0
"""A file's time is set about so often: eviction looks back hours, and each time costs a write."""

_TOUCHES_IN_TTL: Final = 4
"""A file's time is set so often in a ``ttl_s``, where that is shorter."""

REMEMBERED: Final = 65_536
"""Chunks that are remembered, with some 150 bytes for each."""

PUTS_REMEMBERED: Final = 1 << 20
"""Chunks whose puts are remembered, with 8 bytes for each."""

_WINDOW: Final = 5
"""So many puts are remembered for each chunk that the root has room for: older ones say little."""


class Recency:
    """Gathers chunks that were used, each once in a while. Any thread may call it.

    ``ttl_s`` is after how long without a use a chunk is removed.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, ttl_s: float | None = None) -> None:
        self._clock = clock
        self._every_s = TOUCH_EVERY_S if ttl_s is None else min(TOUCH_EVERY_S, ttl_s / _TOUCHES_IN_TTL)
        self._lock = threading.Lock()
        self._waiting: set[OffloadKey] = set()
        self._noted: set[OffloadKey] = set()
        self._begun_at = clock()
        self._put_at = Ghosts()
        self._put_at.resize(PUTS_REMEMBERED)
        self._puts = 0

    def note_put(self, keys: Sequence[OffloadKey], room: int) -> None:
        """Note that chunks were put, in the order of their prompt; those put not long ago are used again.

        ``room`` is how many chunks the root has room for.
        """
        with self._lock:
            has_returned = False
            for key in reversed(keys):
                self._puts += 1
                before = self._put_at.recall(key)
                # A chunk returns whenever one behind it does: this mends what the table has forgotten.
                has_returned = has_returned or (before > 0 and self._puts - before <= _WINDOW * room)
                if has_returned and len(self._waiting) < REMEMBERED:
                    self._waiting.add(key)
                self._put_at.remember(key, self._puts)

    def note(self, keys: Sequence[OffloadKey]) -> None:
        with self._lock:
            now = self._clock()
            if now - self._begun_at >= self._every_s or len(self._noted) >= REMEMBERED:
                self._noted, self._begun_at = set(), now
            if self._noted.issuperset(keys):
                return
            fresh = set(keys) - self._noted
            self._noted |= fresh
            if len(self._waiting) < REMEMBERED:  # or nobody takes them: the disk hangs
                self._waiting |= fresh

    def take(self) -> list[OffloadKey]:
        """Return the chunks whose files' times are due, and forget them."""
        with self._lock:
            taken, self._waiting = self._waiting, set()
        return list(taken)

    def clear(self) -> None:
        """Forget everything: the chunks are those of another epoch."""
        with self._lock:
            self._waiting, self._noted, self._begun_at = set(), set(), self._clock()
            self._put_at.clear()
