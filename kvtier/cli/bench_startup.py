"""How long a start waits for the primary tier, beside vLLM's own region where vLLM is installed.

kvtier's region is ready for its first chunks when the first piece has memory, and the engine goes on
meanwhile; vLLM's is made in one step, and its engine waits for it. Both are measured from the call that
makes the region: the call's return, the first slots that can be used, and all of them. On a GPU the
pages are pinned too, by kvtier in pieces beside that and by vLLM in the same step: not measured here.
"""

from __future__ import annotations

import importlib
import os
import platform
import random
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from kvtier.errors import ConfigError
from kvtier.memory import pages
from kvtier.memory.region import SHARED_MEMORY, Region, default_threads

GIB = 2**30
CHUNK_BYTES = 2 * 2**20
ROUNDS = 5
SIZES_GIB = (1.0, 2.0, 4.0)
_PATIENCE_S = 600.0
_VLLM = "vLLM"


@dataclass(frozen=True)
class Machine:
    """What it ran on.

    Attributes:
        kernel: its release.
        cpus: CPUs of this process.
        huge_pages: whether the system grants huge pages to files in shared memory.
        vllm: the version whose region is beside kvtier's, or why there is none.
    """

    kernel: str
    cpus: int
    huge_pages: bool
    vllm: str


@dataclass(frozen=True)
class Startup:
    """Seconds from the call that makes a region, medians of rounds in turn.

    Attributes:
        region: whose, and with how many threads (x1, x2).
        gib: its size.
        returns_s: until the call returns and the engine goes on.
        first_slot_s: until the first slots can be used.
        all_slots_s: until all can be used.
        spread: the longest round over the shortest, all slots.
        first_over_vllm: first slot, beside vLLM's region of the same round, median; 0 without vLLM.
        all_over_vllm: all slots, the same.
    """

    region: str
    gib: float
    returns_s: float
    first_slot_s: float
    all_slots_s: float
    spread: float
    first_over_vllm: float
    all_over_vllm: float


@dataclass(frozen=True, slots=True)
class _Times:
    returns_s: float
    first_s: float
    all_s: float


Make = Callable[[int], _Times]
"""Makes a region of so many slots, gives it back, and says how long it took."""


def run(sizes_gib: Sequence[float] = SIZES_GIB, rounds: int = ROUNDS) -> tuple[list[Machine], list[Startup]]:
    """Measure regions of these sizes, in turns of random order.

    Raises:
        ConfigError: there is no room in shared memory for the largest.
    """
    _require_room(max(sizes_gib))
    makers: dict[str, Make] = {f"kvtier x{count}": _kvtier(count) for count in _thread_counts()}
    try:
        native: Any = importlib.import_module("kvtier.adapters.vllm.startup")
        version = native.version()
        makers[_VLLM] = partial(_native, native.open_and_close)
    except ImportError as error:
        version = f"not there: {error}"
    results = [row for gib in sizes_gib for row in _measure(gib, makers, rounds)]
    return [_machine(version)], results


def _measure(gib: float, makers: dict[str, Make], rounds: int) -> list[Startup]:
    slots = max(1, int(gib * GIB) // CHUNK_BYTES)
    times: dict[str, list[_Times]] = {name: [] for name in makers}
    order = random.Random(1)
    for _ in range(rounds):
        for name in order.sample(list(makers), len(makers)):
            times[name].append(makers[name](slots))
    return [_row(name, gib, its, times.get(_VLLM, [])) for name, its in times.items()]


def _row(name: str, gib: float, its: list[_Times], native: list[_Times]) -> Startup:
    pairs = list(zip(its, native, strict=False))
    everything = [time.all_s for time in its]
    return Startup(
        name,
        gib,
        median(time.returns_s for time in its),
        median(time.first_s for time in its),
        median(everything),
        max(everything) / min(everything),
        median(time.first_s / other.first_s for time, other in pairs) if pairs else 0.0,
        median(time.all_s / other.all_s for time, other in pairs) if pairs else 0.0,
    )


def _kvtier(threads: int) -> Make:
    def make(slots: int) -> _Times:
        ready = threading.Event()
        reached: list[float] = []
        left = slots

        def on_ready(piece: range) -> None:
            nonlocal left
            reached.append(time.perf_counter() - start)
            with lock:
                left -= len(piece)
                if not left:
                    ready.set()

        lock = threading.Lock()
        start = time.perf_counter()
        with Region.open(f"bench-{uuid.uuid4().hex}", slots, CHUNK_BYTES) as region:
            region.populate(on_ready, threads=threads)
            returns_s = time.perf_counter() - start
            if not ready.wait(_PATIENCE_S):
                raise ConfigError(f"{slots} slots were not ready within {_PATIENCE_S:g} s")
        return _Times(returns_s, min(reached), max(reached))

    return make


def _native(open_and_close: Callable[[int, int], float], slots: int) -> _Times:
    """Make vLLM's region, all of which is ready when the call returns."""
    seconds = open_and_close(slots, CHUNK_BYTES)
    return _Times(seconds, seconds, seconds)


def _thread_counts() -> list[int]:
    return sorted({1, 2, default_threads()})


def _require_room(gib: float) -> None:
    system = os.statvfs(SHARED_MEMORY)
    free = system.f_bavail * system.f_frsize
    if free < gib * GIB:
        raise ConfigError(
            f"{gib:g} GiB do not fit into {SHARED_MEMORY}, which has {free / GIB:.1f}: name smaller sizes"
        )


def _machine(version: str) -> Machine:
    huge = pages.grants_huge(SHARED_MEMORY / "region")
    return Machine(platform.release(), len(os.sched_getaffinity(0)), huge, version)
