"""The bounds of the file tier: how many chunks may be written now.

Two bounds hold at once: ``max_bytes`` for everything below the root, and ``min_free_bytes`` for the
file system. Bytes are reserved before they are written, so that no number of jobs oversteps them.

What the root holds is counted in the background when the tier opens, and again from time to time.
Until the first count is there, the root is taken to hold all that the file system holds: that is
never too little, so the bound holds from the first put on. Puts that only this refuses are refused
as ``COUNTING``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvtier.tiers.fs.call import Result
from kvtier.tiers.fs.config import FsConfig

DEFAULT_SHARE: Final = 0.8
DEFAULT_FREE_SHARE: Final = 0.05
DEFAULT_FREE_BYTES: Final = 32 * 2**30
LOOK_EVERY_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class FileSystem:
    """Bytes of a file system: in all, in use, and free for us."""

    total: int
    used: int
    free: int

    @staticmethod
    def of(root_fd: int) -> FileSystem:
        """Ask the file system that an open directory is on."""
        found = os.fstatvfs(root_fd)
        unit = found.f_frsize
        return FileSystem(
            found.f_blocks * unit, (found.f_blocks - found.f_bfree) * unit, found.f_bavail * unit
        )


class Space:
    """What may be written. Any thread may call it.

    Args:
        config: the tier's settings.
        file_bytes: the most bytes that writing one chunk can take.
        look: returns the file system's state; it blocks.
        clock: seconds.

    Raises:
        OSError: the file system cannot be asked.
    """

    def __init__(
        self,
        config: FsConfig,
        file_bytes: int,
        look: Callable[[], FileSystem],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock = threading.Lock()
        self._file_bytes = file_bytes
        self._look = look
        self._clock = clock
        self._max_bytes = config.max_bytes
        self._at_open = self._seen = look()
        self._seen_at = clock()
        self._min_free = config.min_free_bytes
        if self._min_free is None:
            self._min_free = min(int(self._seen.total * DEFAULT_FREE_SHARE), DEFAULT_FREE_BYTES)
        self._written = 0  # reserved or written by us since the tier opened, less what we removed
        self._outstanding = 0  # the part of it that is reserved and perhaps not written yet
        self._written_at_look = 0
        self._written_at_count = 0
        self._counting = False
        self._counted: int | None = None
        self._limit: int | None = config.max_bytes

    @property
    def used_bytes(self) -> int | None:
        """Bytes below the root, as far as known; None before the first count."""
        with self._lock:
            if self._counted is None:
                return None
            return self._counted + self._written - self._written_at_count

    @property
    def last_used_bytes(self) -> int | None:
        """The same for who may not wait: a moment old while a count ends.

        Without the lock, which is held while the file system is asked, and that may hang.
        """
        if self._counted is None:
            return None
        return max(0, self._counted + self._written - self._written_at_count)

    @property
    def limit_bytes(self) -> int | None:
        """Bytes that may be below the root; None before the default is known."""
        return self._limit

    def reserve(self, chunks: int) -> tuple[int, Result]:
        """Reserve bytes for new files.

        Returns:
            How many of ``chunks`` may be written, and why the others may not.
        """
        with self._lock:
            self._refresh()
            assert self._min_free is not None
            below_limit, reason = self._room()
            above_free = self._seen.free - self._min_free - (self._written - self._written_at_look)
            room = below_limit if below_limit < above_free else above_free
            granted = max(0, min(chunks, room // self._file_bytes))
            self._written += granted * self._file_bytes
            self._outstanding += granted * self._file_bytes
            return granted, reason if below_limit < above_free else Result.MIN_FREE

    def settle(self, granted: int, added: int) -> None:
        """Replace a reservation of ``granted`` chunks by the bytes that were really added."""
        with self._lock:
            self._written += added - granted * self._file_bytes
            self._outstanding -= granted * self._file_bytes

    def removed(self, count: int) -> None:
        """Note that ``count`` bytes were removed."""
        with self._lock:
            if not self._counting:  # else the count may have missed them: not to be taken off twice
                self._written -= count

    def count(self, add_up: Callable[[], int]) -> None:
        """Count what the root holds. Blocks as long as ``add_up`` does.

        What is written meanwhile may be counted twice until the next count: too much, never too
        little.

        Raises:
            OSError: it could not be counted; the last count stays.
        """
        with self._lock:
            self._counting = True
            before = self._written - self._outstanding
        try:
            counted = add_up()
            with self._lock:
                self._counted = counted
                self._written_at_count = before
                if self._limit is None:
                    held_at_open = max(0, counted - self._written)
                    self._limit = int(DEFAULT_SHARE * (self._at_open.free + held_at_open))
        finally:
            with self._lock:
                self._counting = False

    def _room(self) -> tuple[int, Result]:
        if self._counted is not None:
            assert self._limit is not None
            used = self._counted + self._written - self._written_at_count
            return self._limit - used, Result.MAX_BYTES
        before = self._at_open
        if self._max_bytes is not None:
            return self._max_bytes - before.used - self._written, Result.COUNTING
        # used + room <= share * (free + used) holds for every used up to the file system's
        room = int(DEFAULT_SHARE * before.free - (1 - DEFAULT_SHARE) * before.used)
        return room - self._written, Result.COUNTING

    def _refresh(self) -> None:
        now = self._clock()
        if now - self._seen_at >= LOOK_EVERY_S:
            self._seen = self._look()
            self._seen_at = now
            # What is reserved and not written is not in use yet: it is held against what is free.
            self._written_at_look = self._written - self._outstanding
