"""The cost of device copies: GB/s against one pinned copy, host time, lost computing, and a busy engine.

Figures that are compared come from the same round and are measured alternately. As in an engine, a block has
a page in each layer's tensor. Blocks are scattered on the device, so that neighbouring pages cannot be
joined.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from statistics import median

import numpy as np
import numpy.typing as npt
import torch

from kvtier import KVCaches, PageRef
from kvtier._device._engine import TransferEngine
from kvtier._device.auto import open_transfer_engine
from kvtier._device.base import Blocks, Finished
from kvtier._memory.layout import SlotLayout
from kvtier._memory.region import Region
from kvtier_bench.backends import accelerator, usable

_Integers = npt.NDArray[np.int64]
_Wait = Callable[[Sequence[int]], list[Finished]]
"""Returns when these transfers have ended, with their results."""

KIB = 2**10
PAGE_BYTES = (8 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 2048 * KIB)
LAYERS, BLOCKS_PER_CHUNK = 16, 1  # A store needs whole chunks; some measurements use a single block.
SUBMISSIONS = (16, 256, 4096)
"""Pages of one; more than fit into the memory that is used are left out."""

PRODUCTS = {"prefill": 2, "decode": 20}
"""Products of a step: of two square matrices, and of one with few rows and a square one."""

STEPS = 20

BUSY_PAGE_BYTES, BUSY_STEP_S = 64 * KIB, 0.0003
"""Bytes of a page, and seconds of a step of Python, in copies by a busy thread."""

ROUNDS = 7
_SETTLE_S = 120.0


@dataclass(frozen=True)
class Machine:
    """The measured device.

    Attributes:
        device: its name, and the software's versions.
        mib: MiB of device memory that the copies use, and MiB of slots.
        pinned: percent of the slots that the device could pin.
    """

    backend: str
    device: str
    mib: int
    pinned: float


@dataclass(frozen=True)
class CopySpeed:
    """Copies through the engine, compared with one pinned copy of as many bytes.

    Attributes:
        page_kib: KiB of a page.
        way: store, load, or both at once with half of the blocks each (at least one).
        gb_s: median GB/s from submission to completion.
        limit_gb_s: GB/s of one pinned copy of the same total size in each direction.
        percent: percent of the limit; median of the rounds' ratios.
        host_us: median microseconds of the submitting call.
    """

    page_kib: int
    pages: int
    way: str
    gb_s: float
    limit_gb_s: float
    percent: float
    host_us: float


@dataclass(frozen=True)
class ComputeLoss:
    """Steps a second that are missing while copies go one way all the time; each is launched after the last.

    Attributes:
        page_kib: KiB of a page.
        work: products as in a prefill, which computing bounds, or with few rows as in a decode step, which
            the device's memory bounds.
        percent: median loss over all rounds.
    """

    page_kib: int
    way: str
    work: str
    percent: float


@dataclass(frozen=True)
class BusyEngine:
    """Copies whose submitting thread goes on running Python, as an engine's does while it waits for a load.

    Attributes:
        page_kib: KiB of a page.
        idle_ms: median duration in milliseconds while the thread sleeps.
        busy_ms: median duration in milliseconds while the thread runs short steps and releases the
            interpreter lock only between steps.
        ratio: ``busy_ms`` divided by ``idle_ms``; median of the rounds' ratios.
    """

    page_kib: int
    pages: int
    way: str
    idle_ms: float
    busy_ms: float
    ratio: float


Figure = Machine | CopySpeed | ComputeLoss | BusyEngine


def run(backend: str | None = None, mib: int | None = None) -> list[Figure]:
    """Measure a backend.

    Args:
        backend: name of the backend; default: this machine's accelerator, else the CPU.
        mib: MiB of device memory to use, and MiB of slots; default: 2048, or 64 on the CPU.

    Raises:
        ConfigError: the backend does not exist or cannot be used on this machine.
    """
    name = usable(backend or accelerator())
    device = _torch_device(name)
    is_host = device.type == "cpu"
    total = (mib or (64 if is_host else 2048)) * KIB * KIB
    with _one_thread(is_host):
        return _copies(name, device, total)


def _torch_device(name: str) -> torch.device:
    """Return the device that holds a backend's tensors. If the machine has several, it is the current one."""
    kind = "cuda" if name == "rocm" else name  # torch uses this name for AMD's GPUs, too
    return (
        torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
    )


def _description(name: str) -> str:
    """Return the name of a backend's device and the versions of its software."""
    device = _torch_device(name)
    if device.type == "cpu":
        return f"{os.cpu_count()} CPUs, torch {torch.__version__}"
    it = torch.get_device_module(device).get_device_properties(device)
    version = torch.version.hip or torch.version.cuda or torch.version.xpu
    backend = import_module(f"kvtier._device.backends.{name}")
    driver = getattr(it, "driver_version", None) or backend.open_library().version("Driver")
    return f"{it.name}, driver {driver}, runtime {version}, torch {torch.__version__}"


@contextmanager
def _one_thread(wanted: bool) -> Iterator[None]:
    """Limit torch to one thread for copies and computation, as a copy queue uses one."""
    before = torch.get_num_threads()
    if wanted:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _copies(name: str, device: torch.device, total: int) -> list[Figure]:
    speeds: list[CopySpeed] = []
    losses: list[ComputeLoss] = []
    busy_engine: list[BusyEngine] = []
    pinned: list[float] = []
    for page_bytes in PAGE_BYTES:
        with _opened(device, page_bytes, total) as bench:
            pinned.append(bench.pinned_percent)
            counts = [count for count in SUBMISSIONS if count <= bench.blocks * LAYERS]
            ways = ("store", "load", "both")
            speeds += [bench.speed(count // LAYERS, way) for count in counts for way in ways]
            losses += [bench.compute_loss(way, work) for way in ways[:2] for work in PRODUCTS]
            if page_bytes == BUSY_PAGE_BYTES:
                busy_engine += [
                    bench.busy_engine(min(SUBMISSIONS[-1] // LAYERS, bench.blocks), way) for way in ways[:2]
                ]
    machine = Machine(name, _description(name), total // KIB // KIB, min(pinned))
    return [machine, *speeds, *losses, *busy_engine]


# --- copies --------------------------------------------------------------------------------------


class _Bench:
    """Blocks on the device, an equal number of slots, and the transfer engine. All pages have one length.

    Args:
        memory: the blocks' pages, of shape (layers, blocks, bytes).

    Attributes:
        blocks: number of blocks.
        pinned_percent: percent of the slots that are pinned.
    """

    def __init__(self, engine: TransferEngine, memory: torch.Tensor, region: Region) -> None:
        self._engine = engine
        self._memory = memory
        self._region = region
        self._device = memory.device
        _, self.blocks, self._page_bytes = memory.shape
        random = np.random.default_rng(1)
        self._order = random.permutation(self.blocks)
        self._slots = random.permutation(region.slots)
        self._last = 0
        self._host = torch.ones(memory.numel(), dtype=torch.int8, pin_memory=self._device.type != "cpu")
        self._streams = [] if self._device.type == "cpu" else [torch.Stream(self._device) for _ in range(2)]
        self.pinned_percent = self._await_pinning()

    def speed(self, count: int, way: str) -> CopySpeed:
        """Measure submissions of ``count`` blocks."""
        host: list[float] = []
        ours, limits = _in_turns(
            lambda: self._through_engine(count, way, host, self._sleep),
            lambda: self._timed_on_device(lambda: self._in_one_piece(count, way)),
        )
        nbytes = sum(self._nbytes(blocks) for _, blocks, _ in self._shares(count, way))
        ratios = [limit / own for own, limit in zip(ours, limits, strict=True)]
        gb_s, limit_gb_s = (nbytes / median(times) / 1e9 for times in (ours, limits))
        return CopySpeed(
            self._page_bytes // KIB,
            count * LAYERS,
            way,
            gb_s,
            limit_gb_s,
            100 * median(ratios),
            median(host[1:]) * 1e6,
        )

    def busy_engine(self, count: int, way: str) -> BusyEngine:
        """Measure submissions of ``count`` blocks. The submitting thread then sleeps, or runs Python code."""
        idle, busy = _in_turns(
            lambda: self._through_engine(count, way, [], self._sleep),
            lambda: self._through_engine(count, way, [], self._run_python),
        )
        ratio = median(with_steps / alone for alone, with_steps in zip(idle, busy, strict=True))
        idle_ms, busy_ms = (median(times) * 1000 for times in (idle, busy))
        return BusyEngine(self._page_bytes // KIB, count * LAYERS, way, idle_ms, busy_ms, ratio)

    def compute_loss(self, way: str, work: str) -> ComputeLoss:
        """Alternately measure matrix products with and without concurrent copies."""
        is_host = self._device.type == "cpu"
        width, kind = (512, torch.float32) if is_host else (8192, torch.bfloat16)
        square = torch.rand((width, width), device=self._device, dtype=kind)
        matrix = square[: width if work == "prefill" else 64]
        product = torch.empty_like(matrix)

        def multiply() -> None:
            for _ in range(PRODUCTS[work]):
                torch.mm(matrix, square, out=product)

        step = self._launcher(multiply)
        losses = []
        for _ in range(ROUNDS + 1):
            alone = self._steps(step)
            with self._copying(way):
                beside = self._steps(step)
            losses.append(100 * (1 - alone / beside))
        return ComputeLoss(self._page_bytes // KIB, way, work, median(losses[1:]))

    def _launcher(self, work: Callable[[], object]) -> Callable[[], object]:
        """Return a function that does this work, as one graph if the device supports graphs.

        Engines do the same.
        """
        work()
        if self._device.type != "cuda":
            return work
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def _steps(self, step: Callable[[], object]) -> float:
        """Return the duration of some steps in seconds. Each is launched after the previous one has ended."""
        begun = time.perf_counter()
        for _ in range(STEPS):
            step()
            if self._streams:
                torch.accelerator.current_stream().record_event().synchronize()
        return time.perf_counter() - begun

    def _through_engine(self, count: int, way: str, host: list[float], wait: _Wait) -> float:
        """Return the duration of the copies in seconds; append the duration of the submission to ``host``."""
        self._synchronize()
        start = time.perf_counter()
        ids = self._submit(count, way)
        submitted = time.perf_counter()
        results = wait(ids)
        ended = time.perf_counter()
        if any(end.error for end in results):
            raise RuntimeError("a copy has failed: see the log")
        host.append((submitted - start) / len(ids))
        return ended - start

    def _sleep(self, ids: Sequence[int]) -> list[Finished]:
        self._engine.wait(ids)
        return self._engine.finished()

    def _run_python(self, ids: Sequence[int]) -> list[Finished]:
        results: list[Finished] = []
        while len(results) < len(ids):
            until = time.perf_counter() + BUSY_STEP_S
            while time.perf_counter() < until:
                pass
            time.sleep(0)  # Releases the interpreter lock and requests it again at once.
            results += self._engine.finished()
        return results

    def _submit(self, count: int, way: str) -> list[int]:
        ids = []
        for is_store, numbers, slots in self._shares(count, way):
            self._last += 1
            ids.append(self._last)
            blocks = Blocks.make(numbers, (len(numbers),), (0,))
            if is_store:
                self._engine.submit_store(self._last, blocks, slots.tolist())
            else:
                self._engine.submit_load(self._last, slots.tolist(), blocks)
        return ids

    def _shares(self, count: int, way: str) -> Iterator[tuple[bool, _Integers, _Integers]]:
        """Yield, for each direction, whether it is a store, its blocks and its slots.

        Directions share neither.
        """
        ways = ("store", "load") if way == "both" else (way,)
        share = max(1, count // len(ways))
        slots = -(-share // BLOCKS_PER_CHUNK)
        for number, one in enumerate(ways):
            first, last = number * share, (number + 1) * share
            yield one == "store", self._order[first:last], self._slots[number * slots : (number + 1) * slots]

    def _nbytes(self, blocks: _Integers) -> int:
        return len(blocks) * LAYERS * self._page_bytes

    def _in_one_piece(self, count: int, way: str) -> None:
        flat, start = self._memory.view(-1), 0
        for number, (is_store, blocks, _) in enumerate(self._shares(count, way)):
            end = start + self._nbytes(blocks)
            there, here = self._host[start:end], flat[start:end]
            target, source = (there, here) if is_store else (here, there)
            with self._streams[number] if self._streams else nullcontext():
                target.copy_(source, non_blocking=bool(self._streams))
            start = end

    @contextmanager
    def _copying(self, way: str) -> Iterator[None]:
        """Copy all blocks in one direction, repeatedly, in another thread."""
        stopping = threading.Event()

        def copy() -> None:
            while not stopping.is_set():
                self._engine.wait(self._submit(self.blocks, way))

        thread = threading.Thread(target=copy)
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join()
            self._engine.drain()
            self._engine.finished()

    def _timed_on_device(self, work: Callable[[], object]) -> float:
        """Return the seconds from a call until the device has finished the work that the call enqueued."""
        self._synchronize()
        begun = time.perf_counter()
        work()
        self._synchronize()
        return time.perf_counter() - begun

    def _synchronize(self) -> None:
        if self._streams:
            torch.accelerator.synchronize(self._device)

    def _await_pinning(self) -> float:
        if not self._streams:
            return 0.0
        until = time.monotonic() + _SETTLE_S
        while time.monotonic() < until:
            pinning = self._engine.pinning
            if pinning.failed or pinning.nbytes == self._region.nbytes:
                break
            time.sleep(0.01)
        return 100 * self._engine.pinning.nbytes / self._region.nbytes


def _in_turns(*measures: Callable[[], float]) -> list[list[float]]:
    """Return the results of two measurements for each round except the first."""
    found: list[list[float]] = [[] for _ in measures]
    for number in range(ROUNDS + 1):
        for turn in range(2):  # Each runs first in every second round, when the caches are cold.
            at = (number + turn) % 2
            found[at].append(measures[at]())
    return [values[1:] for values in found]


@contextmanager
def _opened(device: torch.device, page_bytes: int, total: int) -> Iterator[_Bench]:
    blocks = max(2, total // page_bytes // LAYERS)
    memory = torch.ones((LAYERS, blocks, page_bytes), dtype=torch.int8, device=device)
    caches = KVCaches(memory.unbind(), (tuple(PageRef(layer, page_bytes) for layer in range(LAYERS)),))
    layout = SlotLayout.make(caches.page_bytes, BLOCKS_PER_CHUNK)
    slots = 2 * -(-blocks // 2 // BLOCKS_PER_CHUNK)  # each half needs enough blocks
    with Region.anonymous(max(2, slots), layout.chunk_bytes) as region:
        engine = open_transfer_engine(caches, layout, region)
        try:
            yield _Bench(engine, memory, region)
        finally:
            engine.close()
