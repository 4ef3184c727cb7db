"""What audits cost: stores and loads through a device backend, with no chunk audited, some, and all.

The rates take turns in every round, with engines of their own over the same memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import numpy as np
import torch

from kvtier.config import TieringConfig
from kvtier.device.auto import description, open_transfer_engine, torch_device, usable
from kvtier.device.base import Blocks, KVCaches, PageRef, TransferEngine
from kvtier.memory.custody import Custody
from kvtier.memory.layout import SlotLayout
from kvtier.memory.region import Region

KIB = 2**10
PAGE_BYTES = 32 * KIB
TENSORS = 32
CHUNKS = 64
"""Chunks of one submission. They are of 1 MiB."""

ROUNDS = 9
_WAYS = ("store", "load")

T = TypeVar("T")


@dataclass(frozen=True)
class Machine:
    """What was measured.

    Attributes:
        backend: kvtier's backend.
        device: its name, and the software's versions.
        chunk_kib: KiB of a chunk.
    """

    backend: str
    device: str
    chunk_kib: int


@dataclass(frozen=True)
class AuditCost:
    """Copies through the engine, with audits.

    Attributes:
        way: store or load.
        audit_rate: share of chunks that are audited.
        audited: chunks that were, in all rounds.
        gb_s: median of the rounds.
        cpu_us: microseconds of processor time a chunk, median.
        times_cpu: that, by the processor time without audits in the same round; median.
    """

    way: str
    audit_rate: float
    audited: int
    gb_s: float
    cpu_us: float
    times_cpu: float


def run(
    backend: str | None = None, *, jobs: int = 16, rounds: int = ROUNDS
) -> tuple[Machine, list[AuditCost]]:
    """Measure a backend.

    Args:
        backend: its name; default: that of this machine's accelerator, else the CPU's.
        jobs: submissions in a round, of 64 chunks each.
        rounds: how often all is measured.

    Raises:
        ConfigError: there is no such backend, or it cannot be used here.
    """
    name = usable(backend)
    default = float(TieringConfig.model_fields["audit_rate"].default)
    rates = (0.0, default, 1.0)
    with _opened(name, rates) as benches:
        times = [[bench.measure(jobs) for bench in _turned(benches, turn)] for turn in range(rounds + 1)]
        in_order = [_turned(measured, -turn) for turn, measured in enumerate(times)][1:]
        costs = [
            _cost(
                way,
                rate,
                benches[index].audited(way),
                jobs,
                [turn[0][way] for turn in in_order],
                [turn[index][way] for turn in in_order],
            )
            for way in _WAYS
            for index, rate in enumerate(rates)
        ]
    return Machine(name, description(name), TENSORS * PAGE_BYTES // KIB), costs


@dataclass(frozen=True)
class _Times:
    wall_s: float
    cpu_s: float

    def __add__(self, other: _Times) -> _Times:
        return _Times(self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)


def _cost(
    way: str, rate: float, audited: int, jobs: int, without: Sequence[_Times], times: Sequence[_Times]
) -> AuditCost:
    chunks = jobs * CHUNKS
    ratios = [one.cpu_s / other.cpu_s for one, other in zip(times, without, strict=True)]
    return AuditCost(
        way,
        rate,
        audited,
        chunks * TENSORS * PAGE_BYTES / median(it.wall_s for it in times) / 1e9,
        median(it.cpu_s for it in times) / chunks * 1e6,
        median(ratios),
    )


class _Bench:
    """One engine, and the chunks that it copies to and fro."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._audited = dict.fromkeys(_WAYS, 0)
        self._last = 0

    def audited(self, way: str) -> int:
        """Return how many chunks were audited."""
        return self._audited[way]

    def measure(self, jobs: int) -> dict[str, _Times]:
        """Store and load all chunks so many times, in turns."""
        blocks = Blocks.make(np.random.default_rng(1).permutation(CHUNKS), (CHUNKS,), (0,))
        slots = list(range(CHUNKS))
        times = dict.fromkeys(_WAYS, _Times(0.0, 0.0))
        for _ in range(jobs):
            times["store"] += self._timed("store", lambda job: self._engine.submit_store(job, blocks, slots))
            times["load"] += self._timed("load", lambda job: self._engine.submit_load(job, slots, blocks))
        if any(end.error for end in self._engine.finished()):
            raise RuntimeError("a copy has failed: see the log")
        return times

    def _timed(self, way: str, submit: Callable[[int], None]) -> _Times:
        self._last += 1
        before = self._engine.audits.chunks
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        submit(self._last)
        self._engine.wait([self._last])
        times = _Times(time.perf_counter() - wall_s, time.process_time() - cpu_s)
        self._audited[way] += self._engine.audits.chunks - before
        return times


@contextmanager
def _opened(name: str, rates: Sequence[float]) -> Iterator[list[_Bench]]:
    shape, device = (CHUNKS, PAGE_BYTES), torch_device(name)
    tensors = tuple(torch.ones(shape, dtype=torch.int8, device=device) for _ in range(TENSORS))
    caches = KVCaches(tensors, (tuple(PageRef(index, PAGE_BYTES) for index in range(TENSORS)),))
    layout = SlotLayout.make(caches.page_bytes, 1)
    with ExitStack() as stack:
        region = stack.enter_context(Region.anonymous(CHUNKS, layout.chunk_bytes))
        benches = []
        for rate in rates:
            engine = open_transfer_engine(caches, layout, region, name)
            stack.callback(engine.close)
            if rate:
                engine.begin_audits(Custody.private(region, rate, layout.area_bytes))
            benches.append(_Bench(engine))
        yield benches


def _turned(items: Sequence[T], by: int) -> list[T]:
    by %= len(items)
    return [*items[by:], *items[:by]]
