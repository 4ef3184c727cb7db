"""What vLLM publishes for a manager: KV events, statistics and labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingEvent

from kvtier._core.shared import Count
from kvtier._core.tiering import Tiering
from kvtier._log import GuardedLogger
from kvtier._memory.worker_status import StatusTable
from kvtier._reasons import BY_CHOICE
from kvtier.adapters.vllm._telemetry.events import EventStream, Location
from kvtier.adapters.vllm._telemetry.metrics import GaugeReader, WorkerReports, as_stats
from kvtier.tiers._activity import TierActivity

logger = GuardedLogger("kvtier.vllm")


class Published:
    """Collects what the core and the workers have counted and announced, in vLLM's forms.

    Args:
        workers: what they report; nothing where it is None.
        locations: where each secondary tier keeps its chunks, for requests that choose among them.
        self_describing: whether events are sent only when vLLM can say what is in their chunks.
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
        self._reports = WorkerReports(self.workers)
        self.locations = locations
        self.names = [status.name for status in core.shared.tiers]
        self.info = info or {}
        self.stream = EventStream(self.names, locations, self_describing=self_describing)
        self._chunk_bytes = chunk_bytes
        self._gauges = GaugeReader(core, activity, chunk_bytes)
        self._not_put: Counter[tuple[str, str]] = Counter()  # chunks, by tier and reason

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Take what was announced since the last call."""
        return self.stream.events(self._core.take_kv_events())

    def take_stats(self) -> OffloadingConnectorStats | None:
        """Take what was counted since the last call, and changed gauges; None if there are none."""
        counts = self._take_counts()
        counts.update(self._reports.take_counts())
        gauges = self._gauges.changed(self._reports.gauges)
        if not counts and not gauges:
            return None
        return as_stats(counts, gauges, self._chunk_bytes)

    def warn_of_chunks_not_put(self) -> None:
        """Log how many chunks this engine never put, by tier and reason: its metrics end with the engine."""
        self._take_counts()
        for tier in sorted({tier for tier, _ in self._not_put}):
            reasons = {reason: count for (name, reason), count in self._not_put.items() if name == tier}
            logger.warning(
                "tier %s: %d chunks stored in host memory were not written (%s): the next engine "
                "does not find them",
                tier,
                sum(reasons.values()),
                ", ".join(f"{reason}: {count}" for reason, count in sorted(reasons.items())),
            )

    def _take_counts(self) -> dict[Count, float]:
        counts = self._core.take_counts()
        for (what, *labels), count in counts.items():
            if what in ("put_dropped", "put_failed") and labels[1] not in BY_CHOICE:
                self._not_put[labels[0], labels[1]] += int(count)
        return counts
