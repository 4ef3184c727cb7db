"""The core, checked for work in vain: a query whose answer is known, a wait for nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any

from kvtier._core.messages import Answer, Command, Event, Get, GetEnded
from kvtier._core.requests import Request
from kvtier._core.tiering import Tiering
from kvtier._core.transfers import Pinned, Reservation, Transfer
from kvtier.keys import OffloadKey, group_index

Told = dict[OffloadKey, set[int]]


class EfficiencyCheckedTiering(Tiering):
    """The real core, which fails where it makes a tier work, or a request wait, in vain.

    No byte is wrong then and no deadline is missed, so nothing else would notice.

    Raises:
        AssertionError: from ``take_commands`` and ``settle``; the message says who was asked for what.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._windowed_groups: frozenset[int] = more.get("windowed_groups", frozenset())
        self._told: dict[Request, Told] = {}  # which tiers do not have a chunk, by the scan under way

    def on_event(self, event: Event, now_s: float) -> None:
        """Take in an event, and note whom it tells that a tier does not have a chunk."""
        transfer = self.shared.transfers.get(event.id) if isinstance(event, GetEnded) else None
        if isinstance(event, GetEnded) and transfer is not None:
            if not transfer.is_overdue:
                self._tell(transfer, _answered(transfer, event, Answer.MISSING))
            self._found(_answered(transfer, event, Answer.COPIED))
            for request in transfer.waiters:  # another engine may have stored what a tier did not have before
                for key in _answered(transfer, event, Answer.LOCATED) if request.wait is not None else ():
                    self._told.get(request, {}).pop(key, None)
        super().on_event(event, now_s)

    def settle(self, now_s: float) -> None:
        """End a round. What a tier has not said by its deadline counts as said: no."""
        for transfer in self.shared.running:
            if not transfer.is_put and transfer.deadline_s <= now_s:
                self._tell(transfer, transfer.keys)
        asked, visible = list(self._asked), self.table.visible
        was_there = {key for request in asked for key in request.wanted if key in visible}
        super().settle(now_s)
        self._require_a_reason_to_wait(asked, was_there)

    def take_commands(self) -> list[Command]:
        """Take what is to be done, none of it in vain."""
        commands = super().take_commands()
        for command in commands:
            if isinstance(command, Get):
                self._require_of_use(command, self.shared.transfers[command.id])
        return commands

    def reserve(self, keys: Sequence[OffloadKey], request: Request | None = None) -> Reservation | None:
        """Give slots to a store: its chunks are there soon, whatever tiers said of them."""
        reservation = super().reserve(keys, request)
        self._found(reservation.keys if reservation is not None else ())
        return reservation

    def acquire(self, keys: Sequence[OffloadKey], request: Request | None = None) -> Pinned:
        """Pin for a load. What was learned for the request is forgotten."""
        self._forget(request)
        return super().acquire(keys, request)

    def fail_load(self, pinned: Pinned, request: Request | None = None) -> None:
        """End a load that failed. What was learned for the request is forgotten."""
        self._forget(request)
        super().fail_load(pinned, request)

    def served(self, request: Request) -> None:
        """End a request's wait. What it did not wait for to the end it does not know."""
        self._remember_what_is_nowhere(request)
        super().served(request)

    def restart(self, request: Request) -> None:
        """Restart a preempted request. What was learned for it is out of date."""
        self._forget(request)
        super().restart(request)

    def reset(self) -> None:
        """Make all invisible. Where chunks were found does not hold any more, and is asked anew."""
        super().reset()
        for request in list(self._told):
            self._remember_what_is_nowhere(request)

    def close(self, request: Request) -> None:
        """End a request."""
        self._forget(request)
        super().close(request)

    def _remember_what_is_nowhere(self, request: Request) -> None:
        if told := self._told.pop(request, None):
            self._told[request] = {key: tiers for key, tiers in told.items() if key in request.absent}

    def _forget(self, request: Request | None) -> None:
        if request is not None:
            self._told.pop(request, None)

    def _found(self, keys: Iterable[OffloadKey]) -> None:
        """Note chunks that get into the primary tier. When they leave it, tiers may be asked again."""
        for key in keys:
            for told in self._told.values():
                told.pop(key, None)

    def _tell(self, transfer: Transfer, keys: Iterable[OffloadKey]) -> None:
        """Note what requests that wait are told; what is in the primary tier is not looked for elsewhere."""
        missing = [key for key in keys if key not in self.table.visible]
        for request in transfer.waiters:
            if request.is_waiting:
                told = self._told.setdefault(request, {})
                for key in missing:
                    told.setdefault(key, set()).add(transfer.tier)

    def _require_of_use(self, command: Get, transfer: Transfer) -> None:
        for key in command.keys:
            told = [it for it in transfer.waiters if command.tier in self._told.get(it, {}).get(key, ())]
            knowing = [it for it in told if it.wait is None]  # else tiers are asked again on purpose
            assert not knowing or len(knowing) < len(transfer.waiters), (
                f"tier {command.tier} is asked for {key.hex()} once more, which all who wait for it, "
                f"{[it.name for it in knowing]}, were told that it does not have"
            )
            gap = command.located and all(self._is_behind_a_gap(key, it) for it in transfer.waiters)
            assert not gap or not transfer.waiters, (
                f"{key.hex()} is brought, and before it is a chunk that is nowhere: nobody can use it"
            )

    def _is_behind_a_gap(self, key: OffloadKey, request: Request) -> bool:
        """Whether a request has no use for a key: a prompt is looked up from its front to a gap."""
        group = group_index(key)
        if group in self._windowed_groups or key not in request.wanted:
            return False
        before = request.wanted[: request.wanted.index(key)]
        return any(group_index(one) == group and one in request.absent for one in before)

    def _require_a_reason_to_wait(self, asked: Sequence[Request], was_there: Set[OffloadKey]) -> None:
        """Check that the first in line, if it was asked just now, waits for a fetch or will be told more.

        So too where what was there, but not seen by a scan that was repeated, has left at its end.
        """
        first = next(iter(self.holds.pending), None)
        if first is None or first not in asked or not first.is_waiting or first.awaits_any:
            return
        changed = was_there | self.table.visible.keys() | first.absent
        if first.locates:
            changed |= first.located.keys()
        news = not changed.isdisjoint(first.wanted)
        fetches = any(not transfer.is_put for transfer in self.shared.running)
        assert news or fetches, f"request {first.name} waits for {len(first.wanted)} chunks, and for nothing"


def _answered(transfer: Transfer, event: GetEnded, wanted: Answer) -> list[OffloadKey]:
    return [key for key, answer in zip(transfer.keys, event.answers, strict=True) if answer is wanted]
