"""The gauges of a core and its tiers, by the names of the catalogue. Both owners of a core publish them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from kvtier._core.shared import PRIMARY
from kvtier._core.states import BreakerState
from kvtier._core.tiering import Tiering
from kvtier._core.tiers.breaker import Breaker
from kvtier._core.tiers.tier_status import TierStatus
from kvtier._execution.executor import TierActivity

Gauge = tuple[str, tuple[str, ...]]
"""A name and label values."""

Gauges = Mapping[Gauge, float | None]
"""Values of gauges; None if there is no value yet."""


_OF_PRIMARY: Final[Sequence[Gauge]] = (
    ("kvtier_slots", ()),
    ("kvtier_free_slots", ()),
    ("kvtier_kept_bytes", ()),
    ("kvtier_tier_used_bytes", (PRIMARY,)),
    ("kvtier_tier_capacity_bytes", (PRIMARY,)),
    ("vllm:kv_offload_cpu_cache_usage_perc", ()),
)

# For each secondary tier, with its name as the first label.
_OF_TIER: Final[Sequence[Gauge]] = (
    ("kvtier_tier_up", ()),
    ("kvtier_tier_healthy", ()),
    ("kvtier_breaker_state", ("put",)),
    ("kvtier_breaker_state", ("get",)),
    ("kvtier_queued_transfers", ("put",)),
    ("kvtier_queued_transfers", ("get",)),
    ("kvtier_in_flight_transfers", ("put",)),
    ("kvtier_in_flight_transfers", ("get",)),
    ("vllm:kv_offload_tiering_active_cascade_jobs", ()),
    ("vllm:kv_offload_tiering_active_promotion_jobs", ()),
    ("vllm:kv_offload_tiering_primary_read_usage_perc", ()),
    ("kvtier_tier_used_bytes", ()),
    ("kvtier_tier_capacity_bytes", ()),
)


class GaugeReader:
    """Reads the gauges of the primary tier and of each secondary tier, in lookup order.

    An engine reads them in each step, so their names are made once.
    """

    def __init__(self, core: Tiering, activity: Sequence[TierActivity], chunk_bytes: int) -> None:
        self._core = core
        self._tiers = list(zip(core.shared.tiers, activity, strict=True))
        self._chunk_bytes = chunk_bytes
        self.gauges = list(_OF_PRIMARY)
        for status in core.shared.tiers:
            self.gauges += [(name, (status.name, *labels)) for name, labels in _OF_TIER]

    def read(self) -> list[float | None]:
        """Return the values of ``gauges``."""
        table, chunk_bytes = self._core.table, self._chunk_bytes
        slots, free = len(table.all), table.room
        kept = len(self._core.claims.pinned)
        busy = max(0, slots - free - table.evictable - kept)  # excludes kept chunks that are being loaded
        values: list[float | None] = [
            slots,
            free,
            kept * chunk_bytes,
            (slots - free) * chunk_bytes,
            slots * chunk_bytes,
            busy / slots if slots else 0.0,
        ]
        for status, activity in self._tiers:
            values += _read_tier(status, activity, slots)
        return values


def _read_tier(status: TierStatus, activity: TierActivity, slots: int) -> tuple[float | None, ...]:
    """Return the values of ``_OF_TIER``."""
    puts, gets, usage = activity.puts, activity.gets, activity.usage
    return (
        float(status.disabled_reason is None),
        status.is_healthy,
        _state_of(status.puts),
        _state_of(status.gets),
        puts.waiting,
        gets.waiting,
        puts.running,
        gets.running,
        puts.submitted,
        gets.submitted,
        status.backlog / slots if slots else 0.0,
        usage.used_bytes if usage else None,
        usage.capacity_bytes if usage else None,
    )


def _state_of(breaker: Breaker) -> BreakerState:
    """Return a breaker's state for users: OPEN while a transfer is overdue, because no other starts then."""
    return BreakerState.OPEN if breaker.overdue else breaker.state
