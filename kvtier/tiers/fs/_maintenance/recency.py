"""Which chunks were used, published to all processes through the times of their files, at long intervals."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvtier.keys import OffloadKey

TOUCH_EVERY_S: Final = 300.0
"""A file's time is set about so often: eviction looks back hours, and each time costs a write."""

REMEMBERED: Final = 65_536
"""Chunks that are remembered, with some 150 bytes for each."""


class Recency:
    """Gathers chunks that were used, each once in a while. Any thread may call it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: set[OffloadKey] = set()
        self._noted: set[OffloadKey] = set()
        self._begun_at = clock()

    def note(self, keys: Sequence[OffloadKey]) -> None:
        """Note that chunks were used."""
        with self._lock:
            now = self._clock()
            if now - self._begun_at >= TOUCH_EVERY_S or len(self._noted) >= REMEMBERED:
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
