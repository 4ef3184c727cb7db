"""A server's metrics during a replay: prompt tokens by source, and bytes by tier."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Final

from kvtier_tools.top import Snapshot, parse

COMPUTED, DEVICE, PRIMARY, TIERS = "computed", "device", "cpu", "tiers"
_BY_SOURCE: Final = "vllm:prompt_tokens_by_source_total"
_QUERIES, _HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
_TIER_HITS: Final = "vllm:external_prefix_cache_hits_total"
_LOADED: Final = "kvtier_loaded_chunks_total"
_USED: Final = "kvtier_tier_used_bytes"
_READ, _WRITTEN = "vllm:kv_offload_tiering_read_bytes_total", "vllm:kv_offload_tiering_write_bytes_total"
_COPIED_IN, _COPIED_OUT = "vllm:kv_offload_load_bytes_total", "vllm:kv_offload_store_bytes_total"
_FIGURES: Final = {
    "hits": {_BY_SOURCE, _QUERIES},
    "hits by tier": {_LOADED},
    "bytes by tier": {_READ, _WRITTEN, _COPIED_IN, _COPIED_OUT, _USED},
}


class Counters:
    """The metrics of a server at one time.

    Args:
        page: metrics in Prometheus' text format; None if the server has no metrics.
    """

    def __init__(self, page: str | None) -> None:
        self._snapshot = Snapshot(time.monotonic(), parse(page or ""))
        self._declared = set(re.findall(r"^# TYPE (\S+)", page or "", re.MULTILINE))

    @property
    def left_out(self) -> Sequence[str]:
        """The figures for which the server has no metric."""
        return [figure for figure, metrics in _FIGURES.items() if not any(map(self._has, metrics))]

    def tokens(self, earlier: Counters) -> dict[str, float]:
        """Return prompt tokens since an earlier time: computed, from the device's cache, and from each tier.

        Tokens from tiers are divided in proportion to the chunks that each tier returned. The result is empty
        if the server does not report the computed tokens.
        """
        if self._has(_BY_SOURCE):
            by_source = self._since(earlier, "source", _BY_SOURCE)
            local, tiers = by_source.get("local_cache_hit", 0.0), by_source.get("external_kv_transfer", 0.0)
            computed = by_source.get("local_compute", 0.0)
        elif self._has(_QUERIES):
            local, tiers = (sum(self._since(earlier, "", name).values()) for name in (_HITS, _TIER_HITS))
            computed = sum(self._since(earlier, "", _QUERIES).values()) - local - tiers
        else:
            return {}
        loaded = {tier: n for tier, n in self._since(earlier, "tier", _LOADED).items() if n}
        of_tiers = {tier: tiers * n / sum(loaded.values()) for tier, n in loaded.items()}
        if tiers and not of_tiers:
            of_tiers = {TIERS: tiers}
        return {COMPUTED: computed, DEVICE: local, **of_tiers}

    def bytes_of(self, tier: str, earlier: Counters) -> tuple[float | None, float | None, float | None]:
        """Return the bytes read from and written to a tier since an earlier time, and the bytes it holds.

        For the primary tier, these are the copies to and from the device. A figure is None if the server has
        no metric for it.
        """
        given, taken, key = (_COPIED_IN, _COPIED_OUT, "") if tier == PRIMARY else (_READ, _WRITTEN, tier)
        read, written = (self._since(earlier, "tier", name).get(key) for name in (given, taken))
        return read, written, self._snapshot.by("tier", _USED).get(tier)

    @property
    def tiers(self) -> Sequence[str]:
        """The server's tiers."""
        found = self._snapshot.by("tier", _USED) | self._snapshot.by("tier", _WRITTEN)
        return sorted(found, key=lambda tier: (tier != PRIMARY, tier))

    def _has(self, name: str) -> bool:
        return bool({name, name.removesuffix("_total")} & self._declared)

    def _since(self, earlier: Counters, label: str, name: str) -> Mapping[str, float]:
        before = earlier._snapshot.by(label, name)
        return {key: value - before.get(key, 0.0) for key, value in self._snapshot.by(label, name).items()}
