"""The metrics of a manager for ``prometheus_client``, by the names that they have with vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtier._execution.gauges import Gauges
from kvtier._manager.manager import TieringManager
from kvtier._telemetry.catalogue import BYTES, COUNTERS, GAUGES
from kvtier.errors import StateError

_WAIT_S: Final = 2.0

State = tuple[Mapping[tuple[str, ...], float], Gauges, int]


def prometheus_collector(manager: TieringManager) -> Collector:
    """Return a collector of a manager's metrics: ``prometheus_client.REGISTRY.register(collector)``.

    Any thread may collect. While the manager's event loop is blocked, the values are those read last.
    """
    return _ManagerCollector(manager)


class _ManagerCollector(Collector):  # type: ignore[misc, unused-ignore]
    def __init__(self, manager: TieringManager) -> None:
        self._manager = manager
        self._last: State = ({}, {}, 0)

    def describe(self) -> Iterable[Metric]:
        """Return no metric: to register this reads nothing."""
        return ()

    def collect(self) -> Iterable[Metric]:
        with suppress(StateError, TimeoutError, RuntimeError):  # the loop is blocked, or ended meanwhile
            self._last = self._read()
        families: dict[str, Any] = {}
        for kind, metric, labels, value in _samples(*self._last):
            made = kind(metric.name, metric.documentation, labels=metric.labels)
            families.setdefault(metric.name, made).add_metric(labels, value)
        return families.values()

    def _read(self) -> State:
        loop = self._manager._checks.loop
        if loop is None or not loop.is_running() or asyncio._get_running_loop() is loop:
            return self._manager._metrics()

        async def read() -> State:
            return self._manager._metrics()

        return asyncio.run_coroutine_threadsafe(read(), loop).result(_WAIT_S)


def _samples(counts: Mapping[tuple[str, ...], float], gauges: Gauges, chunk_bytes: int) -> Iterator[Any]:
    """Yield the kind, the metric, the labels and the value of each sample."""
    for (what, *labels), count in counts.items():
        yield CounterMetricFamily, COUNTERS[what], labels, count
        if what in BYTES:
            yield CounterMetricFamily, BYTES[what], labels, count * chunk_bytes
    for (name, values), reading in gauges.items():
        if reading is not None:
            yield GaugeMetricFamily, GAUGES[name], values, reading
