"""The loop around the core: passes it events, its commands to the executor, and its notices to the log.

Shared by both owners of a core: ``TieringManager``, on an event loop, and the vLLM adapter, in the
scheduler's thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from kvtier._core.chunks import Chunk
from kvtier._core.messages import Command, Event
from kvtier._core.requests import Request
from kvtier._core.tiering import Tiering
from kvtier._core.transfers import Pinned, Reservation
from kvtier._log import GuardedLogger, LogLimit
from kvtier._memory.slot_checksums import SlotChecksums, SlotDamage
from kvtier._telemetry.traces import open_traces

_CHANGES_EVERY_S = 30.0


class Driver:
    """Connects the core with its executor and its log. All calls come from the owner's thread; none waits.

    ``submit`` hands commands to the executor, without waiting for anything. ``slot_checksums`` is None if
    chunks are not audited. The driver looks for damage once ``has_damage`` returns that an audit ever failed.
    """

    def __init__(
        self,
        core: Tiering,
        submit: Callable[[Sequence[Command]], None],
        logger: GuardedLogger,
        *,
        slot_checksums: SlotChecksums | None = None,
        has_damage: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._core = core
        self._submit = submit
        self._slot_checksums = slot_checksums
        self._has_damage = has_damage
        self._clock = clock or time.monotonic
        self._logger = logger
        self._log_limit = LogLimit(_CHANGES_EVERY_S)
        self.traces = open_traces(core.shared)

    # --- events and commands ---------------------------------------------------------------------

    def on_event(self, event: Event) -> None:
        """Pass an event to the core, and the resulting commands to the executor."""
        self.on_events(deque((event,)))

    def on_events(self, events: deque[Event]) -> None:
        """Pass all events of a queue to the core, and the resulting commands to the executor."""
        now_s = self._clock()
        while events:
            event = events.popleft()
            if self.traces is not None:
                self.traces.ended(event)
            self._core.on_event(event, now_s)
        self.dispatch()

    def settle(self) -> None:
        self._core.settle(self._clock())
        self.dispatch()

    def end_round(self, events: deque[Event]) -> None:
        """Pass all events of a queue to the core, then end the round of questions.

        So transfers that ended while the owner was idle are not overdue.
        """
        if events:
            self.on_events(events)
        self.settle()

    def reset(self) -> None:
        """Hide everything stored so far, in every tier."""
        self._core.reset()
        self.dispatch()

    def dispatch(self, request: str = "") -> None:
        """Submit the core's commands and log its notices.

        ``request`` names the one whose chunks are put, for traces.
        """
        shared = self._core.shared
        if shared.commands:
            commands = self._core.take_commands()
            if self.traces is not None:
                self.traces.submitted(commands, request)
            if self._slot_checksums is not None:
                self._slot_checksums.forget_promoted(commands)
            self._submit(commands)
        for notice in self._core.take_notices() if shared.notices else ():
            line = f"{notice.subject}: {notice.text}"
            if (added := self._log_limit.allow(line, self._clock())) is not None:
                self._logger.warning("%s%s", line, added)

    # --- the ends of loads and stores ------------------------------------------------------------

    def end_load(self, pinned: Pinned, request: Request | None = None, *, failed: bool = False) -> None:
        """End a load. Drop its chunks if it failed or an audit found one of them damaged.

        The engine computes the ``request`` of a failed load; None if the request has ended.
        """
        damage = self._find_damage(pinned.chunks, pinned.origins)
        if self.traces is not None:
            self.traces.load_ended(pinned, is_failed=failed)
        if failed or damage:
            self._core.fail_load(pinned, request if failed else None)
        else:
            self._core.release(pinned)
        self._disable(damage)

    def inspect(self, reservation: Reservation, unfilled: Collection[int] = ()) -> None:
        """Handle damage that audits found in the slots of a store whose copies have ended.

        Damage in ``unfilled`` slots has no culprit.
        """
        damage = self._find_damage(reservation.chunks, [None] * len(reservation.chunks))
        self._disable(it for it in damage if it.slot not in unfilled)

    def commit(self, reservation: Reservation, request: str = "") -> None:
        """End a store whose copies succeeded, and start its puts into the tiers."""
        self._core.commit(reservation, self._clock())
        self.dispatch(request)

    def close(self) -> None:
        """End all open traces. No other call may follow."""
        if self.traces is not None:
            self.traces.close()

    def _find_damage(self, chunks: Sequence[Chunk], origins: Sequence[int | None]) -> list[SlotDamage]:
        if self._slot_checksums is None or not self._has_damage():
            return []
        return self._slot_checksums.take_damage(chunks, origins)

    def _disable(self, damage: Iterable[SlotDamage]) -> None:
        for it in damage:
            self._core.disable_after_audit(it.tier, str(it))
