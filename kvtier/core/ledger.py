"""What the parts of the core share: slots, tiers, transfers under way, and what is to be told."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from kvtier.core.admission import Limits, TierGate
from kvtier.core.chunks import Chunk, ChunkTable
from kvtier.core.messages import Command
from kvtier.core.states import TransferEvent, TransferState
from kvtier.core.transfers import Transfer
from kvtier.errors import StateError
from kvtier.keys import OffloadKey

Count = tuple[str, ...]
"""What is counted: the occurrence, then the tier where there is one, then the reason where there is one."""


@dataclass(frozen=True, slots=True)
class Change:
    """Chunks that have become available somewhere, or ceased to be.

    Attributes:
        keys: the chunks.
        tier: index of the secondary tier; None for the primary one.
        removed: whether they are gone.
    """

    keys: Sequence[OffloadKey]
    tier: int | None
    removed: bool


class Ledger:
    """The slots, the tiers and the transfers, and the messages that are on their way out."""

    def __init__(
        self, table: ChunkTable, tiers: Sequence[TierGate], limits: Limits, *, track_changes: bool
    ) -> None:
        self.table = table
        self.tiers = list(tiers)
        self.limits = limits
        self.counts: defaultdict[Count, float] = defaultdict(int)
        self.transfers: dict[int, Transfer] = {}
        self.commands: list[Command] = []
        self.changes: list[Change] = []
        self.tracks_changes = track_changes
        self._earliest_s = inf  # no running transfer has an earlier deadline
        self._last_id = 0

    def begin(
        self, tier: int, keys: Sequence[OffloadKey], chunks: list[Chunk], now_s: float, *, is_put: bool
    ) -> Transfer:
        """Enter a transfer that a tier will be told to do."""
        self._last_id += 1
        deadline_s = now_s + self.tiers[tier].deadline_s
        transfer = Transfer(self._last_id, tier, keys, chunks, deadline_s, is_put)
        self.transfers[transfer.id] = transfer
        self._earliest_s = min(self._earliest_s, deadline_s)
        return transfer

    def end(self, transfer_id: int) -> tuple[Transfer, bool]:
        """Strike a transfer that has ended; say too whether it was in time."""
        transfer = self.transfers.pop(transfer_id, None)
        if transfer is None:
            raise StateError(f"transfer {transfer_id} has ended already or never began")
        in_time = transfer.state is TransferState.RUNNING
        if not in_time:
            self.tiers[transfer.tier].overdue -= 1
        transfer.move(TransferEvent.ENDED)
        return transfer, in_time

    @property
    def running(self) -> list[Transfer]:
        """The transfers that are waited for."""
        return [transfer for transfer in self.transfers.values() if transfer.state is TransferState.RUNNING]

    def overdue(self, now_s: float) -> list[Transfer]:
        """Mark the running transfers whose deadline has passed, and return them."""
        if now_s < self._earliest_s:
            return []
        late = [transfer for transfer in self.running if transfer.deadline_s <= now_s]
        for transfer in late:
            transfer.move(TransferEvent.DEADLINE)
            self.tiers[transfer.tier].overdue += 1
            self.counts["overdue", self.tiers[transfer.tier].name, "put" if transfer.is_put else "get"] += 1
        self._earliest_s = min((transfer.deadline_s for transfer in self.running), default=inf)
        return late

    def evict(self, count: int) -> list[OffloadKey]:
        """Free up to ``count`` slots of chunks that nobody pins."""
        if count <= 0:
            return []
        keys = self.table.evict(count)
        self.counts["evicted",] += len(keys)
        self.note(keys, removed=True)
        return keys

    def note(self, keys: Sequence[OffloadKey], tier: int | None = None, *, removed: bool = False) -> None:
        """Note a change of what is available, for those who publish it."""
        if self.tracks_changes and keys:
            self.changes.append(Change(tuple(keys), tier, removed))
