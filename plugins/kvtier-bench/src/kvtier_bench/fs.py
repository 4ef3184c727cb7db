"""Benchmark of the file tier: put and get through its public face, beside what the disk can do.

Each round measures the raw limit, the tier and, where vLLM is installed, the compiled path of its own fs
tier, one after the other, so that a noisy machine changes all of them alike: trust the ratios. The limit is a
large file on the same file system, written before, read and overwritten with direct I/O by several threads of
another process from memory that is there already.

Each point is measured twice: idle, and beside a process that computes in pure Python without a pause, as an
engine does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import importlib
import os
import shutil
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from kvtier import native
from kvtier.errors import KVTierError
from kvtier.identity import Identity
from kvtier.keys import OffloadKey, pack_key
from kvtier.memory.heap import HeapMemory
from kvtier.tiers.base import Batch, Status, TierContext
from kvtier.tiers.fs import FsConfig, FsTier
from kvtier.tiers.fs.layout import BLOCK_BYTES
from kvtier_bench import disk, machine
from kvtier_bench.busy import BusyProcess
from kvtier_bench.disk import RawLimit, fill, raw_limit
from kvtier_bench.machine import Machine, open_folder, require_room

BATCH_CHUNKS: Final = 64
BATCHES_IN_FLIGHT: Final = 4
MOST_GB_S: Final = 5.0
"""So many names are made before a stretch is measured; beyond, they are made meanwhile."""

RATE_HEADROOM: Final = 1.5
"""By how much a tier may be faster than the disk was when the room was looked at."""

_GLANCE_S: Final = 0.2
_UNBOUNDED: Final = 2**62
_NO_ROOM: Final = frozenset({"max_bytes", "min_free", "enospc", "edquot"})

SIZES: Final = (65536, 524288, 2097152)
KVTIER: Final = "kvtier"
VLLM: Final = "vllm"


@dataclass(frozen=True, slots=True)
class Point:
    """The file tier beside its disk. GB are 10**9 bytes; figures are medians over the rounds.

    Attributes:
        path: ``"kvtier"``, or ``"vllm"``: the compiled path of vLLM's own tier.
        chunk_bytes: bytes of a chunk.
        verb: ``"put"`` or ``"get"``.
        busy: whether an engine computed in pure Python meanwhile.
        raw_gb_s: what the disk did in the same rounds, the interpreter idle.
        raw_busy: what part of that the disk alone did beside the computing engine, which takes one of the
            processors; None where there is none.
        tier_gb_s: what the tier did.
        ratio: median of the rounds' ratios of the two.
        spread: least and greatest of them.
        cpu_us_chunk: processor time of this process for each chunk.
        bare_us_chunk: the same without the checksums, whose time is measured apart in each round.
        slowdown: by what share the computing engine got slower; None where there is none.
        raw_slowdown: the same beside the bare disk work, which takes processor time of its own.
    """

    path: str
    chunk_bytes: int
    verb: str
    busy: bool
    raw_gb_s: float
    tier_gb_s: float
    ratio: float
    spread: str
    cpu_us_chunk: float
    bare_us_chunk: float
    slowdown: float | None
    raw_slowdown: float | None
    raw_busy: float | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured stretch: bytes moved, wall and processor seconds."""

    nbytes: int
    wall_s: float
    cpu_s: float

    @property
    def gb_s(self) -> float:
        """Rate in GB/s."""
        return self.nbytes / self.wall_s / 1e9

    def __add__(self, other: Sample) -> Sample:
        return Sample(self.nbytes + other.nbytes, self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)


class Keys:
    """Keys that look like hashes and cost next to nothing to make: they are not what is measured."""

    def __init__(self) -> None:
        self._tails = [hashlib.sha256(bytes([number])).digest()[8:] for number in range(BATCH_CHUNKS)]

    def batches(self, first: int, count: int) -> list[tuple[OffloadKey, ...]]:
        """Return so many batches, of chunk ``first`` and those after it."""
        return [self.batch(first + number * BATCH_CHUNKS) for number in range(count)]

    def batch(self, first: int) -> tuple[OffloadKey, ...]:
        """Return ``BATCH_CHUNKS`` keys, of chunk ``first`` and those after it."""
        head = hashlib.sha256(first.to_bytes(8, "big")).digest()[:7]
        return tuple(pack_key(bytes([number]) + head + tail) for number, tail in enumerate(self._tails))


KEYS: Final = Keys()


BatchT = TypeVar("BatchT")


class UnderTest(ABC, Generic[BatchT]):
    """Something that moves chunks between memory and files, several batches at once.

    Args:
        memory: where the chunks are.
    """

    checksums: bool
    """Whether it computes one for each chunk."""

    def __init__(self, memory: HeapMemory) -> None:
        self.chunk_bytes = memory.chunk_bytes
        self._memory = memory
        self._serial = 0
        self._new: list[BatchT] = []
        self._stored: list[BatchT] = []

    def prepare(self, batches: int) -> None:
        """Make names of new chunks: an engine has them already, and they are not what is measured."""
        made = KEYS.batches(self._serial, max(0, batches - len(self._new)))
        self._serial += BATCH_CHUNKS * len(made)
        self._new += map(self._named, made)

    async def move_for(self, verb: str, seconds: float) -> int:
        """Put new chunks, or get those that were put last, for some seconds. Returns bytes."""
        if verb == "put":
            self._stored.clear()
            return await fly(seconds, self.chunk_bytes, self._put_next)
        return await fly(seconds, self.chunk_bytes, partial(self._get_next, count()))

    @abstractmethod
    async def discard_all(self) -> None:
        """Remove what was put last."""

    async def _put_next(self, slots: range) -> None:
        if not self._new:
            self.prepare(1)
        batch = self._new.pop()
        await self._put(batch, slots)
        self._stored.append(batch)

    async def _get_next(self, turns: Iterator[int], slots: range) -> None:
        await self._get(self._stored[next(turns) % len(self._stored)], slots)

    @abstractmethod
    def _named(self, keys: tuple[OffloadKey, ...]) -> BatchT: ...

    @abstractmethod
    async def _put(self, batch: BatchT, slots: range) -> None: ...

    @abstractmethod
    async def _get(self, batch: BatchT, slots: range) -> None: ...


class TierUnderTest(UnderTest[tuple[OffloadKey, ...]]):
    """An open file tier."""

    checksums = True

    def __init__(self, tier: FsTier, memory: HeapMemory) -> None:
        super().__init__(memory)
        self._tier = tier

    async def discard_all(self) -> None:
        """See ``UnderTest.discard_all``."""
        await self._tier.reset()

    def _named(self, keys: tuple[OffloadKey, ...]) -> tuple[OffloadKey, ...]:
        return keys

    async def _put(self, batch: tuple[OffloadKey, ...], slots: range) -> None:
        outcome = await self._tier.put(Batch(batch, slots, self._memory))
        _require_ok(outcome.statuses, outcome.reasons)

    async def _get(self, batch: tuple[OffloadKey, ...], slots: range) -> None:
        outcome = await self._tier.get(Batch(batch, slots, self._memory))
        _require_ok(outcome.statuses, outcome.reasons)


class VllmUnderTest(UnderTest[list[str]]):
    """The compiled path of vLLM's own fs tier in its own threads, given the same batches."""

    checksums = False

    def __init__(self, root: Path, memory: HeapMemory) -> None:
        super().__init__(memory)
        self._files = importlib.import_module("kvtier_bench.vllm_files").VllmFiles(memory)
        self._root = root

    async def discard_all(self) -> None:
        """See ``UnderTest.discard_all``."""
        await asyncio.to_thread(shutil.rmtree, self._root, ignore_errors=True)

    def close(self) -> None:
        """End its threads."""
        self._files.close()

    def _named(self, keys: tuple[OffloadKey, ...]) -> list[str]:
        names = [key.hex() for key in keys]
        return [f"{self._root}/{name[:3]}/{name[3:5]}_g0/{name}.bin" for name in names]

    async def _put(self, batch: list[str], slots: range) -> None:
        await self._files.store(batch, slots)

    async def _get(self, batch: list[str], slots: range) -> None:
        await self._files.load(batch, slots)


async def fly(seconds: float, chunk_bytes: int, step: Callable[[range], Awaitable[None]]) -> int:
    """Move batches for some seconds, several at once, each with slots of its own. Returns bytes."""
    end_at = time.perf_counter() + seconds

    async def one(flight: int) -> int:
        moved = 0
        slots = range(flight * BATCH_CHUNKS, (flight + 1) * BATCH_CHUNKS)
        while moved == 0 or time.perf_counter() < end_at:
            await step(slots)
            moved += BATCH_CHUNKS * chunk_bytes
        return moved

    try:
        async with asyncio.TaskGroup() as group:
            flights = [group.create_task(one(flight)) for flight in range(BATCHES_IN_FLIGHT)]
    except BaseExceptionGroup as errors:
        found = errors.subgroup(KVTierError)
        if found is None:
            raise
        raise KVTierError(str(_first(found))) from errors
    return sum(flight.result() for flight in flights)


def _first(errors: BaseException) -> BaseException:
    while isinstance(errors, BaseExceptionGroup):
        errors = errors.exceptions[0]
    return errors


def run(
    root: Path,
    sizes: Sequence[int] = SIZES,
    seconds: float = 1.0,
    rounds: int = 5,
) -> list[Point | Machine]:
    """Measure. What is written below ``root`` is removed again.

    Args:
        root: directory on the file system to be measured; it needs some GB for each second.
        sizes: bytes of a chunk, multiples of 4096.
        seconds: length of each measured stretch.
        rounds: how often each is repeated; medians are given.

    Returns:
        What was measured on, and a point for each path, size, verb and state of the interpreter.

    Raises:
        KVTierError: the file system has no room for it, or the tier has failed.
    """
    points: list[Point] = []
    with open_folder(root) as folder:
        require_room(root, disk.FILE_BYTES, "the file that shows the disk's rate")
        with raw_limit(folder) as limit:
            needed = _bytes_put(_measure_raw(limit, "put", _GLANCE_S).gb_s, sizes, seconds)
            require_room(root, needed, f"chunks put for {seconds:g} s at the disk's rate")
            for size in sizes:
                points += asyncio.run(_measure_size(folder, size, seconds, rounds, limit))
        return [Machine.here(root), *points]


def _bytes_put(gb_s: float, sizes: Sequence[int], seconds: float) -> int:
    """Return the most bytes that are there at once: what one path puts in a stretch, and what it began."""
    put = RATE_HEADROOM * gb_s * 1e9 * seconds
    in_flight = BATCHES_IN_FLIGHT * BATCH_CHUNKS
    return max(int((put / size + in_flight) * (size + BLOCK_BYTES)) for size in sizes)


@dataclass(frozen=True, slots=True)
class Round:
    """What was measured together: disk and tier, and how fast the engine computed alone and beside each."""

    tier: Sample
    raw: Sample = Sample(0, 1, 0)
    alone: float | None = None
    beside_tier: float | None = None
    beside_raw: float | None = None
    raw_busy: Sample | None = None
    checksum_us: float = 0.0


Rounds = dict[tuple[str, str, bool], list[Round]]
"""Rounds of each path, verb and state of the interpreter."""


async def _measure_size(root: Path, size: int, seconds: float, rounds: int, limit: RawLimit) -> list[Point]:
    memory = HeapMemory(BATCH_CHUNKS * BATCHES_IN_FLIGHT, size)
    await asyncio.to_thread(fill, memory)
    found: Rounds = {}
    async with AsyncExitStack() as stack:
        paths = await _open_paths(stack, root, memory)
        for under_test in paths.values():
            await under_test.move_for("put", seconds / 4)  # makes directories, starts threads
            await under_test.discard_all()
        for _ in range(rounds):
            checksum_us = await asyncio.to_thread(_checksum_us, memory)
            for busy in (False, True):
                for path, under_test in paths.items():
                    for verb in ("put", "get"):
                        one = await _measure_round(under_test, limit, verb, seconds, busy)
                        if under_test.checksums:
                            one = dataclasses.replace(one, checksum_us=checksum_us)
                        found.setdefault((path, verb, busy), []).append(one)
                    await under_test.discard_all()
                    await asyncio.to_thread(_wait_until_swept, root)
    return [_point(size, *key, rows) for key, rows in sorted(found.items())]


async def _open_paths(stack: AsyncExitStack, root: Path, memory: HeapMemory) -> dict[str, UnderTest[Any]]:
    config = FsConfig.model_validate(
        {"root_dir": root / KVTIER, "max_bytes": _UNBOUNDED, "min_free_bytes": 0, "eviction": "none"}
    )
    tier = FsTier(config)
    await tier.open(
        TierContext("bench", Identity.make("bench", {"chunk_bytes": memory.chunk_bytes}), memory.chunk_bytes)
    )
    stack.push_async_callback(tier.aclose)
    paths: dict[str, UnderTest[Any]] = {KVTIER: TierUnderTest(tier, memory)}
    with suppress(ImportError):
        vllm = VllmUnderTest(root / VLLM, memory)
        stack.callback(vllm.close)
        paths[VLLM] = vllm
    return paths


def _wait_until_swept(root: Path) -> None:
    """Wait until what was reset has been removed: the disk is not to be busy with it."""
    before, now = -1, 0
    while before != now:
        before = now
        time.sleep(0.2)
        now = sum(len(files) for _, _, files in os.walk(root))


async def _measure_round(
    under_test: UnderTest[Any], limit: RawLimit, verb: str, seconds: float, busy: bool
) -> Round:
    """Measure the disk, the tier and the disk again: its rate changes within seconds."""
    if verb == "put":
        batch_bytes = BATCH_CHUNKS * under_test.chunk_bytes
        await asyncio.to_thread(under_test.prepare, int(seconds * MOST_GB_S * 1e9 / batch_bytes))
    before = await asyncio.to_thread(_measure_raw, limit, verb, seconds / 2)
    one = (
        await _measure_busy(under_test, limit, verb, seconds)
        if busy
        else Round(await _measure(under_test, verb, seconds))
    )
    after = await asyncio.to_thread(_measure_raw, limit, verb, seconds / 2)
    return dataclasses.replace(one, raw=before + after)


def _measure_raw(limit: RawLimit, verb: str, seconds: float) -> Sample:
    nbytes, took_s = limit.measure(verb, seconds)
    return Sample(nbytes, took_s, 0.0)


async def _measure(under_test: UnderTest[Any], verb: str, seconds: float) -> Sample:
    wall, cpu = time.perf_counter(), time.process_time()
    nbytes = await under_test.move_for(verb, seconds)
    return Sample(nbytes, time.perf_counter() - wall, time.process_time() - cpu)


async def _measure_busy(under_test: UnderTest[Any], limit: RawLimit, verb: str, seconds: float) -> Round:
    engine = BusyProcess()
    await asyncio.to_thread(engine.__enter__)
    try:
        alone = await engine.rate_during(asyncio.sleep(seconds / 4))
        raw = asyncio.ensure_future(asyncio.to_thread(_measure_raw, limit, verb, seconds / 2))
        beside_raw = await engine.rate_during(raw)
        loops = engine.loops
        moved = await _measure(under_test, verb, seconds)
        beside_tier = (engine.loops - loops) / moved.wall_s
    finally:
        await asyncio.to_thread(engine.__exit__)
    return Round(moved, alone=alone, beside_raw=beside_raw, raw_busy=raw.result(), beside_tier=beside_tier)


def _checksum_us(memory: HeapMemory) -> float:
    """Return the processor time of one chunk's checksum, in microseconds."""
    before = time.thread_time()
    for slot in range(memory.slots):
        native.crc32c(memory.address + slot * memory.chunk_bytes, memory.chunk_bytes)
    return (time.thread_time() - before) / memory.slots * 1e6


def _point(size: int, path: str, verb: str, busy: bool, rows: Sequence[Round]) -> Point:
    beside_tier = [1 - row.beside_tier / row.alone for row in rows if row.beside_tier and row.alone]
    beside_raw = [1 - row.beside_raw / row.alone for row in rows if row.beside_raw and row.alone]
    raw_busy = [row.raw_busy.gb_s / row.raw.gb_s for row in rows if row.raw_busy is not None]
    ratios = [row.tier.gb_s / row.raw.gb_s for row in rows]
    cpu = statistics.median(row.tier.cpu_s / row.tier.nbytes * size * 1e6 for row in rows)
    return Point(
        path=path,
        chunk_bytes=size,
        verb=verb,
        busy=busy,
        raw_gb_s=statistics.median(row.raw.gb_s for row in rows),
        tier_gb_s=statistics.median(row.tier.gb_s for row in rows),
        ratio=statistics.median(ratios),
        spread=f"{min(ratios):.2f}-{max(ratios):.2f}",
        cpu_us_chunk=cpu,
        bare_us_chunk=cpu - statistics.median(row.checksum_us for row in rows),
        slowdown=statistics.median(beside_tier) if beside_tier else None,
        raw_slowdown=statistics.median(beside_raw) if beside_raw else None,
        raw_busy=statistics.median(raw_busy) if raw_busy else None,
    )


def _require_ok(statuses: Sequence[Status], reasons: Iterable[str]) -> None:
    if any(statuses):
        why = ", ".join(sorted(reasons))
        remedy = machine.REMEDY if _NO_ROOM.intersection(reasons) else "see the log"
        raise KVTierError(f"the tier under test did not do its work ({why}): {remedy}")
