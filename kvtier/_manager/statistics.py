"""The current state of a manager, for programs that watch it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvtier._core.states import BreakerState, ChunkState
from kvtier._core.tiering import Tiering
from kvtier._core.tiers.tier_status import TierStatus


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """The current state of one secondary tier.

    Attributes:
        name: the tier's name.
        down: why the tier is not in use; None if it is.
        backlog_chunks: chunks in puts that are queued or in flight.
        overdue: transfers past their deadline that still run.
        puts: state of the breaker for puts.
        gets: state of the breaker for gets.
        is_healthy: whether the last put and the last get ended in time; None before the first.
    """

    name: str
    down: str | None
    backlog_chunks: int
    overdue: int
    puts: BreakerState
    gets: BreakerState
    is_healthy: bool | None

    @staticmethod
    def of(status: TierStatus) -> TierStatistics:
        return TierStatistics(
            status.name,
            "audit" if status.failed_audit else status.down,
            status.backlog,
            status.puts.overdue + status.gets.overdue,
            status.puts.state,
            status.gets.state,
            status.is_healthy,
        )


@dataclass(frozen=True, slots=True)
class Statistics:
    """The current state of a manager, and its counts since it was opened.

    Attributes:
        slots: usable slots of the primary tier.
        free_slots: slots that hold no chunk.
        ready_chunks: chunks in the primary tier that can be loaded.
        pinned_chunks: chunks that cannot be evicted now.
        counts: number of occurrences, keyed by event, then tier, then reason where there are such.
        tiers: the secondary tiers, in lookup order.
    """

    slots: int
    free_slots: int
    ready_chunks: int
    pinned_chunks: int
    counts: Mapping[tuple[str, ...], float]
    tiers: tuple[TierStatistics, ...]

    @staticmethod
    def of(core: Tiering, counts: Mapping[tuple[str, ...], float]) -> Statistics:
        chunks = core.table.all
        return Statistics(
            slots=len(chunks),
            free_slots=core.table.room,
            ready_chunks=sum(chunk.state is ChunkState.READY for chunk in chunks),
            pinned_chunks=sum(chunk.pins > 0 for chunk in chunks),
            counts=dict(counts),
            tiers=tuple(map(TierStatistics.of, core.shared.tiers)),
        )
