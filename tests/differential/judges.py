"""Invariants of an idle engine: its counters add up, and its KV events name only existing chunks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from tests.integration.harness import Engine, Metrics
from tests.integration.router import Place, Router

Chunks = set[tuple[str, int]]
"""Content hash and group of each chunk."""

_NEVER = ("kvtier_copy_failed", "kvtier_audit_failures", "kvtier_policy_replaced")


def wrong_counters(metrics: Metrics, tiers: Iterable[Mapping[str, Any]]) -> dict[str, object]:
    """Return nonzero counters of events that nothing injects, and tier counters that do not add up."""
    wrong: dict[str, object] = {name: seen for name in _NEVER if (seen := metrics.value(name))}
    stored = metrics.value("kvtier_stored_chunks")
    for tier in tiers:
        count = partial(metrics.value, tier=tier["type"])
        put, backfilled = count("kvtier_put_chunks"), count("kvtier_backfilled_chunks")
        lost = count("kvtier_put_dropped_chunks") + count("kvtier_put_failed_chunks")
        # A lost chunk is put again at its next use.
        if tier["write_policy"] == "all" and not 0 <= put + lost - stored - backfilled <= lost:
            wrong[f"puts into {tier['type']}"] = (stored, backfilled, put, lost)
        asked, found = (count(f"vllm:kv_offload_tiering_chunk_{what}") for what in ("queries", "hits"))
        missed = count("kvtier_absent_chunks") + count("kvtier_get_failed_chunks")
        if not found <= asked <= found + missed:
            wrong[f"lookups in {tier['type']}"] = (asked, found, missed)
    return wrong


def wrong_events(router: Router, engine: Engine, ready: Chunks) -> str:
    """Wait until a router assumes only loadable chunks in host memory; return the error if it never does."""
    try:
        router.until(engine, lambda: believed(router, ("CPU", None)) <= ready)
    except AssertionError as error:
        return str(error)
    return ""


def believed(router: Router, tier: Place) -> Chunks:
    """Return the chunks that a router assumes in a tier."""
    places = [(place, hashes) for place, hashes in router.belief.items() if place[:2] == tier]
    return {(one.hex(), place[2] if len(place) > 2 else 0) for place, hashes in places for one in hashes}
