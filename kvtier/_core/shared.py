"""State that the parts of the core share: slots, tiers, transfers in flight, and output."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from kvtier._core.chunks import NO_RUN, Chunk, ChunkTable
from kvtier._core.kv_events import KVEventLog
from kvtier._core.limits import Limits
from kvtier._core.messages import Command, GetEnded, PutEnded, TransferHealth
from kvtier._core.tiers.load_gate import LoadGate
from kvtier._core.tiers.tier_status import TierStatus
from kvtier._core.transfers import Transfer
from kvtier._reasons import BREAKER_OPENED, POLICY_REPLACED
from kvtier.errors import StateError
from kvtier.keys import OffloadKey
from kvtier.policies._base import Run

PRIMARY = "cpu"
"""How counts name the primary tier."""

Keys = Sequence[OffloadKey]
Count = tuple[str, ...]
"""A counter's name: the event, then the tier and the reason if there are any."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A change that is worth a log line."""

    subject: str
    text: str


class SharedState:
    """The slots, tiers and transfers that all parts of the core work on, and output not taken yet."""

    def __init__(
        self,
        table: ChunkTable,
        tiers: Sequence[TierStatus],
        limits: Limits,
        windowed: frozenset[int],
        *,
        track_kv_events: bool,
    ) -> None:
        self.table = table
        self.tiers = list(tiers)
        self.limits = limits
        self.windowed = windowed  # groups that lookups do not scan from the front
        self.kept: dict[OffloadKey, Chunk] = {}  # for clients
        self.asks_tiers = not all(status.in_place for status in tiers)  # for chunks that need slots
        self.gate = LoadGate(limits.load_gate, len(self.tiers))
        self.counts: defaultdict[Count, float] = defaultdict(int)
        self.transfers: dict[int, Transfer] = {}
        self.is_starting = True  # more slots will follow
        self.commands: list[Command] = []
        self.notices: list[Notice] = []
        self.kv_events = KVEventLog(len(self.tiers), limits.max_announced, enabled=track_kv_events)
        self._earliest_s = inf  # no running transfer has an earlier deadline
        self._last_id = 0

    @property
    def pin_budget(self) -> int:
        """How many chunks may be kept for clients in total."""
        return int(len(self.table.all) * self.limits.pin_budget)

    def short_of(self, what: str) -> str:
        """Return the reason to count for a lack of slots: "starting" while slots are added, else ``what``."""
        return "starting" if self.is_starting else what

    def start_transfer(
        self, tier: int, keys: Keys, chunks: Sequence[Chunk], now_s: float, *, is_put: bool
    ) -> Transfer:
        self._last_id += 1
        deadline_s = now_s + self.tiers[tier].deadline_s
        breaker = self.tiers[tier].puts if is_put else self.tiers[tier].gets
        transfer = Transfer(self._last_id, tier, keys, chunks, deadline_s, is_put, breaker)
        self.transfers[transfer.id] = transfer
        breaker.note_start(transfer.id)
        self._earliest_s = min(self._earliest_s, deadline_s)
        return transfer

    def end_transfer(self, event: PutEnded | GetEnded, now_s: float) -> tuple[Transfer, bool]:
        """Remove a transfer that has ended; return it, and whether it ended in time."""
        transfer = self.transfers.pop(event.id, None)
        if transfer is None:
            raise StateError(f"transfer {event.id} has ended already or never began")
        status, verb, in_time = self.tiers[transfer.tier], transfer.verb, not transfer.is_overdue
        took_s = event.seconds if isinstance(event, PutEnded) else event.lookup_s + event.seconds
        health = status.judge(event.health, took_s, is_put=transfer.is_put)
        self._note_change(transfer, transfer.breaker.note_end(transfer.id, health, now_s, in_time=in_time))
        if in_time and health is TransferHealth.LATE:  # the tier's clock noticed it first
            self.counts["overdue", status.name, verb] += 1
        if event.retry:
            self.counts["retries", status.name, verb, event.retry] += 1
        self.counts[f"{verb}_seconds", status.name] += event.seconds
        for reason, count in event.reasons.items():
            self.counts[f"{verb}_failed", status.name, reason] += count
        return transfer, in_time

    def _note_change(self, transfer: Transfer, change: str | None) -> None:
        """Count a breaker's change of state at the end of a transfer, and queue a notice for the log."""
        if change is None:
            return
        status, verb = self.tiers[transfer.tier], transfer.verb
        if change == "closed":
            self.counts["breaker_closed", status.name, verb] += 1
            text = f"the breaker of its {verb}s closes: a probe succeeded"
        else:
            self.counts["breaker_opened", status.name, verb, change] += 1
            text = f"the breaker of its {verb}s opens: {BREAKER_OPENED[change]}"
        if change != "probe":
            self.notices.append(Notice(f"tier {status.name}", text))

    @property
    def running(self) -> list[Transfer]:
        """The transfers in flight that are not overdue."""
        return [transfer for transfer in self.transfers.values() if not transfer.is_overdue]

    def overdue(self, now_s: float) -> list[Transfer]:
        """Mark the running transfers whose deadline has passed, and return them."""
        if now_s < self._earliest_s:
            return []
        late = [transfer for transfer in self.running if transfer.deadline_s <= now_s]
        for transfer in late:
            transfer.is_overdue = True
            self.counts["overdue", self.tiers[transfer.tier].name, transfer.verb] += 1
            self._note_change(transfer, transfer.breaker.note_late(transfer.id, now_s))
        self._earliest_s = min((transfer.deadline_s for transfer in self.running), default=inf)
        return late

    def evict(self, count: int, spared: Run = NO_RUN) -> list[OffloadKey]:
        """Free up to ``count`` slots of unpinned chunks outside of the ``spared`` run."""
        if count <= 0:
            return []
        if self.table.users and (lowered := self.table.lower(self.pin_budget - len(self.kept))):
            self.counts["keep_refused", "budget"] += lowered
        keys = self.table.evict(count, spared)
        self.counts["evicted",] += len(keys)
        self.kv_events.removed(keys)
        return keys

    def note_policy(self) -> None:
        """Count replaced policies, and queue notices for the log."""
        for name, reason in self.table.faults:
            self.counts["policy_replaced", reason] += 1
            text = f"{POLICY_REPLACED[reason]}; lru has taken its place"
            self.notices.append(Notice(f"eviction policy {name}", text))
        self.table.faults.clear()

    def announce_end(self, transfer: Transfer, present: Iterable[bool]) -> None:
        """Announce the keys of an ended transfer that its tier has; after a promotion also those it lacks."""
        if not self.kv_events.enabled or self.tiers[transfer.tier].in_place:
            return
        tier, keys = transfer.tier, list(zip(transfer.keys, present, strict=True))
        if not transfer.is_put:
            self.kv_events.removed([key for key, is_there in keys if not is_there], tier)
        if self.tiers[tier].disabled_reason is None:
            there = [key for key, is_there in keys if is_there and key not in transfer.left]
            self.kv_events.stored(there, tier, found=not transfer.is_put)

    def announce_left(self, tier: int, keys: Keys) -> None:
        """Announce that chunks, or all where ``keys`` is empty, have left a tier.

        Transfers in flight do not announce them.
        """
        if not self.kv_events.enabled:
            return
        gone = frozenset(keys)
        for transfer in self.transfers.values():
            if transfer.tier == tier:
                transfer.left |= gone.intersection(transfer.keys) if keys else frozenset(transfer.keys)
        if keys:
            self.kv_events.removed(keys, tier)
        else:
            self.kv_events.clear(tier)
