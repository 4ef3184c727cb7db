"""Benchmark of the file tier: put and get through its public face, beside what the disk can do.

Each round measures the raw limit and the tier one after the other, so that a noisy machine changes
both alike: trust the ratios. The limit is a large file on the same file system, written before, read
and overwritten with direct I/O by several threads from memory that is there already.

Each point is measured twice: with the interpreter idle, and beside a thread that computes in pure
Python without a pause, as an engine's does.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from kvtier import native
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
    """One line of the result. GB are 10**9 bytes; figures are medians over the rounds.

    Attributes:
        chunk_bytes: bytes of a chunk.
        verb: ``"put"`` or ``"get"``.
        busy: whether a thread computed in pure Python meanwhile.
        raw_gb_s: what the disk did in the same rounds, the interpreter idle.
        tier_gb_s: what the tier did.
        ratio: median of the rounds' ratios of the two.
        cpu_s_per_gb: processor time of this process for each GB, the computing thread's left out.
        slowdown: by what share the computing thread got slower; None where there is none.
    """

    chunk_bytes: int
    verb: str
    busy: bool
    raw_gb_s: float
    tier_gb_s: float
    ratio: float
    cpu_s_per_gb: float
    slowdown: float | None


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
        self._memory = HeapMemory(RAW_THREADS, RAW_BLOCK_BYTES)
        _fill(self._memory)
        self._blocks = RAW_FILE_BYTES // RAW_BLOCK_BYTES
        for block in range(self._blocks):
            os.pwritev(fd, [self._memory.view(block % RAW_THREADS)], block * RAW_BLOCK_BYTES)

    def measure(self, verb: str, seconds: float) -> Sample:
        """Write or read for some seconds."""
        move = os.pwritev if verb == "put" else os.preadv
        numbers = count()
        end_at = time.perf_counter() + seconds

        def work(thread: int) -> int:
            moved = 0
            view = self._memory.view(thread)
            while time.perf_counter() < end_at:
                moved += move(self._fd, [view], next(numbers) % self._blocks * RAW_BLOCK_BYTES)
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

    async def _flights(self, seconds: float, step: Callable[[range], object]) -> int:
        end_at = time.perf_counter() + seconds

        async def fly(flight: int) -> int:
            moved = 0
            slots = range(flight * BATCH_CHUNKS, (flight + 1) * BATCH_CHUNKS)
            while time.perf_counter() < end_at:
                await step(slots)  # type: ignore[misc]
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
    json_path: Path | None = None,
    console: Console | None = None,
) -> list[Point]:
    """Measure, print a table, and write it as JSON where that is asked for.

    Args:
        root: directory on the file system to be measured; it needs some GB for each second.
        sizes: bytes of a chunk, multiples of 4096.
        seconds: length of each measured stretch.
        rounds: how often each is repeated; medians are shown.
        json_path: file for the figures.
        console: where the table goes.
    """
    root.mkdir(parents=True, exist_ok=True)
    points: list[Point] = []
    with _raw_file(root) as fd:
        limit = RawLimit(fd)
        for size in sizes:
            points += asyncio.run(_measure_size(root, size, seconds, rounds, limit))
    facts = surroundings(root)
    (console or Console()).print(_table(points, facts))
    if json_path is not None:
        json_path.write_text(json.dumps({"on": facts, "points": [asdict(point) for point in points]}, indent=2))
    return points


async def _measure_size(
    root: Path, size: int, seconds: float, rounds: int, limit: RawLimit
) -> list[Point]:
    memory = HeapMemory(BATCH_CHUNKS * BATCHES_IN_FLIGHT, size)
    await asyncio.to_thread(_fill, memory)
    tier = FsTier(FsConfig(root_dir=root, min_free_bytes=0))
    await tier.open(TierContext("bench", Identity.make("bench", {"chunk_bytes": size}), size))
    under_test = TierUnderTest(tier, memory)
    samples: dict[tuple[str, bool], list[tuple[Sample, Sample, float | None]]] = {}
    try:
        await under_test.put_for(seconds / 4)  # makes directories, starts threads
        await under_test.discard_all()
        for _ in range(rounds):
            for busy in (False, True):
                for verb in ("put", "get"):
                    raw = await asyncio.to_thread(limit.measure, verb, seconds)
                    alone = await _alone(seconds / 4) if busy else None
                    sample = await _measure_tier(under_test, verb, seconds, busy)
                    samples.setdefault((verb, busy), []).append((raw, sample, alone))
                await under_test.discard_all()
    finally:
        await tier.aclose()
    return [_point(size, verb, busy, rows) for (verb, busy), rows in sorted(samples.items())]


async def _measure_tier(under_test: TierUnderTest, verb: str, seconds: float, busy: bool) -> Sample:
    move = under_test.put_for if verb == "put" else under_test.get_for
    wall, cpu = time.perf_counter(), time.process_time()
    if not busy:
        nbytes = await move(seconds)
        return Sample(nbytes, time.perf_counter() - wall, time.process_time() - cpu)
    with BusyThread() as engine:
        nbytes = await move(seconds)
        took = time.perf_counter() - wall
        loops = engine.loops / took
    return Sample(nbytes, took, time.process_time() - cpu - engine.cpu_s, loops)


async def _alone(seconds: float) -> float:
    """Return the rate of the computing thread while nothing else happens, in loops a second."""
    with BusyThread() as engine:
        started = time.perf_counter()
        await asyncio.sleep(seconds)
        return engine.loops / (time.perf_counter() - started)


def _point(size: int, verb: str, busy: bool, rows: list[tuple[Sample, Sample, float | None]]) -> Point:
    slowdowns = [1 - tier.loops_per_s / alone for _, tier, alone in rows if tier.loops_per_s and alone]
    return Point(
        chunk_bytes=size,
        verb=verb,
        busy=busy,
        raw_gb_s=statistics.median(raw.gb_s for raw, _, _ in rows),
        tier_gb_s=statistics.median(tier.gb_s for _, tier, _ in rows),
        ratio=statistics.median(tier.gb_s / raw.gb_s for raw, tier, _ in rows),
        cpu_s_per_gb=statistics.median(tier.cpu_s / tier.nbytes * 1e9 for _, tier, _ in rows),
        slowdown=statistics.median(slowdowns) if slowdowns else None,
    )


def surroundings(root: Path) -> dict[str, str | int]:
    """Return what was measured on: file system, kernel, processor cores, helper."""
    return {
        "file_system": _file_system(root),
        "kernel": platform.release(),
        "cores": os.cpu_count() or 0,
        "python": platform.python_version(),
        "helper": "native" if native.available else "fallback",
    }


def _file_system(root: Path) -> str:
    """Return the type of the file system that ``root`` is on: that of the longest mount point above."""
    best, kind = "", "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, found, *_ = line.split(" ")
        if root.absolute().is_relative_to(point) and len(point) >= len(best):
            best, kind = point, found
    return kind


def _table(points: Sequence[Point], facts: dict[str, str | int]) -> Table:
    told = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items())
    table = Table(title="file tier", caption=told)
    for name in ("chunk", "verb", "engine", "disk GB/s", "tier GB/s", "ratio", "CPU s/GB", "engine slower by"):
        table.add_column(name, justify="right")
    for point in points:
        table.add_row(
            f"{point.chunk_bytes // 1024} KiB",
            point.verb,
            "busy" if point.busy else "idle",
            f"{point.raw_gb_s:.2f}",
            f"{point.tier_gb_s:.2f}",
            f"{point.ratio:.0%}",
            f"{point.cpu_s_per_gb:.3f}",
            "" if point.slowdown is None else f"{point.slowdown:.1%}",
        )
    return table


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
    run(root, sizes or (65536, 524288, 2097152), seconds, rounds, json_path)


if __name__ == "__main__":
    typer.run(main)
