"""Simulates every policy at every capacity on one trace, compared with the offline optimum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvtier import _plugins as plugins
from kvtier._settings.quantities import size as size_of
from kvtier.errors import ConfigError, KVTierError
from kvtier.keys import OffloadKey
from kvtier.policies import EvictionPolicy
from kvtier_bench.simulate import generate
from kvtier_bench.simulate.files import FILES, replay_files
from kvtier_bench.simulate.replay import device_hits, optimum, replay
from kvtier_bench.simulate.trace import CHUNK_TOKENS, Trace, read, sample

CAPACITIES = ("0.3%", "1%", "3%", "10%", "20%", "30%")
OPTIMUM = "optimum"
_MOST_PERCENT = 1000

Job = tuple[str, int]
Result = tuple[int, int | None]


@dataclass(frozen=True)
class Simulated:
    """Share of all chunks that are loaded from host memory

    ``of_optimum`` compares with the offline optimum; stored bytes are copied from the device.
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
    step_tokens: int = 0,
) -> list[Simulated | Source]:
    """Simulate each policy at each capacity.

    ``step_tokens`` is the number of prompt tokens stored at once; 0 means all.

    Raises:
        KVTierError: the trace cannot be read, a policy is not installed or raises, or a size is invalid.
    """
    policies = policies or [*sorted({info.name for info in plugins.installed(plugins.POLICIES)}), FILES]
    for policy in set(policies) - {FILES}:
        plugins.load(plugins.POLICIES, policy, EvictionPolicy, "--policy")
    bytes_ = _size(chunk_bytes, "--chunk-bytes")
    if not bytes_:
        raise ConfigError(f"--chunk-bytes {chunk_bytes}: must be at least 1 byte")
    source = sample(_requests(trace, requests, seed))
    if not source.unique:
        raise KVTierError(f"{trace} has no chunks to simulate: no request in it has hash_ids")
    slots = {text: _slots(text, bytes_, source.unique, "--capacity") for text in capacities}
    device_slots = _slots(device, bytes_, source.unique, "--device") // source.sampled
    hits = device_hits(source.requests, device_slots)
    step = max(1, step_tokens // (CHUNK_TOKENS * source.sampled)) if step_tokens else 0
    jobs = [(policy, size // source.sampled) for size in slots.values() for policy in (OPTIMUM, *policies)]
    found = {job: _simulate(*job, source.requests, hits, step) for job in dict.fromkeys(jobs)}
    on_device, on_host = (source.excess, 0.0) if device_slots else (0.0, source.excess)
    rows: list[Simulated | Source] = []
    for text, size in slots.items():
        for policy in (*policies, OPTIMUM):
            rows.append(_row(policy, text, size, bytes_, source, found, on_host))
    return [*rows, _describe(trace, source, sum(hits) - on_device, bytes_)]


def _row(
    policy: str,
    capacity: str,
    slots: int,
    bytes_: int,
    trace: Trace,
    found: dict[Job, Result],
    excess: float,
) -> Simulated:
    sampled_slots = slots // trace.sampled
    excess = excess if sampled_slots else 0.0
    hits, stored = found[policy, sampled_slots]
    loaded = max(0.0, hits - excess)
    best = max(0.0, found[OPTIMUM, sampled_slots][0] - excess)
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


def _describe(name: str, trace: Trace, device_hits: float, bytes_: int) -> Source:
    return Source(
        name,
        len(trace.requests),
        trace.lookups,
        trace.unique,
        trace.unique * bytes_ / 2**30,
        f"1 in {trace.sampled}" if trace.sampled > 1 else "all",
        max(0.0, device_hits) * trace.sampled / max(1, trace.lookups),
    )


def _simulate(
    name: str, capacity: int, requests: list[list[OffloadKey]], hits: list[int], step: int
) -> Result:
    if name == OPTIMUM:
        return optimum(requests, hits, capacity), None
    # With a slot for every chunk nothing is evicted. Tables for more slots would only take memory.
    capacity = min(capacity, len({key for keys in requests for key in keys}))
    if name == FILES:
        return _sums(replay_files(requests, hits, capacity))
    policy = plugins.make(
        plugins.POLICIES, name, plugins.load(plugins.POLICIES, name, EvictionPolicy, "--policy")
    )
    try:
        return _sums(replay(policy, requests, hits, capacity, step))
    except Exception as error:  # A plug-in may raise any exception.
        raise ConfigError(f"--policy {name}: it raised {type(error).__name__}: {error}") from error


def _sums(replayed: Iterable[tuple[int, int]]) -> Result:
    found = list(replayed)
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
        with suppress(ValueError):
            share = float(text[:-1])
            if 0 <= share <= _MOST_PERCENT:
                return int(share / 100 * unique)
    nbytes = _size(text, option, "; or a share of the trace's chunks: 10%, at most 1000%")
    if 0 < nbytes < chunk_bytes:
        raise ConfigError(
            f"{option} {text}: holds no chunk of {chunk_bytes} bytes; add a unit: 10GiB, or 10%"
        )
    return nbytes // chunk_bytes


def _size(text: str, option: str, alternative: str = "") -> int:
    try:
        return size_of(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}{alternative}") from None
