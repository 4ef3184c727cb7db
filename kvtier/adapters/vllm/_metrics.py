"""The metrics that kvtier adds to vLLM's endpoint, and how the core's counts become them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

from kvtier._core.admission import TierGate
from kvtier._core.breaker import Breaker
from kvtier._core.shared import Count
from kvtier._core.states import BreakerState
from kvtier._core.tiering import PRIMARY, Tiering
from kvtier._executor import TierActivity
from kvtier._telemetry.catalogue import BYTES, COUNTERS, GAUGES

Gauge = tuple[str, tuple[str, ...]]
"""The name and the values of the labels of a gauge."""

Gauges = Mapping[Gauge, float]
"""Values of gauges."""

PINNED_BYTES = "kvtier_pinned_bytes"
PINNING_FAILED = "kvtier_pinning_failed"
DEVICE_UP = "kvtier_device_up"

_PRIMARY_GAUGES: Sequence[Gauge] = (
    ("kvtier_slots", ()),
    ("kvtier_free_slots", ()),
    ("kvtier_tier_used_bytes", (PRIMARY,)),
    ("kvtier_tier_capacity_bytes", (PRIMARY,)),
    ("vllm:kv_offload_cpu_cache_usage_perc", ()),
)
_TIER_GAUGES: Sequence[Gauge] = (
    ("kvtier_tier_up", ()),
    ("kvtier_tier_healthy", ()),
    ("kvtier_breaker_state", ("put",)),
    ("kvtier_breaker_state", ("get",)),
    ("kvtier_tier_used_bytes", ()),
    ("kvtier_tier_capacity_bytes", ()),
    ("kvtier_queued_transfers", ("put",)),
    ("kvtier_queued_transfers", ("get",)),
    ("kvtier_in_flight_transfers", ("put",)),
    ("kvtier_in_flight_transfers", ("get",)),
    ("vllm:kv_offload_tiering_active_cascade_jobs", ()),
    ("vllm:kv_offload_tiering_active_promotion_jobs", ()),
    ("vllm:kv_offload_tiering_primary_read_usage_perc", ()),
)


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """Declare every metric: vLLM asserts that what is sent was declared.

    vLLM asks for them when it is about to register them for an engine. What an earlier engine of this
    process registered goes first, as vLLM does with its own metrics, by their prefix.
    """
    _unregister_earlier()
    counters = [*COUNTERS.values(), *BYTES.values()]
    return {
        **{
            metric.name: OffloadingCounterMetadata(
                documentation=metric.documentation, labelnames=metric.labels
            )
            for metric in counters
        },
        **{
            name: OffloadingGaugeMetadata(documentation=metric.documentation, labelnames=metric.labels)
            for name, metric in GAUGES.items()
        },
    }


def _unregister_earlier() -> None:
    for name in [metric.name for metric in COUNTERS.values()] + [*GAUGES]:
        collector = REGISTRY._names_to_collectors.get(name)
        if collector is not None and name.startswith("kvtier_"):
            REGISTRY.unregister(collector)


class GaugeReader:
    """Reads the gauges in each step, and says which of them have changed.

    Args:
        core: the state machine.
        activity: what each tier is doing.
        chunk_bytes: length of a chunk.
    """

    def __init__(self, core: Tiering, activity: Sequence[TierActivity], chunk_bytes: int) -> None:
        self._table = core.table
        self._tiers = list(zip(core.shared.tiers, activity, strict=True))
        self._chunk_bytes = chunk_bytes
        self._gauges = [*_PRIMARY_GAUGES]
        for gate, _ in self._tiers:
            self._gauges += [(name, (gate.name, *labels)) for name, labels in _TIER_GAUGES]
        self._last: list[float | None] = [None] * len(self._gauges)
        self._last_of_workers: Gauges = {}

    def changed(self, of_workers: Gauges | None = None) -> list[tuple[Gauge, float]]:
        """Return the gauges whose values have changed since the last call; usually none.

        Args:
            of_workers: gauges of the workers; another mapping where something has changed.
        """
        changed: list[tuple[Gauge, float]] = []
        values = self._read()
        if values != self._last:
            pairs = zip(self._gauges, values, self._last, strict=True)
            changed += [(gauge, new) for gauge, new, old in pairs if new is not None and new != old]
            self._last = values
        if of_workers is not None and of_workers is not self._last_of_workers:
            last, self._last_of_workers = self._last_of_workers, of_workers
            changed += [(gauge, new) for gauge, new in of_workers.items() if last.get(gauge) != new]
        return changed

    def _read(self) -> list[float | None]:
        table, size = self._table, self._chunk_bytes
        slots, free = len(table.all), len(table.free)
        busy = slots - free - table.evictable
        values: list[float | None] = [
            slots,
            free,
            (slots - free) * size,
            slots * size,
            busy / slots if slots else 0.0,
        ]
        for gate, activity in self._tiers:
            values += _read_tier(gate, activity, slots)
        return values


def _read_tier(gate: TierGate, activity: TierActivity, slots: int) -> Iterable[float | None]:
    """Return the values of one tier's gauges, in the order of ``_TIER_GAUGES``."""
    puts, gets, usage = activity.puts, activity.gets, activity.usage
    return (
        gate.unusable is None,
        gate.is_healthy,
        _state_of(gate.puts),
        _state_of(gate.gets),
        usage.used_bytes if usage else None,
        usage.capacity_bytes if usage else None,
        puts.waiting,
        gets.waiting,
        puts.running,
        gets.running,
        puts.submitted,
        gets.submitted,
        gate.backlog / slots if slots else 0.0,
    )


def _state_of(breaker: Breaker) -> BreakerState:
    """Its state, as the tier's user sees it: it gets nothing while a transfer is overdue."""
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
