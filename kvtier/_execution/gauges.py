"""The gauges of a core and its tiers, by the names of the catalogue. Both owners of a core publish them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtier._core.shared import PRIMARY
from kvtier._core.states import BreakerState
from kvtier._core.tiering import Tiering
from kvtier._core.tiers.breaker import Breaker
from kvtier._core.tiers.tier_status import TierStatus
from kvtier._execution.executor import TierActivity

Gauges = Mapping[tuple[str, tuple[str, ...]], float | None]
"""Values of gauges, by name and label values; None if there is no value yet."""


def read_gauges(core: Tiering, activity: Sequence[TierActivity], chunk_bytes: int) -> Gauges:
    """Return the gauges of the primary tier and of each secondary tier, in lookup order."""
    table = core.table
    slots, free = len(table.all), table.room
    kept = len(core.claims.pinned)
    busy = max(0, slots - free - table.evictable - kept)  # excludes kept chunks that are being loaded
    values: dict[tuple[str, tuple[str, ...]], float | None] = {
        ("kvtier_slots", ()): slots,
        ("kvtier_free_slots", ()): free,
        ("kvtier_kept_bytes", ()): kept * chunk_bytes,
        ("kvtier_tier_used_bytes", (PRIMARY,)): (slots - free) * chunk_bytes,
        ("kvtier_tier_capacity_bytes", (PRIMARY,)): slots * chunk_bytes,
        ("vllm:kv_offload_cpu_cache_usage_perc", ()): busy / slots if slots else 0.0,
    }
    for gate, one in zip(core.shared.tiers, activity, strict=True):
        values |= _read_tier(gate, one, slots)
    return values


def _read_tier(gate: TierStatus, activity: TierActivity, slots: int) -> Gauges:
    tier, puts, gets, usage = gate.name, activity.puts, activity.gets, activity.usage
    return {
        ("kvtier_tier_up", (tier,)): float(gate.disabled_reason is None),
        ("kvtier_tier_healthy", (tier,)): gate.is_healthy,
        ("kvtier_breaker_state", (tier, "put")): _state_of(gate.puts),
        ("kvtier_breaker_state", (tier, "get")): _state_of(gate.gets),
        ("kvtier_queued_transfers", (tier, "put")): puts.waiting,
        ("kvtier_queued_transfers", (tier, "get")): gets.waiting,
        ("kvtier_in_flight_transfers", (tier, "put")): puts.running,
        ("kvtier_in_flight_transfers", (tier, "get")): gets.running,
        ("vllm:kv_offload_tiering_active_cascade_jobs", (tier,)): puts.submitted,
        ("vllm:kv_offload_tiering_active_promotion_jobs", (tier,)): gets.submitted,
        ("vllm:kv_offload_tiering_primary_read_usage_perc", (tier,)): gate.backlog / slots if slots else 0.0,
        ("kvtier_tier_used_bytes", (tier,)): usage.used_bytes if usage else None,
        ("kvtier_tier_capacity_bytes", (tier,)): usage.capacity_bytes if usage else None,
    }


def _state_of(breaker: Breaker) -> BreakerState:
    """Return a breaker's state for users: OPEN while a transfer is overdue, because no other starts then."""
    return BreakerState.OPEN if breaker.overdue else breaker.state
