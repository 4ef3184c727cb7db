"""Counters of the tiers, for SGLang's metrics endpoint."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache

from prometheus_client import Counter

from kvtier import Statistics
from kvtier._telemetry.catalogue import COUNTERS

_MOST_CALLS = 1000  # limit, in case the endpoint is never read


@cache
def _counter(word: str) -> Counter | None:
    """Return the counter of an occurrence, or None if it is no metric. Created lazily, like SGLang's own."""
    metric = COUNTERS.get(word)
    if metric is None or not metric.name.startswith("kvtier_"):
        return None
    return Counter(metric.name, metric.documentation, ("pool", *metric.labels))


class PoolCounters:
    """Publishes the counts of one host pool's tiers, under kvtier's names and with the label ``pool``."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._published: dict[tuple[str, ...], float] = {}

    def publish(self, statistics: Statistics) -> None:
        """Add the counts since the last call."""
        for key, count in statistics.counts.items():
            more = count - self._published.get(key, 0)
            if more > 0 and (counter := _counter(key[0])) is not None:
                counter.labels(self._pool, *key[1:]).inc(more)
                self._published[key] = count


class Throughput:
    """Numbers of pages in SGLang's calls, and their copy rates, kept until SGLang collects them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pages, self._gb_per_s = _none(), _none()

    @contextmanager
    def measure(self, verb: str, page_bytes: int, results: list[bool]) -> Iterator[None]:
        """Count the pages that a call moved. When the block ends, ``results`` is true for each of them."""
        begun_s = time.perf_counter()
        yield
        took_s, moved = time.perf_counter() - begun_s, results.count(True)
        with self._lock:
            self._pages[verb].append(moved)
            self._gb_per_s[verb].append(moved * page_bytes / took_s / 1e9)

    def take_samples(self) -> Mapping[str, list[float]]:
        """Return and clear the recorded figures, under the names of SGLang's ``StorageMetrics``."""
        with self._lock:
            pages, self._pages = self._pages, _none()
            gb_per_s, self._gb_per_s = self._gb_per_s, _none()
        return {
            **{f"{verb}_pgs": list(numbers) for verb, numbers in pages.items()},
            **{f"{verb}_bandwidth": list(numbers) for verb, numbers in gb_per_s.items()},
        }


def _none() -> dict[str, deque[float]]:
    return {verb: deque(maxlen=_MOST_CALLS) for verb in ("prefetch", "backup")}
