"""Every metric of kvtier: its name, its labels, what it says, and which values its labels can have.

Where vLLM's own tiering has a metric of the same meaning its name is taken, so that dashboards and
alerts go on working. Everything else begins with ``kvtier_``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtier import _reasons as reasons


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: as it is published; Prometheus adds ``_total`` to a counter's.
        labels: names of its labels.
        documentation: what it says.
        reasons: what the label ``reason`` can be, and what each of them means. Of transfers a tier may
            have words of its own beside these, see ``SecondaryTier.reasons``.
    """

    name: str
    documentation: str
    labels: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)


COUNTERS: Mapping[str, Metric] = {
    "miss": Metric("kvtier_misses", "Lookups of a key that ended as a miss.", ("reason",), reasons.MISS),
    "expired": Metric("kvtier_expired_requests", "Requests whose deadline passed before the tiers answered."),
    "loaded": Metric(
        "kvtier_loaded_chunks", "Hits: chunks loaded to the device, by where they were found.", ("tier",)
    ),
    "stored": Metric("kvtier_stored_chunks", "Chunks stored in the primary tier."),
    "store_refused": Metric(
        "kvtier_store_refused_chunks", "Chunks that were not stored.", ("reason",), reasons.STORE_REFUSED
    ),
    "evicted": Metric("kvtier_evicted_chunks", "Chunks evicted from the primary tier."),
    "dropped": Metric(
        "kvtier_dropped_chunks", "Chunks that a failed copy of their store or load has cost.", ("verb",)
    ),
    "copy_failed": Metric(
        "kvtier_copy_failed", "Device copies that failed, by what was done about it.", ("verb", "outcome")
    ),
    "audited": Metric(
        "kvtier_audited_chunks",
        "Chunks that a worker has audited: in a store, or in a load. Each worker counts.",
    ),
    "audit_failed": Metric(
        "kvtier_audit_failures",
        "Audits that have found a chunk damaged, by the tier that is not used any more; `cpu`: none is.",
        ("tier",),
    ),
    "put": Metric("kvtier_put_chunks", "Chunks put into a tier.", ("tier",)),
    "put_seconds": Metric(
        "vllm:kv_offload_tiering_write_time", "Seconds that puts took, over all that ran at once.", ("tier",)
    ),
    "put_dropped": Metric(
        "kvtier_put_dropped_chunks",
        "Chunks not offered to a tier.",
        ("tier", "reason"),
        reasons.PUT_DROPPED,
    ),
    "put_failed": Metric(
        "kvtier_put_failed_chunks",
        "Chunks that a tier did not take.",
        ("tier", "reason"),
        reasons.TRANSFER,
    ),
    "asked": Metric(
        "vllm:kv_offload_tiering_chunk_queries", "Chunks that a secondary tier was asked for.", ("tier",)
    ),
    "found": Metric(
        "vllm:kv_offload_tiering_chunk_hits", "Chunks of these that it has, as far as is known.", ("tier",)
    ),
    "fetched": Metric("kvtier_fetched_chunks", "Chunks brought from a tier to the primary tier.", ("tier",)),
    "get_seconds": Metric(
        "vllm:kv_offload_tiering_read_time", "Seconds that gets took, over all that ran at once.", ("tier",)
    ),
    "absent": Metric(
        "kvtier_absent_chunks", "Chunks that a tier was asked for and does not have.", ("tier",)
    ),
    "get_failed": Metric(
        "kvtier_get_failed_chunks",
        "Chunks that a tier was asked for and could not give.",
        ("tier", "reason"),
        reasons.TRANSFER,
    ),
    "skipped": Metric(
        "kvtier_skipped_chunks",
        "Chunks that a tier was not asked for.",
        ("tier", "reason"),
        reasons.SKIPPED,
    ),
    "lifted": Metric(
        "kvtier_lifted_chunks", "Chunks that a later tier gave, and that were offered to this one.", ("tier",)
    ),
    "overdue": Metric(
        "kvtier_overdue_transfers", "Puts and gets that passed their deadline.", ("tier", "verb")
    ),
    "breaker_opened": Metric(
        "kvtier_breaker_opened",
        "How often a tier was not given any more puts, or gets, for a while.",
        ("tier", "verb", "reason"),
        reasons.BREAKER_OPENED,
    ),
    "breaker_closed": Metric(
        "kvtier_breaker_closed", "How often it was given them again, as one went well.", ("tier", "verb")
    ),
    "retries": Metric(
        "kvtier_retries",
        "Puts and gets that failed in a way that may be over a moment later.",
        ("tier", "verb", "reason"),
        reasons.RETRY,
    ),
    "tier_down": Metric(
        "kvtier_tier_down", "How often a tier could not be opened or reset, or lost its process.", ("tier",)
    ),
    "process_ended": Metric(
        "kvtier_tier_process_ended",
        "How often the process of the tiers has ended and was started anew.",
        ("reason",),
        reasons.PROCESS_ENDED,
    ),
    "policy_replaced": Metric(
        "kvtier_policy_replaced",
        "How often an eviction policy did what it must not, and lru took its place.",
        ("reason",),
        reasons.POLICY_REPLACED,
    ),
}
"""Counters, by the first part of the core's counts."""

BYTES: Mapping[str, Metric] = {
    "put": Metric("vllm:kv_offload_tiering_write_bytes", "Bytes of the chunks put into a tier.", ("tier",)),
    "fetched": Metric(
        "vllm:kv_offload_tiering_read_bytes",
        "Bytes of the chunks brought from a tier to the primary tier.",
        ("tier",),
    ),
}
"""Counters of bytes, by the count of chunks that they follow."""

GAUGES: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("kvtier_slots", "Slots of the primary tier that are usable."),
        Metric("kvtier_free_slots", "Slots of the primary tier that hold nothing."),
        Metric(
            "kvtier_tier_used_bytes",
            "Bytes that a tier keeps, about a second ago; the primary tier is `cpu`.",
            ("tier",),
        ),
        Metric("kvtier_tier_capacity_bytes", "Bytes that a tier may keep.", ("tier",)),
        Metric("kvtier_tier_up", "Whether a tier is open; where it is not, that is tried again.", ("tier",)),
        Metric(
            "kvtier_tier_healthy",
            "Whether a tier's last real put and get were answered in time; nothing until there was one.",
            ("tier",),
        ),
        Metric(
            "kvtier_breaker_state",
            "Whether a tier is given puts, or gets: 0 it is, 1 a probe is under way, 2 it is not for now.",
            ("tier", "verb"),
        ),
        Metric(
            "kvtier_queued_transfers",
            "Puts and gets that wait for one of the tier's turns.",
            ("tier", "verb"),
        ),
        Metric("kvtier_in_flight_transfers", "Puts and gets that a tier is at work on.", ("tier", "verb")),
        Metric(
            "vllm:kv_offload_tiering_active_cascade_jobs",
            "Puts that have not ended, waiting or not.",
            ("tier",),
        ),
        Metric(
            "vllm:kv_offload_tiering_active_promotion_jobs",
            "Fetches that have not ended, waiting or not.",
            ("tier",),
        ),
        Metric(
            "vllm:kv_offload_tiering_primary_read_usage_perc",
            "Share of the primary tier that puts into a tier hold.",
            ("tier",),
        ),
        Metric("kvtier_pinned_bytes", "Bytes of the primary tier that a worker has pinned.", ("worker",)),
        Metric("kvtier_pinning_failed", "Whether a worker can pin no more of it.", ("worker",)),
        Metric("kvtier_device_up", "Whether a worker's device still copies.", ("worker",)),
        Metric(
            "vllm:kv_offload_cpu_cache_usage_perc",
            "Share of the primary tier that is pinned or being filled.",
        ),
    )
}
"""Gauges, by name."""
