"""Every policy at every capacity, beside the offline optimum, over one trace."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from kvtier import _plugins as plugins
from kvtier._settings.quantities import size as size_of
from kvtier.errors import KVTierError
from kvtier.keys import OffloadKey
from kvtier.policies import EvictionPolicy
from kvtier_bench.simulate import generate
from kvtier_bench.simulate.replay import device_hits, optimum, replay
from kvtier_bench.simulate.trace import Trace, read, sample

CAPACITIES = ("0.3%", "1%", "3%", "10%", "20%", "30%")
OPTIMUM = "optimum"

Job = tuple[str, int]
Result = tuple[int, int | None]


@dataclass(frozen=True)
class Simulated:
    """Share of all chunks that are loaded from host memory

    ``of_optimum`` compares with what no policy can beat; stored bytes are those copied from the device.
    """

    policy: str
    capacity: str
    slots: int
    capacity_gib: float
    hit_rate: float
    of_optimum: float | None
    loaded_gib: float
    stored_gib: float | None


@dataclass(frozen=True)
class Source:
    """Trace"""

    trace: str
    requests: int
    chunks: int
    unique_chunks: int
    unique_gib: float
    sampled: str
    device_hit_rate: float


def run(
    trace: str,
    policies: Sequence[str],
    capacities: Sequence[str],
    chunk_bytes: str,
    device: str,
    requests: int,
    seed: int,
) -> list[Simulated | Source]:
    """Simulate each policy at each capacity.

    Raises:
        KVTierError: the trace cannot be read, a policy is not installed, or a capacity is no size.
    """
    policies = policies or sorted({info.name for info in plugins.installed(plugins.POLICIES)})
    for policy in policies:
        plugins.load(plugins.POLICIES, policy, EvictionPolicy, "--policy")
    bytes_ = _size(chunk_bytes, "--chunk-bytes")
    source = sample(_requests(trace, requests, seed))
    slots = {text: _slots(text, bytes_, source.unique, "--capacity") for text in capacities}
    hits = device_hits(source.requests, _slots(device, bytes_, source.unique, "--device") // source.sampled)
    jobs = [(policy, size // source.sampled) for size in slots.values() for policy in (OPTIMUM, *policies)]
    workers = min(len(jobs), len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(workers, get_context("spawn"), _receive, (source.requests, hits)) as pool:
        found = dict(zip(jobs, pool.map(_simulate, jobs), strict=True))
    rows: list[Simulated | Source] = []
    for text, size in slots.items():
        for policy in (*policies, OPTIMUM):
            rows.append(_row(policy, text, size, bytes_, source, found))
    return [*rows, _describe(trace, source, hits, bytes_)]


def _row(
    policy: str, capacity: str, slots: int, bytes_: int, trace: Trace, found: dict[Job, Result]
) -> Simulated:
    hits, stored = found[policy, slots // trace.sampled]
    loaded = max(0.0, hits - trace.excess)
    best = max(0.0, found[OPTIMUM, slots // trace.sampled][0] - trace.excess)
    gib = bytes_ * trace.sampled / 2**30
    return Simulated(
        policy,
        capacity,
        slots,
        slots * bytes_ / 2**30,
        loaded * trace.sampled / max(1, trace.lookups),
        loaded / best if best else None,
        loaded * gib,
        None if stored is None else stored * gib,
    )


def _describe(name: str, trace: Trace, hits: Sequence[int], bytes_: int) -> Source:
    return Source(
        name,
        len(trace.requests),
        trace.lookups,
        trace.unique,
        trace.unique * bytes_ / 2**30,
        f"1 in {trace.sampled}" if trace.sampled > 1 else "all",
        sum(hits) / max(1, sum(map(len, trace.requests))),
    )


_given: tuple[list[list[OffloadKey]], list[int]] = ([], [])


def _receive(requests: list[list[OffloadKey]], hits: list[int]) -> None:
    global _given  # of a worker process: the trace is sent once, not with each job
    _given = requests, hits


def _simulate(job: Job) -> Result:
    requests, hits = _given
    name, capacity = job
    if name == OPTIMUM:
        return optimum(requests, hits, capacity), None
    policy = plugins.make(
        plugins.POLICIES, name, plugins.load(plugins.POLICIES, name, EvictionPolicy, "--policy")
    )
    found = list(replay(policy, requests, hits, capacity))
    return sum(loaded for loaded, _ in found), sum(stored for _, stored in found)


def _requests(trace: str, requests: int, seed: int) -> Iterable[Sequence[int | str]]:
    if trace in generate.TRACES:
        return generate.generate(trace, requests, seed)
    path = Path(trace)
    if not path.is_file():
        names = ", ".join(generate.TRACES)
        raise KVTierError(f"{trace}: no such file; name one, or a generated trace: {names}")
    return read(path)


def _slots(text: str, chunk_bytes: int, unique: int, option: str) -> int:
    if text.endswith("%"):
        try:
            return int(float(text[:-1]) / 100 * unique)
        except ValueError:
            pass
    return _size(text, option) // chunk_bytes


def _size(text: str, option: str) -> int:
    try:
        return size_of(text)
    except ValueError as error:
        raise KVTierError(f"{option} {text}: {error}; or a share of the trace's chunks: 10%") from None
