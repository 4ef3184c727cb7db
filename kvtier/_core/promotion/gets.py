"""The gets in flight: their waiters, their chunks, and their counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from kvtier._core.chunks import Chunk
from kvtier._core.messages import Answer, Get, GetEnded, TransferHealth
from kvtier._core.promotion.holds import Holds
from kvtier._core.promotion.wanted import Waiters, allowed_tiers, loading, waiting
from kvtier._core.requests import Request
from kvtier._core.shared import Keys, SharedState
from kvtier._core.states import ChunkEvent
from kvtier._core.transfers import Transfer
from kvtier.keys import OffloadKey


class Gets:
    """Begins and ends gets.

    Requests share a get where they may be served from the same tiers. One that may not be served from
    a tier never waits for it; promoted chunks are visible to all.
    """

    def __init__(self, shared: SharedState, holds: Holds) -> None:
        # The get that each key is expected from, for requests that may be served from the same tiers.
        self.expected: defaultdict[frozenset[int] | None, dict[OffloadKey, Transfer]] = defaultdict(dict)
        self._shared = shared
        self._holds = holds

    def start_get(
        self, tier: int, keys: Keys, count: int, waiters: Waiters, now_s: float, *, located: bool = False
    ) -> Transfer:
        """Get keys from a tier, the first ``count`` of them into free slots."""
        first = next(iter(waiters), None) or Request()
        in_place, table = self._shared.tiers[tier].in_place, self._shared.table
        chunks = table.assign_slots(keys[:count], first.run, first.places, visible=False, in_place=in_place)
        self._holds.promoting.update(chunks)
        transfer = self._shared.start_transfer(tier, keys, chunks, now_s, is_put=False)
        transfer.located = located
        if self._shared.gate.is_on:
            gets = [
                other for other in self._shared.transfers.values() if other.tier == tier and not other.is_put
            ]
            transfer.load = sum(len(other.chunks) for other in gets)
        if waiters:  # no request waits for a probe
            transfer.waiters.update(waiters)
            transfer.is_poll = not located and all(
                request.wait is not None and keys[0] in request.wait.keys for request in waiters
            )
            self.expected[allowed_tiers(waiters)].update(dict.fromkeys(keys, transfer))
        slots = [chunk.slot for chunk in chunks]
        addresses = () if located else _addresses(waiters, keys[0])
        self._shared.commands.append(Get(transfer.id, tier, keys, slots, located, addresses))
        return transfer

    def land_verified(self, key: OffloadKey, request: Request) -> bool:
        """Make an adopted chunk READY if its bytes were verified in the background; return whether it is."""
        shared, table = self._shared, self._shared.table
        if not table.is_verified(key):
            return False
        tier, status = next((index, it) for index, it in enumerate(shared.tiers) if it.in_place)
        chunks = table.assign_slots([key], request.run, request.places, visible=True, in_place=True)
        table.filled(chunks)
        chunks[0].origin = tier
        shared.counts["fetched", status.name] += 1
        status.writes.note_loaded([key])
        shared.kv_events.stored([key], found=True)
        return True

    def end_get(
        self, event: GetEnded, now_s: float
    ) -> tuple[Transfer, Sequence[Answer], Waiters, list[Chunk]]:
        """End a get; return it, its answers, its remaining waiters, and the chunks that it promoted."""
        transfer, in_time = self._shared.end_transfer(event, now_s)
        if self._shared.tiers[transfer.tier].failed_audit:
            event = replace(event, answers=(Answer.MISSING,) * len(event.answers))
        self._stop_expecting(transfer)
        waiters = waiting(transfer) if in_time else {}
        is_news = not transfer.is_poll or bool(event.reasons) or any(event.answers)
        is_news = is_news or any(key in self._shared.table.visible for key in transfer.keys)
        for request in waiters:
            if is_news:
                request.note_change()
            if request.wait is not None:
                missing = () if transfer.located else select(transfer.keys, event.answers, Answer.MISSING)
                request.wait.note_answer(transfer.keys, missing, now_s, failed=bool(event.reasons))
        if any(request.record for request in waiters):
            self._record_missing(waiters, transfer, event)
        copied = self._complete(transfer, event.answers, loading(waiters))
        self._shared.announce_end(transfer, (it is not Answer.MISSING for it in event.answers))
        self._count(transfer, event, now_s)
        return transfer, event.answers, waiters, copied

    def give_up(self, transfer: Transfer, now_s: float) -> Waiters:
        """Stop waiting for an overdue get; return who waited. Its slots stay out of use until it ends."""
        self._stop_expecting(transfer)
        self._holds.promoting.difference_update(transfer.chunks)
        self.record(transfer.waiters, transfer.tier, transfer.keys, "timeout")
        for request in transfer.waiters:
            if request.wait is not None:
                request.note_change()
                request.wait.note_answer(transfer.keys, (), now_s, failed=True)
        return waiting(transfer)

    def reset(self) -> None:
        """Doom the chunks that are being promoted; no request waits for them any longer."""
        for transfer in self._shared.transfers.values():
            if not transfer.is_put:
                for chunk in transfer.chunks:
                    chunk.move(ChunkEvent.DROPPED)
                self.record(transfer.waiters, transfer.tier, transfer.keys, "reset")
                for request in transfer.waiters:
                    request.mark_absent(transfer.keys)
                transfer.waiters.clear()
        self.expected.clear()

    def record(self, requests: Iterable[Request], tier: int, keys: Keys, word: str) -> None:
        """Note why a tier did not give keys, for each request that is to be explained."""
        for request in requests:
            if request.record is not None:
                request.record.refused(keys, self._shared.tiers[tier].name, word)

    def _record_missing(self, waiters: Waiters, transfer: Transfer, event: GetEnded) -> None:
        """Note why a get did not bring its missing keys.

        The event counts the chunks that failed, by reason, and does not name them. They are among those that
        were given a slot, unless all of the get has failed. Where fewer failed than are missing there, each
        may have failed or be absent.
        """
        missing, failed = select(transfer.keys, event.answers, Answer.MISSING), sum(event.reasons.values())
        in_slots = event.answers[: len(transfer.chunks)].count(Answer.MISSING)
        count = (in_slots if failed <= in_slots else len(missing)) if failed else 0
        rest = "audit" if self._shared.tiers[transfer.tier].failed_audit else "absent"
        words = {*event.reasons, rest} if failed < count else {*event.reasons}
        self.record(waiters, transfer.tier, missing[:count], ",".join(sorted(words)))
        self.record(waiters, transfer.tier, missing[count:], rest)

    def _stop_expecting(self, transfer: Transfer) -> None:
        self._holds.changes += 1
        if transfer.waiters:  # a probe has none, nor has a get from before a reset
            expected = self.expected[allowed_tiers(transfer.waiters)]
            for key in transfer.keys:
                if expected.get(key) is transfer:
                    del expected[key]

    def _complete(self, transfer: Transfer, answers: Sequence[Answer], waiters: Waiters) -> list[Chunk]:
        """Make the copied chunks visible, unless their key got here another way; free the others."""
        table = self._shared.table
        good: list[Chunk] = []
        bad: list[Chunk] = []
        for chunk, answer in zip(transfer.chunks, answers, strict=False):
            arrived = answer is Answer.COPIED and chunk.key not in table.visible
            (good if arrived else bad).append(chunk)
        table.drop(bad)
        copied = table.filled(good, pins=len(waiters))
        for chunk in copied:
            chunk.origin = transfer.tier
        for request in waiters:
            request.held.update(dict.fromkeys(copied, request.round))
            self._holds.enter(request)
        self._holds.free_budget(transfer.chunks)
        self._shared.kv_events.stored((chunk.key for chunk in copied), found=True)
        return copied

    def _count(self, transfer: Transfer, event: GetEnded, now_s: float) -> None:
        status = self._shared.tiers[transfer.tier]
        counts, name = self._shared.counts, status.name
        copied, missing = event.answers.count(Answer.COPIED), event.answers.count(Answer.MISSING)
        if copied and event.seconds and event.health is TransferHealth.GOOD:
            status.pressure.get_ended(copied, event.seconds, now_s, beside_puts=status.backlog > 0)
        if transfer.load and event.elapsed_s:
            unused = len(transfer.chunks) - copied if copied else 0
            self._shared.gate.get_ended(
                transfer.tier, transfer.load - unused, event.elapsed_s, now_s, at_least=not copied
            )
        if transfer.is_probe:
            found = copied or event.health is not TransferHealth.GOOD
            self._shared.gate.note_probe_ended(transfer.tier, now_s, found_any=bool(found))
        if transfer.is_poll:  # missing keys were counted when tiers were asked first
            missing, asked = 0, len(event.answers) - missing
        else:
            asked = len(event.answers)
        if not transfer.located:
            counts["asked", name] += asked
            counts["found", name] += asked - missing
        counts["fetched", name] += copied
        if copied:
            status.writes.note_loaded(select(transfer.keys, event.answers, Answer.COPIED))
        counts["absent", name] += max(0, missing - sum(event.reasons.values()))


def _addresses(waiters: Waiters, first: OffloadKey) -> tuple[str, ...]:
    """Return the addresses that hints give for the first key, if all waiting clients give the same ones."""
    said = {request.addresses if request.names(first) else () for request in waiters}
    return said.pop() if len(said) == 1 else ()


def select(keys: Keys, answers: Sequence[Answer], wanted: Answer) -> list[OffloadKey]:
    return [key for key, answer in zip(keys, answers, strict=True) if answer is wanted]
