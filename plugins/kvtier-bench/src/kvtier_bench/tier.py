"""Benchmark of any secondary tier: put, get and contains, beside the client that it is built on.

Each round moves the same amount through the tier and through the bare client, one after the other and in
turns first, so that a noisy machine changes both alike: trust the ratios and their spread. Each point is
measured twice: with the interpreter idle, and beside a thread that computes in pure Python without a
pause, as an engine's does.

Chunks are new to the backend in each put, and removed again. What kvtier itself does to a chunk, making
and checking its seal for tiers that do not verify, is done before and after the measured stretches.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import statistics
import time
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from kvtier import plugins
from kvtier.errors import ConfigError, KVTierError, TierError
from kvtier.identity import Identity
from kvtier.keys import OffloadKey, pack_key
from kvtier.memory.heap import HeapMemory
from kvtier.plugins import Group
from kvtier.tiers import registry
from kvtier.tiers.base import Batch, Outcome, SecondaryTier, Status, TierConfig, TierContext
from kvtier.tiers.faults import words_of
from kvtier.tiers.seal import Integrity, check, seal
from kvtier_bench.bare import BareClient
from kvtier_bench.busy import BusyThread
from kvtier_bench.disk import fill

BENCHMARKS: Final = Group("kvtier.benchmarks", "bare client", KVTierError)
SIZES: Final = (65536, 524288, 2097152)
GOAL: Final = 0.9  # of what the bare client does
BATCH_CHUNKS: Final = 16
BATCHES_IN_FLIGHT: Final = 4
ALONE_S = 0.25  # for which the computing thread is measured by itself
SINGLES: Final = 32
QUESTIONS: Final = 8
QUESTION_KEYS: Final = 500


@dataclass(frozen=True, slots=True)
class TierPoint:
    """A tier beside its bare client. GB are 10**9 bytes; figures are medians over the rounds.

    Attributes:
        chunk_bytes: bytes of a chunk.
        verb: ``"put"`` or ``"get"``.
        busy: whether a thread computed in pure Python meanwhile.
        tier_gb_s, bare_gb_s: what tier and client did, several batches at once.
        ratio, ratio_low, ratio_high: the rounds' ratios of the two: median, least and greatest.
        goal: whether the median is 90 % at least.
        tier_cpu_s_per_gb, bare_cpu_s_per_gb: processor time of this process for each GB, the computing
            thread's left out. That of a server is not in it.
        tier_slowdown, bare_slowdown: by what share the computing thread got slower.

    Figures of the bare client are None where the tier's distribution offers none.
    """

    chunk_bytes: int
    verb: str
    busy: bool
    tier_gb_s: float
    bare_gb_s: float | None
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    goal: str
    tier_cpu_s_per_gb: float
    bare_cpu_s_per_gb: float | None
    tier_slowdown: float | None
    bare_slowdown: float | None


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds of one call while nothing else is under way.

    Attributes:
        chunk_bytes: bytes of a chunk.
        call: a put or a get of one chunk, or the question for many keys, few of which are there.
        tier_p50_ms, tier_p99_ms: of the tier.
        bare_p50_ms, bare_p99_ms: of the bare client; None where there is none.
    """

    chunk_bytes: int
    call: str
    tier_p50_ms: float
    tier_p99_ms: float
    bare_p50_ms: float | None
    bare_p99_ms: float | None


@dataclass(frozen=True, slots=True)
class Stretch:
    """What was measured in one stretch."""

    gb_s: float
    cpu_s_per_gb: float
    slowdown: float | None


class Mover(Protocol):
    """A tier or a bare client, as the benchmark sees it. Chunks are numbered."""

    async def put(self, numbers: range, slots: range) -> None: ...

    async def get(self, numbers: range, slots: range) -> None: ...

    async def discard(self, numbers: range) -> None: ...


class TierMover:
    """The tier under test. Seals are made before chunks are put, outside of what is measured."""

    def __init__(self, tier: SecondaryTier[Any], identity: Identity, memory: HeapMemory) -> None:
        self.tier = tier
        self._digest = identity.short_digest
        self._memory = memory
        self._sealed: dict[int, bytes] = {}

    def prepare(self, numbers: range) -> None:
        """Seal what will be put. Blocks."""
        if not self.tier.verifies:
            for number in numbers:
                view = self._memory.view(number % self._memory.slots)
                self._sealed[number] = seal(key_of(number), view, self._digest)

    async def put(self, numbers: range, slots: range) -> None:
        trailers = [self._sealed.get(number, b"") for number in numbers]
        batch = Batch(keys_of(numbers), slots, self._memory, trailers)
        _require_ok("put", await self.tier.put(batch))

    async def get(self, numbers: range, slots: range) -> None:
        batch = Batch(keys_of(numbers), slots, self._memory)
        _require_ok("get", await self.tier.get(batch))
        self._last = batch

    async def discard(self, numbers: range) -> None:
        await self.tier.discard(keys_of(numbers))

    def check_last(self) -> None:
        """Prove the bytes of the last get, so that nothing is measured that gives wrong ones."""
        if self.tier.verifies:
            return
        batch = self._last
        for key, view, trailer in zip(batch.keys, batch.views, batch.trailers, strict=True):
            if (found := check(trailer, key, view, self._digest)) is not Integrity.SOUND:
                raise KVTierError(f"the tier under test gave wrong bytes: {found}")


class BareMover:
    """The bare client under test."""

    def __init__(self, client: BareClient[Any], memory: HeapMemory) -> None:
        self._client = client
        self._memory = memory

    async def put(self, numbers: range, slots: range) -> None:
        await self._client.put(names_of(numbers), list(map(self._memory.view, slots)))

    async def get(self, numbers: range, slots: range) -> None:
        await self._client.get(names_of(numbers), list(map(self._memory.view, slots)))

    async def discard(self, numbers: range) -> None:
        await self._client.discard(names_of(numbers))


def key_of(number: int) -> OffloadKey:
    """Return the key of a chunk."""
    return pack_key(hashlib.sha256(number.to_bytes(8, "big")).digest())


def keys_of(numbers: range) -> list[OffloadKey]:
    """Return the keys of chunks."""
    return [key_of(number) for number in numbers]


def names_of(numbers: range) -> list[str]:
    """Return what chunks are called for a bare client."""
    return [key_of(number).hex() for number in numbers]


def read_config(path: Path) -> TierConfig:
    """Read the settings of one tier: JSON, or TOML where the file's name ends in ``.toml``.

    Raises:
        ConfigError: the file cannot be read, or a setting is wrong.
        TierError: the tier's plug-in cannot be used.
    """
    try:
        text = path.read_text(encoding="utf-8")
        raw = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}; JSON is needed, or TOML in a *.toml") from error
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{path} must hold the settings of one tier: an object with the key type")
    return registry.validate(raw, str(path))


def run(
    config: Path, sizes: Sequence[int] = SIZES, mib: int = 256, rounds: int = 5
) -> list[TierPoint | Latency]:
    """Measure.

    Args:
        config: file with the settings of one tier.
        sizes: bytes of a chunk.
        mib: MiB that are moved in each stretch; the backend needs room for twice that.
        rounds: how often each stretch is repeated.

    Raises:
        KVTierError: the tier cannot be opened, or does not do its work.
    """
    settings = read_config(config)
    result: list[TierPoint | Latency] = []
    for size in sizes:
        result += asyncio.run(_measure_size(settings, size, mib * 2**20, rounds))
    return result


@dataclass(slots=True)
class Bench:
    """Tier and bare client at one size of chunks, and the numbers of chunks that were given out."""

    memory: HeapMemory
    tier: TierMover
    bare: BareMover | None
    stretch_bytes: int
    serial: int = 0
    found: dict[tuple[str, bool], list[tuple[Stretch, Stretch | None]]] = field(default_factory=dict)

    def movers(self, first: int) -> list[tuple[str, Mover]]:
        """Return who is measured, in turns first."""
        both: list[tuple[str, Mover]] = [("tier", self.tier)]
        if self.bare is not None:
            both.append(("bare", self.bare))
        return both[::-1] if first % 2 else both

    def numbers(self, count: int) -> range:
        """Give out chunks that nobody has put, beginning with the one for slot 0."""
        slots = self.memory.slots
        first = -(-self.serial // slots) * slots
        self.serial = first + count
        return range(first, self.serial)

    @property
    def stretch_chunks(self) -> int:
        """Chunks of a stretch: whole batches, one for each flight at least."""
        batch_bytes = BATCH_CHUNKS * self.memory.chunk_bytes
        return BATCH_CHUNKS * max(BATCHES_IN_FLIGHT, self.stretch_bytes // batch_bytes)


@asynccontextmanager
async def _opened(settings: TierConfig, size: int, stretch_bytes: int) -> AsyncIterator[Bench]:
    memory = HeapMemory(BATCH_CHUNKS * BATCHES_IN_FLIGHT, size)
    await asyncio.to_thread(fill, memory)
    identity = Identity.make("bench", {"chunk_bytes": size, "run": secrets.token_hex(8)})
    tier = plugins.make(plugins.TIERS, settings.type, registry.load(settings.type), settings)
    bare = _bare_client(settings, size)
    await _open(tier, TierContext(settings.name or settings.type, identity, size))
    try:
        try:
            if bare is not None:
                await bare.open()
            bare_mover = BareMover(bare, memory) if bare is not None else None
            yield Bench(memory, TierMover(tier, identity, memory), bare_mover, stretch_bytes)
        finally:
            if bare is not None:
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
    raise TierError(title + words)  # not chained: what it says may hold secrets


def _bare_client(settings: TierConfig, size: int) -> BareClient[Any] | None:
    if settings.type not in {info.name for info in plugins.installed(BENCHMARKS)}:
        return None
    client = plugins.load(BENCHMARKS, settings.type, BareClient, "type")
    return plugins.make(BENCHMARKS, settings.type, client, settings, size)


async def _measure_size(
    settings: TierConfig, size: int, stretch_bytes: int, rounds: int
) -> list[TierPoint | Latency]:
    latencies: dict[tuple[str, str], list[float]] = {}
    async with _opened(settings, size, stretch_bytes) as bench:
        await _round(bench, 0, busy=False)  # connects, makes directories, starts threads
        bench.found.clear()
        for number in range(rounds):
            for busy in (False, True):
                await _round(bench, number, busy=busy)
            for call, times in (await _alone(bench, number)).items():
                latencies.setdefault(call, []).extend(times)
    points = [_point(size, verb, busy, rows) for (verb, busy), rows in sorted(bench.found.items())]
    calls = sorted({call for call, _ in latencies})
    return [*points, *(_latency(size, call, latencies) for call in calls)]


async def _round(bench: Bench, number: int, *, busy: bool) -> None:
    """Put and get the same amount with the tier and with the bare client."""
    stretches: dict[tuple[str, str], Stretch] = {}
    for who, mover in bench.movers(number):
        numbers = bench.numbers(bench.stretch_chunks)
        await asyncio.to_thread(bench.tier.prepare, numbers)
        try:
            for verb, move in (("put", mover.put), ("get", mover.get)):
                stretches[who, verb] = await _stretch(bench, move, numbers, busy=busy)
            if who == "tier":
                await asyncio.to_thread(bench.tier.check_last)
        finally:
            await mover.discard(numbers)
    for verb in ("put", "get"):
        row = stretches["tier", verb], stretches.get(("bare", verb))
        bench.found.setdefault((verb, busy), []).append(row)


Move = Callable[[range, range], Awaitable[None]]


async def _stretch(bench: Bench, move: Move, numbers: range, *, busy: bool) -> Stretch:
    nbytes = len(numbers) * bench.memory.chunk_bytes
    if not busy:
        wall, cpu = time.perf_counter(), time.process_time()
        await _flights(move, numbers)
        took, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
        return Stretch(nbytes / took / 1e9, cpu_s / nbytes * 1e9, None)
    with BusyThread() as engine:
        alone = await engine.rate_during(asyncio.sleep(ALONE_S))
        wall, cpu, engine_cpu = time.perf_counter(), time.process_time(), engine.cpu_s
        beside = await engine.rate_during(_flights(move, numbers))
        took = time.perf_counter() - wall
        cpu_s = time.process_time() - cpu - (engine.cpu_s - engine_cpu)
    slowdown = 1 - beside / alone if alone else None
    return Stretch(nbytes / took / 1e9, max(0.0, cpu_s) / nbytes * 1e9, slowdown)


async def _flights(move: Move, numbers: range) -> None:
    """Move all chunks, several batches at once, each flight with slots of its own."""

    async def fly(flight: int) -> None:
        slots = range(flight * BATCH_CHUNKS, (flight + 1) * BATCH_CHUNKS)
        for first in range(flight * BATCH_CHUNKS, len(numbers), BATCH_CHUNKS * BATCHES_IN_FLIGHT):
            await move(numbers[first : first + BATCH_CHUNKS], slots)

    try:
        async with asyncio.TaskGroup() as group:
            for flight in range(BATCHES_IN_FLIGHT):
                group.create_task(fly(flight))
    except ExceptionGroup as errors:  # one of them says it all
        raise errors.exceptions[0] from None


async def _alone(bench: Bench, number: int) -> dict[tuple[str, str], list[float]]:
    """Time calls while nothing else is under way."""
    times: dict[tuple[str, str], list[float]] = {}
    for who, mover in bench.movers(number):
        numbers = bench.numbers(SINGLES)
        await asyncio.to_thread(bench.tier.prepare, numbers)
        for verb, move in (("put", mover.put), ("get", mover.get)):
            times[verb, who] = [
                await _time(move(numbers[index : index + 1], range(index, index + 1)))
                for index in range(SINGLES)
            ]
        if who == "tier":
            asked = keys_of(range(numbers.start, numbers.start + QUESTION_KEYS))
            call = f"contains, {QUESTION_KEYS} keys"
            times[call, who] = [await _time(bench.tier.tier.contains(asked)) for _ in range(QUESTIONS)]
        await mover.discard(numbers)
    return times


async def _time(work: Awaitable[object]) -> float:
    started = time.perf_counter()
    await work
    return time.perf_counter() - started


def _point(size: int, verb: str, busy: bool, rows: Sequence[tuple[Stretch, Stretch | None]]) -> TierPoint:
    bares = [bare for _, bare in rows if bare is not None]
    ratios = [tier.gb_s / bare.gb_s for tier, bare in rows if bare is not None]
    ratio = _median(ratios)
    return TierPoint(
        chunk_bytes=size,
        verb=verb,
        busy=busy,
        tier_gb_s=statistics.median(tier.gb_s for tier, _ in rows),
        bare_gb_s=_median(bare.gb_s for bare in bares),
        ratio=ratio,
        ratio_low=min(ratios, default=None),
        ratio_high=max(ratios, default=None),
        goal="-" if ratio is None else "pass" if ratio >= GOAL else "FAIL",
        tier_cpu_s_per_gb=statistics.median(tier.cpu_s_per_gb for tier, _ in rows),
        bare_cpu_s_per_gb=_median(bare.cpu_s_per_gb for bare in bares),
        tier_slowdown=_median(tier.slowdown for tier, _ in rows),
        bare_slowdown=_median(bare.slowdown for bare in bares),
    )


def _latency(size: int, call: str, latencies: Mapping[tuple[str, str], Sequence[float]]) -> Latency:
    tier, bare = latencies[call, "tier"], latencies.get((call, "bare"))
    return Latency(
        chunk_bytes=size,
        call=call,
        tier_p50_ms=_percentile_ms(tier, 50),
        tier_p99_ms=_percentile_ms(tier, 99),
        bare_p50_ms=_percentile_ms(bare, 50) if bare else None,
        bare_p99_ms=_percentile_ms(bare, 99) if bare else None,
    )


def _percentile_ms(times: Sequence[float], percent: int) -> float:
    return sorted(times)[min(len(times) - 1, len(times) * percent // 100)] * 1e3


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _require_ok(verb: str, outcome: Outcome) -> None:
    bad = [Status(status).name for status in outcome.statuses if status != Status.OK]
    if bad:
        raise KVTierError(
            f"a {verb} of the tier under test did not do its work: {len(bad)} of {len(outcome.statuses)} "
            f"chunks ended {', '.join(sorted(set(bad)))} {dict(outcome.reasons)}"
        )
