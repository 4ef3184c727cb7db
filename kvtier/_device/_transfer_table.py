"""Which transfers are in flight and which have ended: the part that all backends share."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from kvtier._device.base import Finished

logger = logging.getLogger("kvtier.device")


class TransferTable:
    """The copies in flight and those that have ended; thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._in_flight: set[int] = set()
        self._ended: list[Finished] = []
        self._wakeup: Callable[[], object] | None = None

    def begin(self, transfer_id: int) -> None:
        """Record a transfer. Raise ValueError when one of that id is in flight."""
        with self._changed:
            if transfer_id in self._in_flight:
                raise ValueError(f"transfer {transfer_id} is in flight already")
            self._in_flight.add(transfer_id)

    def end(self, result: Finished) -> None:
        """Record how a transfer ended, and wake those who wait for it."""
        with self._changed:
            self._in_flight.discard(result.transfer_id)
            self._ended.append(result)
            self._changed.notify_all()
            wakeup = self._wakeup
        if wakeup is not None:
            try:
                wakeup()
            except Exception:  # a closed event loop, say; copies must go on
                logger.exception("the wake-up after transfer %d failed", result.transfer_id)

    def take(self) -> list[Finished]:
        """Return what ended since the last call, in the order of the ends."""
        with self._changed:
            ended, self._ended = self._ended, []
        return ended

    def wait(self, transfer_ids: Iterable[int]) -> None:
        """Block until none of these is in flight."""
        awaited = frozenset(transfer_ids)
        with self._changed:
            self._changed.wait_for(lambda: self._in_flight.isdisjoint(awaited))

    def drain(self) -> None:
        """Block until none of those is in flight that are now."""
        with self._changed:
            awaited = frozenset(self._in_flight)
        self.wait(awaited)

    def set_wakeup(self, wakeup: Callable[[], object] | None) -> None:
        """Call ``wakeup`` after each end, in the thread that reports it; and now, if some are untaken."""
        with self._changed:
            self._wakeup = wakeup
            waiting = bool(self._ended)
        if waiting and wakeup is not None:
            wakeup()
