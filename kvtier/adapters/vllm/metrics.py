"""The metrics that kvtier adds to vLLM's endpoint, and how the core's counts become them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

from kvtier.core.ledger import Count
from kvtier.core.tiering import Tiering


@dataclass(frozen=True, slots=True)
class _Counter:
    name: str
    labels: tuple[str, ...]
    documentation: str


COUNTERS: Mapping[str, _Counter] = {
    "miss": _Counter("kvtier_misses", ("reason",), "Lookups of a key that ended as a miss."),
    "expired": _Counter(
        "kvtier_expired_requests", (), "Requests whose deadline passed before the tiers answered."
    ),
    "loaded": _Counter(
        "kvtier_loaded_chunks", ("tier",), "Chunks loaded to the device, by where they were found."
    ),
    "stored": _Counter("kvtier_stored_chunks", (), "Chunks stored in the primary tier."),
    "store_refused": _Counter("kvtier_store_refused_chunks", ("reason",), "Chunks that were not stored."),
    "evicted": _Counter("kvtier_evicted_chunks", (), "Chunks evicted from the primary tier."),
    "put": _Counter("kvtier_put_chunks", ("tier",), "Chunks put into a tier."),
    "put_seconds": _Counter(
        "kvtier_put_seconds", ("tier",), "Seconds that puts took, over all that ran at once."
    ),
    "put_dropped": _Counter("kvtier_put_dropped_chunks", ("tier", "reason"), "Chunks not offered to a tier."),
    "put_failed": _Counter(
        "kvtier_put_failed_chunks", ("tier", "reason"), "Chunks that a tier did not take."
    ),
    "fetched": _Counter(
        "kvtier_fetched_chunks", ("tier",), "Chunks brought from a tier to the primary tier."
    ),
    "get_seconds": _Counter(
        "kvtier_get_seconds", ("tier",), "Seconds that gets took, over all that ran at once."
    ),
    "absent": _Counter(
        "kvtier_absent_chunks", ("tier",), "Chunks that a tier was asked for and could not give."
    ),
    "get_failed": _Counter(
        "kvtier_get_failed_chunks", ("tier", "reason"), "Chunks that a tier has but did not give."
    ),
    "skipped": _Counter("kvtier_skipped_chunks", ("tier", "reason"), "Chunks that a tier was not asked for."),
    "overdue": _Counter(
        "kvtier_overdue_transfers", ("tier", "verb"), "Puts and gets that passed their deadline."
    ),
}

_SLOTS = "kvtier_slots"
_FREE_SLOTS = "kvtier_free_slots"
_TIER_UP = "kvtier_tier_up"
_USAGE = "vllm:kv_offload_cpu_cache_usage_perc"

GAUGES: Mapping[str, OffloadingGaugeMetadata] = {
    _SLOTS: OffloadingGaugeMetadata("Slots of the primary tier that are usable."),
    _FREE_SLOTS: OffloadingGaugeMetadata("Slots of the primary tier that hold nothing."),
    _TIER_UP: OffloadingGaugeMetadata("Whether a tier is given work now.", ("tier",)),
    _USAGE: OffloadingGaugeMetadata("Share of the primary tier that is pinned or being filled."),
}


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """Declare every metric: vLLM asserts that what is sent was declared.

    vLLM asks for them when it is about to register them for an engine. What an earlier engine of this
    process registered goes first, as vLLM does with its own metrics, by their prefix.
    """
    _unregister_earlier()
    counters = {
        counter.name: OffloadingCounterMetadata(counter.documentation, counter.labels)
        for counter in COUNTERS.values()
    }
    return {**counters, **GAUGES}


def _unregister_earlier() -> None:
    for name in [counter.name for counter in COUNTERS.values()] + [*GAUGES]:
        collector = REGISTRY._names_to_collectors.get(name)
        if collector is not None and name.startswith("kvtier_"):
            REGISTRY.unregister(collector)


Gauges = Mapping[tuple[str, tuple[str, ...]], float]
"""Values by the name and the labels of the gauge."""


def read_gauges(core: Tiering) -> Gauges:
    """Read the core's state."""
    slots = len(core.table.all)
    busy = slots - len(core.table.free) - len(core.table.policy)
    gauges: dict[tuple[str, tuple[str, ...]], float] = {
        (_SLOTS, ()): slots,
        (_FREE_SLOTS, ()): len(core.table.free),
        (_USAGE, ()): busy / slots if slots else 0.0,
    }
    for gate in core.ledger.tiers:
        gauges[_TIER_UP, (gate.name,)] = 0 if gate.closed else 1
    return gauges


def as_stats(counts: Mapping[Count, float], gauges: Gauges) -> OffloadingConnectorStats:
    """Make of counts and gauges what vLLM carries to its endpoint."""
    stats = OffloadingConnectorStats()
    for (what, *labels), value in counts.items():
        stats.increase_counter(COUNTERS[what].name, value, tuple(labels))
    for (name, its_labels), value in gauges.items():
        stats.set_gauge(name, value, its_labels)
    return stats
