"""The core, checked for useless work: queries with a known answer, and pointless waits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from math import inf
from typing import Any

from kvtier._core.messages import Answer, Command, Event, Get, GetEnded
from kvtier._core.requests import Request
from kvtier._core.tiering import Tiering
from kvtier._core.transfers import Pinned, Reservation, Transfer
from kvtier.keys import OffloadKey, group_index

Told = dict[OffloadKey, set[int]]


class EfficiencyCheckedTiering(Tiering):
    """The real core, which fails if it makes a tier work or a request wait for no reason.

    No other check would notice: no byte is wrong and no deadline is missed.

    Raises:
        AssertionError: from ``take_commands`` and ``settle``; the message names the tier and the key.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._windowed_groups: frozenset[int] = more.get("windowed_groups", frozenset())
        self._told: dict[Request, Told] = {}  # tiers without a chunk, as the current scan was told

    def on_event(self, event: Event, now_s: float) -> None:
        """Apply an event, and note the requests for which it reports a miss in a tier."""
        transfer = self.shared.transfers.get(event.id) if isinstance(event, GetEnded) else None
        if isinstance(event, GetEnded) and transfer is not None:
            if not transfer.is_overdue:
                self._tell(transfer, _answered(transfer, event, Answer.MISSING))
            self._found(_answered(transfer, event, Answer.COPIED))
            for request in transfer.waiters:  # another engine may have stored it since
                for key in _answered(transfer, event, Answer.LOCATED) if request.wait is not None else ():
                    self._told.get(request, {}).pop(key, None)
        super().on_event(event, now_s)

    def settle(self, now_s: float) -> None:
        """End a round. A tier that misses its deadline counts as having answered no."""
        for transfer in self.shared.running:
            if not transfer.is_put and transfer.deadline_s <= now_s:
                self._tell(transfer, transfer.keys)
        asked, visible = list(self._asked), self.table.visible
        was_there = {key for request in asked for key in request.wanted if key in visible}
        super().settle(now_s)
        self._require_a_reason_to_wait(asked, was_there)

    def take_commands(self) -> list[Command]:
        """Return the commands after checking that each is useful."""
        commands = super().take_commands()
        for command in commands:
            if isinstance(command, Get):
                self._require_of_use(command, self.shared.transfers[command.id])
        return commands

    def reserve(self, keys: Sequence[OffloadKey], request: Request | None = None) -> Reservation | None:
        """Reserve slots for a store. Its chunks are available soon, despite misses in the tiers."""
        reservation = super().reserve(keys, request)
        self._found(reservation.keys if reservation is not None else ())
        return reservation

    def acquire(self, keys: Sequence[OffloadKey], request: Request | None = None) -> Pinned:
        """Pin for a load, and forget the answers noted for the request."""
        self._forget(request)
        return super().acquire(keys, request)

    def fail_load(self, pinned: Pinned, request: Request | None = None) -> None:
        """End a failed load, and forget the answers noted for the request."""
        self._forget(request)
        super().fail_load(pinned, request)

    def served(self, request: Request) -> None:
        """End a request's wait, and forget answers that it did not await."""
        self._remember_what_is_nowhere(request)
        super().served(request)

    def restart(self, request: Request) -> None:
        """Restart a preempted request, and forget the answers noted for it."""
        self._forget(request)
        super().restart(request)

    def reset(self) -> None:
        """Hide all chunks. Earlier answers are void, so tiers may be asked again."""
        super().reset()
        for request in list(self._told):
            self._remember_what_is_nowhere(request)

    def close(self, request: Request, now_s: float = -inf) -> None:
        """End a request."""
        self._forget(request)
        super().close(request, now_s)

    def _remember_what_is_nowhere(self, request: Request) -> None:
        if told := self._told.pop(request, None):
            self._told[request] = {key: tiers for key, tiers in told.items() if key in request.absent}

    def _forget(self, request: Request | None) -> None:
        if request is not None:
            self._told.pop(request, None)

    def _found(self, keys: Iterable[OffloadKey]) -> None:
        """Note chunks that enter the primary tier. Once they leave it, tiers may be asked again."""
        for key in keys:
            for told in self._told.values():
                told.pop(key, None)

    def _tell(self, transfer: Transfer, keys: Iterable[OffloadKey]) -> None:
        """Note the answers for waiting requests, except for chunks in the primary tier."""
        missing = [key for key in keys if key not in self.table.visible]
        for request in transfer.waiters:
            if request.is_waiting:
                told = self._told.setdefault(request, {})
                for key in missing:
                    told.setdefault(key, set()).add(transfer.tier)

    def _require_of_use(self, command: Get, transfer: Transfer) -> None:
        for key in command.keys:
            told = [it for it in transfer.waiters if command.tier in self._told.get(it, {}).get(key, ())]
            knowing = [it for it in told if it.wait is None]  # waiting requests ask tiers again on purpose
            assert not knowing or len(knowing) < len(transfer.waiters), (
                f"tier {command.tier} is asked for {key.hex()} again, although all waiters, "
                f"{[it.name for it in knowing]}, were told that it does not have it"
            )
            gap = command.located and all(self._is_behind_a_gap(key, it) for it in transfer.waiters)
            assert not gap or not transfer.waiters, (
                f"{key.hex()} is fetched behind a gap in the prompt: no request can use it"
            )

    def _is_behind_a_gap(self, key: OffloadKey, request: Request) -> bool:
        """Return whether a key is useless to a request: a lookup ends at the prompt's first gap."""
        group = group_index(key)
        if group in self._windowed_groups or key not in request.wanted:
            return False
        before = request.wanted[: request.wanted.index(key)]
        return any(group_index(one) == group and one in request.absent for one in before)

    def _require_a_reason_to_wait(self, asked: Sequence[Request], was_there: Set[OffloadKey]) -> None:
        """Check that the first request in line, if just looked up, waits for a fetch or a further answer.

        Chunks that a repeated scan missed and that left by its end count as such an answer.
        """
        first = next(iter(self.holds.pending), None)
        if first is None or first not in asked or not first.is_waiting or first.awaits_any:
            return
        changed = was_there | self.table.visible.keys() | first.absent
        if first.locates:
            changed |= first.located.keys()
        news = not changed.isdisjoint(first.wanted)
        fetches = any(not transfer.is_put for transfer in self.shared.running)
        assert news or fetches, f"request {first.name} waits for {len(first.wanted)} chunks without a fetch"


def _answered(transfer: Transfer, event: GetEnded, wanted: Answer) -> list[OffloadKey]:
    return [key for key, answer in zip(transfer.keys, event.answers, strict=True) if answer is wanted]
