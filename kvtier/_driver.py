"""Drives the core for its owner: commands go to the executor, events to the core, changes to the log.

``TieringManager`` and the vLLM bridge own a core each, one on an event loop and one in the scheduler's
thread. What both must do the same way is here.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from kvtier._core.chunks import Chunk
from kvtier._core.messages import Command, Event
from kvtier._core.requests import Request
from kvtier._core.tiering import Tiering
from kvtier._core.transfers import Pinned, Reservation
from kvtier._memory.slot_checksums import Damage, SlotChecksums
from kvtier._telemetry.log_limit import NoticeLog


class CommandSink(Protocol):
    """Whatever carries out the core's commands."""

    def submit(self, commands: Sequence[Command]) -> None:
        """Hand commands over, without waiting for anything."""


class Driver:
    """The core between its owner and an executor. All calls come from the owner's thread; none waits.

    Args:
        core: the state machine.
        executor: carries out its commands.
        logger: gets a line when the condition of a tier or of the eviction policy changes.
        slot_checksums: what audited slots must hold; None where nothing is audited.
        has_damage: returns whether an audit has ever failed. Only then damage is looked for.
        clock: seconds, monotonic; ``time.monotonic``, as it is now, where it is None.
    """

    def __init__(
        self,
        core: Tiering,
        executor: CommandSink,
        logger: logging.Logger,
        *,
        slot_checksums: SlotChecksums | None = None,
        has_damage: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._core = core
        self._executor = executor
        self._slot_checksums = slot_checksums
        self._has_damage = has_damage
        self._clock = clock or time.monotonic
        self._log = NoticeLog(logger)

    # --- what has happened, what to do -----------------------------------------------------------

    def on_event(self, event: Event) -> None:
        """Pass an event to the core, and what follows from it to the executor."""
        self._core.on_event(event, self._clock())
        self.dispatch()

    def on_events(self, events: deque[Event]) -> None:
        """Pass all that is in a queue to the core, and what follows from it to the executor."""
        now_s = self._clock()
        while events:
            self._core.on_event(events.popleft(), now_s)
        self.dispatch()

    def settle(self) -> None:
        """End a round of lookups."""
        self._core.settle(self._clock())
        self.dispatch()

    def reset(self) -> None:
        """Make everything stored so far invisible, in every tier."""
        self._core.reset()
        self.dispatch()

    def dispatch(self) -> None:
        """Submit the core's commands; log what has changed."""
        commands = self._core.take_commands()
        if commands:
            if self._slot_checksums is not None:
                self._slot_checksums.forget_fetched(commands)
            self._executor.submit(commands)
        if notices := self._core.take_notices():
            self._log.tell(notices, self._clock())

    # --- the ends of loads and stores ------------------------------------------------------------

    def end_load(self, pinned: Pinned, request: Request | None = None, *, failed: bool = False) -> None:
        """End a load. Its chunks are dropped where it has failed, or an audit has found one damaged.

        Args:
            pinned: what was loaded.
            request: the request to be computed if the load has failed; None if the request has ended.
            failed: whether the load did not bring its bytes.
        """
        damage = self._find_damage(pinned.chunks, pinned.origins)
        if failed or damage:
            self._core.fail_load(pinned, request if failed else None)
        else:
            self._core.release(pinned)
        self._distrust(damage)

    def inspect(self, reservation: Reservation) -> None:
        """Act on what audits have found in the slots of a store whose copies have ended."""
        self._distrust(self._find_damage(reservation.chunks, [None] * len(reservation.chunks)))

    def commit(self, reservation: Reservation) -> None:
        """End a store that has copied its bytes, and start the puts that follow from it."""
        self._core.commit(reservation, self._clock())
        self.dispatch()

    def _find_damage(self, chunks: Sequence[Chunk], origins: Sequence[int | None]) -> list[Damage]:
        if self._slot_checksums is None or not self._has_damage():
            return []
        return self._slot_checksums.take_damage(chunks, origins)

    def _distrust(self, damage: Iterable[Damage]) -> None:
        for it in damage:
            self._core.distrust(it.tier, str(it))


__all__ = ["Driver"]
