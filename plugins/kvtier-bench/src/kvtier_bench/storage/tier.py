"""Benchmark of any secondary tier: put, get and contains, compared with the client library it uses.

Each put writes chunks that are new to the backend; they are removed afterwards. The measurement excludes the
seals that kvtier adds and checks for tiers without verification. ``throughput`` describes the method.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvtier import HeapMemory, Identity
from kvtier import _plugins as plugins
from kvtier._plugins import Group
from kvtier.errors import ConfigError, KVTierError, TierError
from kvtier.keys import OffloadKey
from kvtier.tiers import SecondaryTier, TierConfig, TierContext
from kvtier.tiers import _registry as registry
from kvtier.tiers._faults import words_of
from kvtier_bench.machine import Machine
from kvtier_bench.storage.bare import BareClient
from kvtier_bench.storage.disk import fill
from kvtier_bench.storage.movers import BATCHES_IN_FLIGHT, SIZES, BatchMover, TierMover
from kvtier_bench.storage.throughput import Throughput, compare

BENCHMARKS: Final = Group("kvtier.benchmarks", "bare client", KVTierError)
GOAL: Final = 0.9  # share of the bare client's throughput
BATCH_CHUNKS: Final = 16
SINGLES: Final = 32
QUERIES: Final = 8
QUERY_KEYS: Final = 500


@dataclass(frozen=True, slots=True)
class Latency:
    """Latency of one call on an idle tier, in milliseconds.

    Attributes:
        call: a put or a get of one chunk, or a lookup of many missing keys.
        tier_p50_ms, tier_p99_ms: percentiles of the tier.
        bare_p50_ms, bare_p99_ms: percentiles of the bare client; None without one.
    """

    chunk_bytes: int
    call: str
    tier_p50_ms: float
    tier_p99_ms: float
    bare_p50_ms: float | None
    bare_p99_ms: float | None


class BareMover(BatchMover[list[str]]):
    """The bare client. A batch is a list of chunk names."""

    def __init__(self, client: BareClient[Any], memory: HeapMemory) -> None:
        super().__init__(memory)
        self._client = client

    def make(self, keys: Sequence[OffloadKey]) -> list[str]:
        return [key.hex() for key in keys]

    async def put(self, batch: list[str], slots: range) -> None:
        await self._client.put(batch, list(map(self.memory.view, slots)))

    async def get(self, batch: list[str], slots: range) -> None:
        await self._client.get(batch, list(map(self.memory.view, slots)))

    async def remove(self, batches: Sequence[list[str]]) -> None:
        for names in batches:
            await self._client.discard(names)


def read_config(path: Path) -> TierConfig:
    """Return the settings of one tier, read from a file.

    Raises:
        ConfigError: the file cannot be read, or a setting is invalid.
        TierError: the tier's plug-in cannot be used.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}; JSON is needed") from error
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{path} must hold the settings of one tier: an object with the key type")
    return registry.validate(raw, str(path))


def run(
    config: Path, sizes: Sequence[int] = SIZES, mib: int = 256, rounds: int = 5
) -> list[Throughput | Latency | Machine]:
    """Measure.

    Args:
        mib: MiB moved in each stretch; the backend needs room for twice as much.

    Raises:
        KVTierError: the tier cannot be opened or fails.
    """
    settings = read_config(config)
    machine = Machine.here()
    result: list[Throughput | Latency | Machine] = []
    for size in sizes:
        result += asyncio.run(_measure_size(settings, size, mib * 2**20, rounds))
    return [*result, machine.again()]


async def _measure_size(
    settings: TierConfig, size: int, nbytes: int, rounds: int
) -> list[Throughput | Latency]:
    async with opened(settings, size, BATCH_CHUNKS) as (tier, bare):
        points = await compare({settings.type: tier}, bare, size, nbytes, rounds, GOAL)
        return [*points, *await _latencies(size, tier, bare, rounds)]


@asynccontextmanager
async def opened(
    settings: TierConfig, size: int, batch_chunks: int
) -> AsyncIterator[tuple[TierMover, BareMover | None]]:
    """Open a tier, and its bare client if it has one, for batches of ``chunks`` chunks."""
    memory = HeapMemory(batch_chunks * BATCHES_IN_FLIGHT, size)
    fill(memory)
    identity = Identity.make("bench", {"chunk_bytes": size, "run": secrets.token_hex(8)})
    tier = registry.maker(settings)()
    bare = _bare_client(settings, size)
    await _open(tier, TierContext(settings.name or settings.type, identity, size))
    mover = TierMover(tier, identity, memory)
    try:
        if bare is None:
            yield mover, None
            return
        try:
            await bare.open()
            yield mover, BareMover(bare, memory)
        finally:
            await bare.aclose()
    finally:
        await tier.aclose()


async def _open(tier: SecondaryTier[Any], context: TierContext) -> None:
    try:
        await tier.open(context)
        return
    except Exception as error:
        title = "" if isinstance(error, KVTierError) else f"tier {context.name} cannot be opened: "
        words = words_of(error, tier.config)
    raise TierError(title + words)  # Not chained, because the original exception may contain secrets.


def _bare_client(settings: TierConfig, size: int) -> BareClient[Any] | None:
    if settings.type not in {info.name for info in plugins.installed(BENCHMARKS)}:
        return None
    client = plugins.load(BENCHMARKS, settings.type, BareClient, "type")
    return plugins.make(BENCHMARKS, settings.type, client, settings, size)


async def _latencies(size: int, tier: TierMover, bare: BareMover | None, rounds: int) -> list[Latency]:
    ours: dict[str, list[float]] = {}
    theirs: dict[str, list[float]] = {}
    query = f"contains, {QUERY_KEYS} keys"
    for _ in range(rounds):
        await _time_calls(tier, ours)
        if bare is not None:
            await _time_calls(bare, theirs)
        for _ in range(QUERIES):
            ours.setdefault(query, []).append(await timed(tier.tier.contains(tier.new_keys(QUERY_KEYS))))
    none = None, None
    return [
        Latency(
            size,
            call,
            *percentiles_ms(ours[call]),
            *(percentiles_ms(theirs[call]) if call in theirs else none),
        )
        for call in sorted(ours)
    ]


async def _time_calls(mover: BatchMover[Any], times: dict[str, list[float]]) -> None:
    """Time puts and gets of single chunks on an idle tier."""
    batches = [mover.make(mover.new_keys(1)) for _ in range(SINGLES)]
    try:
        for verb, call in (("put", mover.put), ("get", mover.get)):
            times.setdefault(verb, []).extend([await timed(call(batch, range(1))) for batch in batches])
    finally:
        await mover.remove(batches)


async def timed(work: Awaitable[object]) -> float:
    """Await and return the elapsed seconds."""
    started_s = time.perf_counter()
    await work
    return time.perf_counter() - started_s


def percentiles_ms(times_s: Sequence[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile, in milliseconds."""
    ordered = sorted(times_s)
    return ordered[len(ordered) // 2] * 1e3, ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] * 1e3
