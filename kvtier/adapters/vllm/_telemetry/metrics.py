"""The metrics that kvtier adds to vLLM's endpoint, made of the core's counts and the workers' reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

from kvtier._core.shared import Count
from kvtier._core.states import BreakerState
from kvtier._core.tiering import PRIMARY, Tiering
from kvtier._core.tiers.admission import TierStatus
from kvtier._core.tiers.breaker import Breaker
from kvtier._execution.executor import TierActivity
from kvtier._memory.worker_status import StatusField, StatusTable
from kvtier._telemetry.catalogue import BYTES, COUNTERS, GAUGES

Gauge = tuple[str, tuple[str, ...]]
"""The name and the values of the labels of a gauge."""

Gauges = Mapping[Gauge, float]
"""Values of gauges."""


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """Declare every metric: vLLM asserts that what is sent was declared.

    vLLM asks for them when it is about to register them for an engine. What an earlier engine of this
    process registered goes first, as vLLM does with its own metrics, by their prefix.
    """
    _unregister_earlier()
    kinds = ((OffloadingCounterMetadata, (COUNTERS, BYTES)), (OffloadingGaugeMetadata, (GAUGES,)))
    return {
        metric.name: kind(documentation=metric.documentation, labelnames=metric.labels)
        for kind, catalogues in kinds
        for catalogue in catalogues
        for metric in catalogue.values()
    }


def _unregister_earlier() -> None:
    for name in [metric.name for metric in COUNTERS.values()] + [*GAUGES]:
        collector = REGISTRY._names_to_collectors.get(name)
        if collector is not None and name.startswith("kvtier_"):
            REGISTRY.unregister(collector)


class GaugeReader:
    """Reads the gauges in each step, and says which of them have changed."""

    def __init__(self, core: Tiering, activity: Sequence[TierActivity], chunk_bytes: int) -> None:
        self._table = core.table
        self._retention = core.retention
        self._tiers = list(zip(core.shared.tiers, activity, strict=True))
        self._chunk_bytes = chunk_bytes
        self._last: dict[Gauge, float | None] = {}

    def changed(self, of_workers: Gauges) -> list[tuple[Gauge, float]]:
        """Return the gauges, the workers' too, that have changed since the last call; usually none."""
        values, last = {**self._read(), **of_workers}, self._last
        if values == last:
            return []
        self._last = values
        return [
            (gauge, value)
            for gauge, value in values.items()
            if value is not None and value != last.get(gauge)
        ]

    def _read(self) -> dict[Gauge, float | None]:
        table, size = self._table, self._chunk_bytes
        slots, free = len(table.all), len(table.free)
        kept = len(self._retention.pinned)
        busy = max(0, slots - free - table.evictable - kept)  # those of them that are loaded are not counted
        values: dict[Gauge, float | None] = {
            ("kvtier_slots", ()): slots,
            ("kvtier_free_slots", ()): free,
            ("kvtier_kept_bytes", ()): kept * size,
            ("kvtier_tier_used_bytes", (PRIMARY,)): (slots - free) * size,
            ("kvtier_tier_capacity_bytes", (PRIMARY,)): slots * size,
            ("vllm:kv_offload_cpu_cache_usage_perc", ()): busy / slots if slots else 0.0,
        }
        for gate, activity in self._tiers:
            values |= _read_tier(gate, activity, slots)
        return values


def _read_tier(gate: TierStatus, activity: TierActivity, slots: int) -> dict[Gauge, float | None]:
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
    """Return a breaker's state as users see it: OPEN while a transfer is overdue, for none is begun then."""
    return BreakerState.OPEN if breaker.overdue else breaker.state


def as_stats(
    counts: Mapping[Count, float], gauges: Iterable[tuple[Gauge, float]], chunk_bytes: int
) -> OffloadingConnectorStats:
    """Return counts and gauges in the form that vLLM carries to its metrics endpoint."""
    stats = OffloadingConnectorStats()
    for (what, *labels), value in counts.items():
        stats.increase_counter(COUNTERS[what].name, value, tuple(labels))
        if what in BYTES:
            stats.increase_counter(BYTES[what].name, value * chunk_bytes, tuple(labels))
    for (name, its_labels), value in gauges:
        stats.set_gauge(name, value, its_labels)
    return stats


_COUNTED: Mapping[StatusField, Count] = {
    StatusField.STORES_REPEATED: ("copy_failed", "store", "repeated"),
    StatusField.STORES_DROPPED: ("copy_failed", "store", "dropped"),
    StatusField.LOADS_REPEATED: ("copy_failed", "load", "repeated"),
    StatusField.LOADS_STAGED: ("copy_failed", "load", "staged"),
    StatusField.LOADS_RECOMPUTED: ("copy_failed", "load", "recomputed"),
    StatusField.AUDITED: ("audited",),
}


class WorkerReports:
    """Reads the workers' counts and gauges in the scheduler's thread. Nothing here waits."""

    def __init__(self, status_table: StatusTable) -> None:
        self._status_table = status_table
        self._counted: dict[Count, int] = {}
        self.gauges: Gauges = {}

    def take_counts(self) -> dict[Count, float]:
        """Take what was counted since the last call, and bring the gauges up to date."""
        if not self._status_table.has_changed():
            return {}
        rows = self._status_table.rows
        self.gauges = {
            key: value
            for rank, row in enumerate(rows)
            for key, value in {
                ("kvtier_pinned_bytes", (str(rank),)): row[StatusField.PINNED_BYTES],
                ("kvtier_pinning_failed", (str(rank),)): row[StatusField.PINNING_FAILED],
                ("kvtier_device_up", (str(rank),)): 1 - row[StatusField.LOST],
            }.items()
        }
        totals = {count: sum(row[word] for row in rows) for word, count in _COUNTED.items()}
        new = {count: total - self._counted.get(count, 0) for count, total in totals.items()}
        self._counted = totals
        return {count: number for count, number in new.items() if number}
