"""Restarts over kept host memory: how soon it is adopted, and how fast its chunks are verified.

No engine runs: only kvtier's memory, its table and the background verification. The start of a real engine
takes additional time.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import product
from statistics import median

from kvtier import Identity
from kvtier._core.slot_trailers import SlotTrailers, slot_trailers_bytes
from kvtier._execution.executor import Executor, NamedTier
from kvtier._memory.region import SHARED_MEMORY, Region
from kvtier.errors import KVTierError
from kvtier.keys import pack_key
from kvtier.tiers._adopted import AdoptedConfig, AdoptedTier
from kvtier.tiers._seal import read, seal
from kvtier_bench.machine import Machine

_KEEP_S = 60.0
_POLL_S = 0.002
_IDENTITY = Identity.make("kvtier-bench-restart", {})


@dataclass(frozen=True)
class Restart:
    """Kept host memory: taking it over, and verifying its chunks in the background

    Attributes:
        gib: size of the memory.
        chunk_kib: size of a chunk.
        store_us: processor time of the tier process for each chunk that the previous engine stored.
        adopted_s: seconds until the memory is mapped and its table is read.
        first_ms: milliseconds from then until the most recently used chunk is a hit in host memory.
        verified_s: seconds from then until all chunks are hits.
        chunks_s: chunks verified per second.
        core: processor time of the verification, as a share of one core.
    """

    gib: float
    chunk_kib: int
    store_us: float
    adopted_s: float
    first_ms: float
    verified_s: float
    chunks_s: float
    core: float


def run(gib: Sequence[float], chunk_bytes: Sequence[int], rounds: int) -> list[Restart | Machine]:
    """Measure memory of these sizes, and free it; the figures are medians over rounds.

    Raises:
        KVTierError: there is not enough memory.
    """
    machine = Machine.here()
    found = []
    for size, chunk in product(gib, chunk_bytes):
        rows = []
        for _ in range(rounds):
            rows.append(astuple(_measure(int(size * 2**30) // chunk, chunk)))
            gc.collect()  # Memory is freed with its last view, and an executor has reference cycles.
        found.append(Restart(*map(median, zip(*rows, strict=True))))
    return [*found, machine.again()]


def _measure(slots: int, chunk_bytes: int) -> Restart:
    with _opened("before", slots, chunk_bytes) as region:
        store_s = _fill(region)
    began_s = time.perf_counter()
    with _opened("after", slots, chunk_bytes) as region:
        assert region.path is not None
        region.path.unlink()  # The memory is not kept a second time.
        keys = [read(trailer) for _, trailer in region.trailers.adopt()]
        if None in keys or len(keys) != slots:
            raise KVTierError(f"{len(keys)} of {slots} chunks were taken over")
        adopted_s = time.perf_counter() - began_s
        first_s, all_s, cpu_s = asyncio.run(_verify(region))
    share = cpu_s / all_s
    gib = slots * chunk_bytes / 2**30
    return Restart(
        gib, chunk_bytes // 1024, store_s * 1e6, adopted_s, first_s * 1e3, all_s, slots / all_s, share
    )


def _opened(name: str, slots: int, chunk_bytes: int) -> Region:
    nbytes, contents = slot_trailers_bytes(slots), f"kvtier-bench-{os.getpid()} {slots} x {chunk_bytes}"
    return Region.open(
        f"bench-{name}-{os.getpid()}", slots, chunk_bytes, SHARED_MEMORY, nbytes, contents, _KEEP_S
    )


def _fill(region: Region) -> float:
    """Store a chunk in each slot; return the tier process's processor seconds per chunk."""
    payload, spent_s = os.urandom(region.chunk_bytes), 0.0
    for first in range(0, region.slots, 64):
        region.back(range(first, min(first + 64, region.slots)))
    for slot in range(region.slots):
        region.trailers.fill([slot])
        view = region.view(slot)
        view[:] = payload
        view[:8] = slot.to_bytes(8, "little")
        began_s = time.thread_time()
        region.trailers.write(slot, seal(pack_key(slot.to_bytes(8, "big")), view, _IDENTITY.short_digest))
        spent_s += time.thread_time() - began_s
    return spent_s / region.slots


async def _verify(region: Region) -> tuple[float, float, float]:
    """Return the seconds until the first and the last verified chunk, and the processor seconds between."""
    trailers, tier = region.trailers, NamedTier("adopted", lambda: AdoptedTier(AdoptedConfig()))
    began_s, before_s = time.perf_counter(), time.process_time()
    times_s: list[float] = []
    async with Executor([tier], _IDENTITY, region, lambda _: None):
        for slot in (region.slots - 1, 0):  # the most and the least recently used chunk
            await asyncio.to_thread(_wait_for, trailers, slot)
            times_s.append(time.perf_counter() - began_s)
        return times_s[0], times_s[1], time.process_time() - before_s


def _wait_for(trailers: SlotTrailers, slot: int) -> None:
    while not trailers.is_verified(slot):
        time.sleep(_POLL_S)
