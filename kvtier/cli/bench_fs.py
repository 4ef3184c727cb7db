"""Benchmark of the file tier: put and get through its public face, beside what the disk can do.

Each round measures the raw limit and the tier one after the other, so that a noisy machine changes
both alike: trust the ratios. The limit is a large file on the same file system, written before, read
and overwritten with direct I/O by several threads from memory that is there already.

Each point is measured twice: with the interpreter idle, and beside a thread that computes in pure
Python without a pause, as an engine's does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from kvtier import native
from kvtier.cli import figures
from kvtier.errors import KVTierError
from kvtier.identity import Identity
from kvtier.keys import OffloadKey, pack_key
from kvtier.testing.memory import HeapMemory
from kvtier.tiers.base import Batch, Status, TierContext
from kvtier.tiers.fs import FsConfig, FsTier

BATCH_CHUNKS: Final = 64
BATCHES_IN_FLIGHT: Final = 4
RAW_BLOCK_BYTES: Final = 4 * 2**20
RAW_THREADS: Final = 8
RAW_FILE_BYTES: Final = 512 * 2**20


@dataclass(frozen=True, slots=True)
class Point:
    """The file tier beside its disk. GB are 10**9 bytes; figures are medians over the rounds.

    Attributes:
        chunk_bytes: bytes of a chunk.
        verb: ``"put"`` or ``"get"``.
        busy: whether a thread computed in pure Python meanwhile.
        raw_gb_s: what the disk did in the same rounds, the interpreter idle.
        tier_gb_s: what the tier did.
        ratio: median of the rounds' ratios of the two.
        cpu_s_per_gb: processor time of this process for each GB, the computing thread's left out.
        slowdown: by what share the computing thread got slower; None where there is none.
        raw_slowdown: the same beside the bare disk work, which takes processor time of its own. Its
            Python threads are slower then, so that it is a lower bound of what the disk's work takes.
    """

    chunk_bytes: int
    verb: str
    busy: bool
    raw_gb_s: float
    tier_gb_s: float
    ratio: float
    cpu_s_per_gb: float
    slowdown: float | None
    raw_slowdown: float | None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the file tier was measured on."""

    file_system: str
    kernel: str
    cores: int
    python: str
    helper: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured stretch: bytes moved, wall and processor seconds, the computing thread's rate."""

    nbytes: int
    wall_s: float
    cpu_s: float
    loops_per_s: float | None = None

    @property
    def gb_s(self) -> float:
        """Rate in GB/s."""
        return self.nbytes / self.wall_s / 1e9

    def __add__(self, other: Sample) -> Sample:
        return Sample(self.nbytes + other.nbytes, self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)


class BusyThread:
    """A thread that computes in pure Python and never lets go of the interpreter by itself."""

    def __init__(self) -> None:
        self.loops = 0
        self.cpu_s = 0.0
        self._stop = False
        self._thread = threading.Thread(target=self._compute, name="engine", daemon=True)

    def __enter__(self) -> BusyThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()

    async def rate_during(self, work: Awaitable[object]) -> float:
        """Return how many loops a second it does while something else is awaited."""
        loops, started = self.loops, time.perf_counter()
        await work
        return (self.loops - loops) / (time.perf_counter() - started)

    def _compute(self) -> None:
        loops = 0
        while not self._stop:
            for _ in range(1000):
                loops += 1
            self.loops = loops
            self.cpu_s = time.thread_time()


@contextmanager
def _raw_file(root: Path) -> Iterator[int]:
    """A file that was written before, open for direct I/O where that is possible."""
    path = root / "raw-limit"
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
    except OSError:
        fd = os.open(path, flags, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)
        path.unlink()


class RawLimit:
    """Sequential blocks, several at once, by threads that leave the interpreter alone meanwhile."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._blocks = RAW_FILE_BYTES // RAW_BLOCK_BYTES
        # As much memory as the tier has: reads into the same few MiB again and again were measured
        # at half the rate in a virtual machine.
        self._memory = HeapMemory(self._blocks, RAW_BLOCK_BYTES)
        _fill(self._memory)
        for block in range(self._blocks):
            os.pwritev(fd, [self._memory.view(block)], block * RAW_BLOCK_BYTES)

    def measure(self, verb: str, seconds: float) -> Sample:
        """Write or read for some seconds."""
        move = os.pwritev if verb == "put" else os.preadv
        numbers = count()
        end_at = time.perf_counter() + seconds

        def work(_: int) -> int:
            moved = 0
            while moved == 0 or time.perf_counter() < end_at:
                block = next(numbers) % self._blocks
                moved += move(self._fd, [self._memory.view(block)], block * RAW_BLOCK_BYTES)
            return moved

        wall, cpu = time.perf_counter(), time.process_time()
        with ThreadPoolExecutor(RAW_THREADS) as pool:
            nbytes = sum(pool.map(work, range(RAW_THREADS)))
        return Sample(nbytes, time.perf_counter() - wall, time.process_time() - cpu)


class TierUnderTest:
    """An open file tier, memory for several batches, and keys that were put."""

    def __init__(self, tier: FsTier, memory: HeapMemory) -> None:
        self._tier = tier
        self._memory = memory
        self._serial = 0
        self.put_keys: list[tuple[OffloadKey, ...]] = []

    async def move_for(self, verb: str, seconds: float) -> int:
        """Put or get for some seconds. Returns bytes."""
        return await (self.put_for if verb == "put" else self.get_for)(seconds)

    async def put_for(self, seconds: float) -> int:
        """Put new chunks for some seconds, several batches at once. Returns bytes."""
        self.put_keys.clear()
        return await self._flights(seconds, self._put)

    async def get_for(self, seconds: float) -> int:
        """Get what was put last for some seconds. Returns bytes."""
        turns = count()
        return await self._flights(seconds, partial(self._get, turns))

    async def discard_all(self) -> None:
        """Remove what was put last."""
        for keys in self.put_keys:
            await self._tier.discard(keys)

    async def _flights(self, seconds: float, step: Callable[[range], Awaitable[None]]) -> int:
        end_at = time.perf_counter() + seconds

        async def fly(flight: int) -> int:
            moved = 0
            slots = range(flight * BATCH_CHUNKS, (flight + 1) * BATCH_CHUNKS)
            while moved == 0 or time.perf_counter() < end_at:
                await step(slots)
                moved += BATCH_CHUNKS * self._memory.chunk_bytes
            return moved

        async with asyncio.TaskGroup() as group:
            flights = [group.create_task(fly(flight)) for flight in range(BATCHES_IN_FLIGHT)]
        return sum(flight.result() for flight in flights)

    async def _put(self, slots: range) -> None:
        first = self._serial
        self._serial += BATCH_CHUNKS
        numbers = range(first, first + BATCH_CHUNKS)
        keys = tuple(pack_key(hashlib.sha256(number.to_bytes(8, "big")).digest()) for number in numbers)
        outcome = await self._tier.put(Batch(keys, slots, self._memory))
        _require_ok(outcome.statuses, outcome.reasons)
        self.put_keys.append(keys)

    async def _get(self, turns: Iterator[int], slots: range) -> None:
        keys = self.put_keys[next(turns) % len(self.put_keys)]
        outcome = await self._tier.get(Batch(keys, slots, self._memory))
        _require_ok(outcome.statuses, outcome.reasons)


def run(
    root: Path,
    sizes: Sequence[int] = (65536, 524288, 2097152),
    seconds: float = 1.0,
    rounds: int = 5,
) -> list[Point | Surroundings]:
    """Measure. What is written below ``root`` is removed again.

    Args:
        root: directory on the file system to be measured; it needs some GB for each second.
        sizes: bytes of a chunk, multiples of 4096.
        seconds: length of each measured stretch.
        rounds: how often each is repeated; medians are given.

    Returns:
        What was measured on, and a point for each size, verb and state of the interpreter.
    """
    root.mkdir(parents=True, exist_ok=True)
    result: list[Point | Surroundings] = [surroundings(root)]
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=root) as name:
        folder = Path(name)
        with _raw_file(folder) as fd:
            limit = RawLimit(fd)
            for size in sizes:
                result += asyncio.run(_measure_size(folder, size, seconds, rounds, limit))
    return result


@dataclass(frozen=True, slots=True)
class Round:
    """What was measured together: disk and tier, and the computing thread alone and beside the disk."""

    tier: Sample
    raw: Sample = Sample(0, 1, 0)
    alone: float | None = None
    beside_raw: float | None = None


async def _measure_size(root: Path, size: int, seconds: float, rounds: int, limit: RawLimit) -> list[Point]:
    memory = HeapMemory(BATCH_CHUNKS * BATCHES_IN_FLIGHT, size)
    await asyncio.to_thread(_fill, memory)
    tier = FsTier(FsConfig(root_dir=root, min_free_bytes=0))
    await tier.open(TierContext("bench", Identity.make("bench", {"chunk_bytes": size}), size))
    under_test = TierUnderTest(tier, memory)
    found: dict[tuple[str, bool], list[Round]] = {}
    try:
        await under_test.put_for(seconds / 4)  # makes directories, starts threads
        await under_test.discard_all()
        for _ in range(rounds):
            for busy in (False, True):
                for verb in ("put", "get"):
                    one = await _measure_round(under_test, limit, verb, seconds, busy)
                    found.setdefault((verb, busy), []).append(one)
                await under_test.discard_all()
    finally:
        await tier.aclose()
    return [_point(size, verb, busy, rows) for (verb, busy), rows in sorted(found.items())]


async def _measure_round(
    under_test: TierUnderTest, limit: RawLimit, verb: str, seconds: float, busy: bool
) -> Round:
    """Measure the disk, the tier and the disk again: its rate changes within seconds."""
    before = await asyncio.to_thread(limit.measure, verb, seconds / 2)
    one = await (_measure_busy if busy else _measure_idle)(under_test, limit, verb, seconds)
    after = await asyncio.to_thread(limit.measure, verb, seconds / 2)
    return dataclasses.replace(one, raw=before + after)


async def _measure_idle(under_test: TierUnderTest, _: RawLimit, verb: str, seconds: float) -> Round:
    wall, cpu = time.perf_counter(), time.process_time()
    nbytes = await under_test.move_for(verb, seconds)
    return Round(Sample(nbytes, time.perf_counter() - wall, time.process_time() - cpu))


async def _measure_busy(under_test: TierUnderTest, limit: RawLimit, verb: str, seconds: float) -> Round:
    with BusyThread() as engine:
        alone = await engine.rate_during(asyncio.sleep(seconds / 4))
        beside_raw = await engine.rate_during(asyncio.to_thread(limit.measure, verb, seconds / 2))
        wall, cpu, engine_cpu = time.perf_counter(), time.process_time(), engine.cpu_s
        loops, nbytes = engine.loops, await under_test.move_for(verb, seconds)
        took = time.perf_counter() - wall
        cpu_s = time.process_time() - cpu - (engine.cpu_s - engine_cpu)
        beside_tier = (engine.loops - loops) / took
    return Round(Sample(nbytes, took, cpu_s, beside_tier), alone=alone, beside_raw=beside_raw)


def _point(size: int, verb: str, busy: bool, rows: Sequence[Round]) -> Point:
    beside_tier = [1 - row.tier.loops_per_s / row.alone for row in rows if row.tier.loops_per_s and row.alone]
    beside_raw = [1 - row.beside_raw / row.alone for row in rows if row.beside_raw and row.alone]
    return Point(
        chunk_bytes=size,
        verb=verb,
        busy=busy,
        raw_gb_s=statistics.median(row.raw.gb_s for row in rows),
        tier_gb_s=statistics.median(row.tier.gb_s for row in rows),
        ratio=statistics.median(row.tier.gb_s / row.raw.gb_s for row in rows),
        cpu_s_per_gb=statistics.median(row.tier.cpu_s / row.tier.nbytes * 1e9 for row in rows),
        slowdown=statistics.median(beside_tier) if beside_tier else None,
        raw_slowdown=statistics.median(beside_raw) if beside_raw else None,
    )


def surroundings(root: Path) -> Surroundings:
    """Return what is measured on."""
    return Surroundings(
        file_system=_file_system(root),
        kernel=platform.release(),
        cores=os.cpu_count() or 0,
        python=platform.python_version(),
        helper="native" if native.available else "fallback",
    )


def _file_system(root: Path) -> str:
    """Return the type of the file system that ``root`` is on: that of the longest mount point above."""
    best, kind = "", "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, found, *_ = line.split(" ")
        if root.absolute().is_relative_to(point) and len(point) >= len(best):
            best, kind = point, found
    return kind


def _fill(memory: HeapMemory) -> None:
    """Give the slots memory of their own, and bytes that do not compress."""
    native.populate(memory.address, memory.slots * memory.chunk_bytes)
    noise = os.urandom(memory.chunk_bytes)
    for slot in range(memory.slots):
        memory.view(slot)[:] = noise


def _require_ok(statuses: Sequence[Status], reasons: object) -> None:
    if any(statuses):
        raise KVTierError(f"the tier under test did not do its work: {reasons}")


def main(
    root: Annotated[Path, typer.Argument(help="Directory on the file system to be measured.")],
    sizes: Annotated[list[int] | None, typer.Option("--size", help="Bytes of a chunk; repeatable.")] = None,
    seconds: Annotated[float, typer.Option(help="Length of each measured stretch.")] = 1.0,
    rounds: Annotated[int, typer.Option(help="How often each stretch is repeated.")] = 5,
    json_path: Annotated[Path | None, typer.Option("--json", help="File for the figures.")] = None,
) -> None:
    """Measure the file tier against the disk below it."""
    result = run(root, sizes or (65536, 524288, 2097152), seconds, rounds)
    figures.show(result, Console())
    if json_path is not None:
        figures.write(result, json_path)


if __name__ == "__main__":
    typer.run(main)
