"""The catalogue of metrics: names, labels, help texts, and the possible values of each reason label.

A metric that vLLM's own tiering has too keeps vLLM's name, so that dashboards and alerts continue to work.
All others begin with ``kvtier_``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtier import _reasons as reasons


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. Prometheus adds ``_total`` to a counter's name."""

    name: str
    documentation: str
    labels: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Possible values of the label ``reason`` and their meaning. For transfers a tier can add its own."""


COUNTERS: Mapping[str, Metric] = {
    "miss": Metric("kvtier_misses", "Chunk lookups that ended in a miss.", ("reason",), reasons.MISS),
    "expired": Metric(
        "kvtier_expired_requests", "Requests whose `request_deadline_s` passed before the tiers answered."
    ),
    "waits": Metric(
        "kvtier_waits",
        "Requests that waited for chunks that no tier had yet (`wait_s`), by how the wait ended.",
        ("reason",),
        reasons.WAITS,
    ),
    "loaded": Metric(
        "kvtier_loaded_chunks",
        "Hits: chunks loaded to the device, by the tier that had them; `cpu` is the primary tier.",
        ("tier",),
    ),
    "stored": Metric("kvtier_stored_chunks", "Chunks stored in the primary tier."),
    "store_refused": Metric(
        "kvtier_store_refused_chunks",
        "Chunks that the engine offered and kvtier did not store.",
        ("reason",),
        reasons.STORE_REFUSED,
    ),
    "evicted": Metric("kvtier_evicted_chunks", "Chunks evicted from the primary tier."),
    "dropped": Metric(
        "kvtier_dropped_chunks",
        "Chunks dropped from the primary tier because a store or load failed.",
        ("verb",),
    ),
    "copy_failed": Metric(
        "kvtier_copy_failed",
        "Failed device copies, by what happened next: `repeated`, `dropped`, `staged` or `recomputed`.",
        ("verb", "outcome"),
    ),
    "audited": Metric("kvtier_audited_chunks", "Chunks audited in stores and loads, summed over workers."),
    "audit_failed": Metric(
        "kvtier_audit_failures",
        "Audits that found a damaged chunk, by the tier that was disabled; `cpu`: all of kvtier was.",
        ("tier",),
    ),
    "keep_refused": Metric(
        "kvtier_keep_refused_chunks",
        "Chunks that a request wanted to keep in the primary tier and that kvtier does not keep.",
        ("reason",),
        reasons.KEEP_REFUSED,
    ),
    "released": Metric("kvtier_released_chunks", "Chunks that left the primary tier by `release: true`."),
    "prefetched": Metric(
        "kvtier_prefetched_chunks", "Chunks promoted because a client had announced their next use."
    ),
    "put": Metric("kvtier_put_chunks", "Chunks put into a tier.", ("tier",)),
    "put_seconds": Metric(
        "vllm:kv_offload_tiering_write_time", "Seconds spent in puts, summed over concurrent ones.", ("tier",)
    ),
    "put_dropped": Metric(
        "kvtier_put_dropped_chunks",
        "Chunks that were not submitted to a tier.",
        ("tier", "reason"),
        reasons.PUT_DROPPED,
    ),
    "put_failed": Metric(
        "kvtier_put_failed_chunks",
        "Chunks that a tier refused or failed to put.",
        ("tier", "reason"),
        reasons.TRANSFER,
    ),
    "asked": Metric(
        "vllm:kv_offload_tiering_chunk_queries", "Chunks looked up in a secondary tier.", ("tier",)
    ),
    "found": Metric(
        "vllm:kv_offload_tiering_chunk_hits", "Chunks that a lookup in a secondary tier found.", ("tier",)
    ),
    "fetched": Metric("kvtier_fetched_chunks", "Chunks promoted from a tier to the primary tier.", ("tier",)),
    "get_seconds": Metric(
        "vllm:kv_offload_tiering_read_time", "Seconds spent in gets, summed over concurrent ones.", ("tier",)
    ),
    "absent": Metric(
        "kvtier_absent_chunks", "Chunks that a lookup in a secondary tier did not find.", ("tier",)
    ),
    "get_failed": Metric(
        "kvtier_get_failed_chunks",
        "Chunks that a tier failed to get.",
        ("tier", "reason"),
        reasons.TRANSFER,
    ),
    "skipped": Metric(
        "kvtier_skipped_chunks",
        "Chunk lookups that skipped a tier.",
        ("tier", "reason"),
        reasons.SKIPPED,
    ),
    "backfilled": Metric(
        "kvtier_backfilled_chunks", "Chunks promoted from a later tier and also put into this one.", ("tier",)
    ),
    "overdue": Metric(
        "kvtier_overdue_transfers", "Puts and gets that passed their deadline.", ("tier", "verb")
    ),
    "breaker_opened": Metric(
        "kvtier_breaker_opened",
        "Number of times that a tier's breaker for puts or gets opened.",
        ("tier", "verb", "reason"),
        reasons.BREAKER_OPENED,
    ),
    "breaker_closed": Metric(
        "kvtier_breaker_closed",
        "Number of times that a breaker closed after a successful probe.",
        ("tier", "verb"),
    ),
    "retries": Metric(
        "kvtier_retries",
        "Puts and gets that failed for a transient reason, by what became of the retry.",
        ("tier", "verb", "reason"),
        reasons.RETRY,
    ),
    "tier_down": Metric(
        "kvtier_tier_down",
        "Number of times that a tier went down: opening or reset failed, or its process ended.",
        ("tier",),
    ),
    "process_ended": Metric(
        "kvtier_tier_process_ended",
        "Number of times that the tier process ended and was restarted.",
        ("reason",),
        reasons.PROCESS_ENDED,
    ),
    "policy_replaced": Metric(
        "kvtier_policy_replaced",
        "Number of times that an eviction policy broke its contract and `lru` replaced it.",
        ("reason",),
        reasons.POLICY_REPLACED,
    ),
}
"""Counters, by the first element of the core's count keys."""

BYTES: Mapping[str, Metric] = {
    "put": Metric("vllm:kv_offload_tiering_write_bytes", "Bytes of the chunks put into a tier.", ("tier",)),
    "fetched": Metric(
        "vllm:kv_offload_tiering_read_bytes",
        "Bytes of the chunks promoted from a tier to the primary tier.",
        ("tier",),
    ),
}
"""Counters of bytes, derived from the chunk count of this key."""

GAUGES: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("kvtier_slots", "Usable slots of the primary tier."),
        Metric("kvtier_free_slots", "Free slots of the primary tier."),
        Metric("kvtier_kept_bytes", "Bytes of the primary tier that requests keep there."),
        Metric(
            "kvtier_tier_used_bytes",
            "Bytes that a tier holds, updated about once a second; `cpu` is the primary tier.",
            ("tier",),
        ),
        Metric("kvtier_tier_capacity_bytes", "Bytes that a tier may hold.", ("tier",)),
        Metric("kvtier_tier_up", "1 if a tier is open; 0 while it is down and kvtier retries.", ("tier",)),
        Metric(
            "kvtier_tier_healthy",
            "1 if the last put and the last get of a tier ended in time, else 0; no value before the first.",
            ("tier",),
        ),
        Metric(
            "kvtier_breaker_state",
            "State of a tier's breaker: 0 closed (in use), 1 half open (probing), 2 open (not in use).",
            ("tier", "verb"),
        ),
        Metric(
            "kvtier_queued_transfers",
            "Puts and gets that wait for the tier's `max_concurrency`.",
            ("tier", "verb"),
        ),
        Metric("kvtier_in_flight_transfers", "Puts and gets that a tier is executing.", ("tier", "verb")),
        Metric("vllm:kv_offload_tiering_active_cascade_jobs", "Puts queued or in flight.", ("tier",)),
        Metric("vllm:kv_offload_tiering_active_promotion_jobs", "Promotions queued or in flight.", ("tier",)),
        Metric(
            "vllm:kv_offload_tiering_primary_read_usage_perc",
            "Share of the primary tier that is pinned by puts into this tier, 0 to 1.",
            ("tier",),
        ),
        Metric(
            "kvtier_pinned_bytes",
            "Bytes of the primary tier that a worker has page-locked for its device.",
            ("worker",),
        ),
        Metric(
            "kvtier_pinning_failed",
            "1 if a worker could not page-lock all of the primary tier; its copies are slower.",
            ("worker",),
        ),
        Metric("kvtier_device_up", "1 if a worker's device works; 0 once it is lost.", ("worker",)),
        Metric(
            "vllm:kv_offload_cpu_cache_usage_perc",
            "Share of the primary tier that is in use by transfers and cannot be evicted, 0 to 1.",
        ),
    )
}
"""Gauges, by name."""
