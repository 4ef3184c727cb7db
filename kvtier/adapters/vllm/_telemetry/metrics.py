"""vLLM's metrics of a manager, from the core's counts and the workers' reports, and its KV events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

from kvtier._core.shared import Count
from kvtier._core.tiering import Tiering
from kvtier._execution.executor import TierActivity
from kvtier._execution.gauges import Gauge, GaugeReader
from kvtier._log import GuardedLogger
from kvtier._memory.worker_status import StatusField, StatusTable
from kvtier._reasons import BY_CHOICE
from kvtier._telemetry.catalogue import BYTES, COUNTERS, GAUGES
from kvtier._telemetry.dropped_puts import warn_not_written
from kvtier.adapters.vllm._telemetry.events import EventStream, Location

logger = GuardedLogger("kvtier.vllm")

_COUNTED: Mapping[StatusField, Count] = {
    StatusField.STORES_REPEATED: ("copy_failed", "store", "repeated"),
    StatusField.STORES_DROPPED: ("copy_failed", "store", "dropped"),
    StatusField.LOADS_REPEATED: ("copy_failed", "load", "repeated"),
    StatusField.LOADS_STAGED: ("copy_failed", "load", "staged"),
    StatusField.LOADS_RECOMPUTED: ("copy_failed", "load", "recomputed"),
    StatusField.AUDITED: ("audited",),
}


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """Declare every metric: vLLM asserts that sent metrics were declared.

    vLLM calls it just before it registers them for an engine. It removes metrics that an earlier engine of
    this process registered, as vLLM does with its own, by their prefix.
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


class Published:
    """Collects counts and announcements of the core and the workers, in vLLM's forms.

    Args:
        workers: the workers' reports; None if there are none.
        locations: where each secondary tier keeps its chunks, for requests that choose among them.
        self_describing: whether events are sent only if vLLM can describe the contents of their chunks.
        info: labels of the info metric.
    """

    def __init__(
        self,
        core: Tiering,
        activity: Sequence[TierActivity],
        workers: StatusTable | None = None,
        *,
        locations: Sequence[Location] = (),
        chunk_bytes: int = 0,
        self_describing: bool = False,
        info: Mapping[str, str] | None = None,
    ) -> None:
        self._core = core
        self.workers = workers or StatusTable(memoryview(b""), 0, 0)
        self.locations = locations
        self.names = [status.name for status in core.shared.tiers]
        self.info = dict(info or {})
        describes = self_describing and core.shared.kv_events.enabled
        self.stream = EventStream(self.names, locations, self_describing=describes)
        self._chunk_bytes = chunk_bytes
        self._gauges = GaugeReader(core, activity, chunk_bytes)
        self._readings: list[float | None] = [None] * len(self._gauges.gauges)  # as last published
        self._other_gauges: dict[Gauge, float] = {}  # to publish
        self._worker_counts: dict[Count, int] = {}  # since the start
        self._not_put: Counter[tuple[str, str]] = Counter()  # chunks, by tier and reason

    def tell_capabilities(self, actions: Sequence[tuple[str, str]]) -> None:
        """Publish which actions of clients are executed, by type and version."""
        self.info["kv_hints"] = ",".join(map("/".join, actions))
        self._other_gauges.update({("kvtier_hint_capability", action): 1.0 for action in actions})

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return and clear the announcements since the last call."""
        events = self._core.shared.kv_events
        return self.stream.events(events.take_events()) if events.enabled else ()

    def take_stats(self) -> OffloadingConnectorStats | None:
        """Return and clear the counts since the last call, and changed gauges; None if there are none."""
        counts = self._take_counts() | self.take_worker_counts()
        last, self._readings = self._readings, self._gauges.read()
        if not (counts or self._readings != last or self._other_gauges):
            return None
        stats = OffloadingConnectorStats()
        for (what, *labels), value in counts.items():
            stats.increase_counter(COUNTERS[what].name, value, tuple(labels))
            if what in BYTES:
                stats.increase_counter(BYTES[what].name, value * self._chunk_bytes, tuple(labels))
        for gauge, reading, before in zip(self._gauges.gauges, self._readings, last, strict=True):
            if reading is not None and reading != before:
                stats.set_gauge(gauge[0], reading, gauge[1])
        for (name, values), reading in self._other_gauges.items():
            stats.set_gauge(name, reading, values)
        self._other_gauges.clear()
        return stats

    def warn_of_chunks_not_put(self) -> None:
        """Log how many chunks this engine never put, by tier and reason: its metrics end with the engine."""
        self._take_counts()
        for tier in sorted({tier for tier, _ in self._not_put}):
            reasons = {reason: count for (name, reason), count in self._not_put.items() if name == tier}
            warn_not_written(logger, tier, f"{sum(reasons.values())} chunks stored in host memory", reasons)

    def _take_counts(self) -> dict[Count, float]:
        counts = self._core.take_counts()
        for (what, *labels), count in counts.items():
            if what in ("put_dropped", "put_failed") and labels[1] not in BY_CHOICE:
                self._not_put[labels[0], labels[1]] += int(count)
        return counts

    def take_worker_counts(self) -> dict[Count, float]:
        """Return and clear the workers' counts since the last call, and publish their gauges next."""
        if not self.workers.notice_change():
            return {}
        rows = self.workers.rows
        for rank, row in enumerate(rows):
            self._other_gauges["kvtier_pinned_bytes", (str(rank),)] = row[StatusField.PINNED_BYTES]
            self._other_gauges["kvtier_pinning_failed", (str(rank),)] = row[StatusField.PINNING_FAILED]
            self._other_gauges["kvtier_device_up", (str(rank),)] = 1 - row[StatusField.LOST]
        totals = {count: sum(row[word] for row in rows) for word, count in _COUNTED.items()}
        before, self._worker_counts = self._worker_counts, totals
        new = {count: total - before.get(count, 0) for count, total in totals.items()}
        return {count: number for count, number in new.items() if number}
