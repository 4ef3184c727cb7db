"""What device copies cost: GB/s against one pinned copy, host time a submission, and the loss of computing.

Whatever is compared is measured in the same round, in turns. Pages are scattered, on the device and in the
slots, so that none are neighbours: what a plan saves by joining them comes on top.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from kvtier import KVCaches, PageRef
from kvtier._device.auto import description, open_transfer_engine, torch_device, usable
from kvtier._device.base import Blocks, TransferEngine
from kvtier._memory.layout import SlotLayout
from kvtier._memory.region import Region

KIB = 2**10
PAGE_BYTES = (16 * KIB, 64 * KIB, 256 * KIB, 2048 * KIB, 8192 * KIB)
SUBMISSIONS = (1, 16, 256, 4096)
"""Pages of one; more than fit into the memory that is used are left out."""

ROUNDS = 7
_SETTLE_S = 120.0


@dataclass(frozen=True)
class Machine:
    """What was measured.

    Attributes:
        backend: kvtier's backend.
        device: its name, and the software's versions.
        mib: MiB of device memory, and as many of slots, that the copies go between.
        pinned: share of the slots that the device could pin, in percent.
    """

    backend: str
    device: str
    mib: int
    pinned: float


@dataclass(frozen=True)
class CopySpeed:
    """Copies through the engine, beside one pinned copy of as many bytes.

    Attributes:
        page_kib: KiB of a page.
        pages: pages of a submission.
        way: store, load, or both at once, half of the pages each (of one page, one each).
        gb_s: from the submission to the end, median.
        limit_gb_s: one pinned copy in each way, of as many bytes in all.
        percent: of the limit; median of the rounds' ratios.
        host_us: microseconds that the submitting call takes, median.
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
    """Matrix products a second that are missing while copies go both ways all the time.

    Attributes:
        page_kib: KiB of a page.
        percent: median of the rounds' losses.
    """

    page_kib: int
    percent: float


Figure = Machine | CopySpeed | ComputeLoss


def run(backend: str | None = None, mib: int | None = None) -> list[Figure]:
    """Measure a backend.

    Args:
        backend: its name; default: that of this machine's accelerator, else the CPU's.
        mib: MiB of device memory to use, and as many of slots; default: 2048, on the CPU 64.

    Raises:
        ConfigError: there is no such backend, or it cannot be used here.
    """
    name = usable(backend)
    device = torch_device(name)
    is_host = device.type == "cpu"
    total = (mib or (64 if is_host else 2048)) * KIB * KIB
    with _one_thread(is_host):
        return _copies(name, device, total)


@contextmanager
def _one_thread(wanted: bool) -> Iterator[None]:
    """Have torch copy and compute with one thread, as a queue of copies does."""
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
    pinned: list[float] = []
    for page_bytes in PAGE_BYTES:
        with _opened(name, device, page_bytes, total) as bench:
            pinned.append(bench.pinned_percent)
            counts = [count for count in SUBMISSIONS if count <= bench.pages]
            speeds += [bench.speed(count, way) for count in counts for way in ("store", "load", "both")]
            losses.append(bench.compute_loss())
    machine = Machine(name, description(name), total // KIB // KIB, min(pinned))
    return [machine, *speeds, *losses]


# --- copies --------------------------------------------------------------------------------------


class _Bench:
    """Pages of one length on the device and in slots, and what moves them.

    Attributes:
        pages: how many there are on either side.
        pinned_percent: share of the slots that is pinned.
    """

    def __init__(self, engine: TransferEngine, memory: torch.Tensor, region: Region) -> None:
        self._engine = engine
        self._memory = memory
        self._region = region
        self._device = memory.device
        self.pages, self._page_bytes = memory.shape
        self._orders = [np.random.default_rng(seed).permutation(self.pages) for seed in (1, 2)]
        self._last = 0
        self._host = torch.ones(memory.numel(), dtype=torch.int8, pin_memory=self._device.type != "cpu")
        self._streams = [] if self._device.type == "cpu" else [torch.Stream(self._device) for _ in range(2)]
        self.pinned_percent = self._await_pinning()

    def speed(self, count: int, way: str) -> CopySpeed:
        """Measure submissions of so many pages."""
        host: list[float] = []
        measures: list[tuple[list[float], Callable[[], float]]] = [
            ([], lambda: self._through_engine(count, way, host)),
            ([], lambda: self._timed_on_device(lambda: self._in_one_piece(count, way))),
        ]
        for number in range(ROUNDS + 1):
            for turn in range(2):  # each is the first in every second round: it finds the caches cold
                times, measure = measures[(number + turn) % 2]
                times.append(measure())
        ours, limits = (times[1:] for times, _ in measures)
        nbytes = sum(len(blocks) for _, (blocks, _) in self._shares(count, way)) * self._page_bytes
        ratios = [limit / own for own, limit in zip(ours, limits, strict=True)]
        gb_s, limit_gb_s = (nbytes / median(times) / 1e9 for times in (ours, limits))
        return CopySpeed(
            self._page_bytes // KIB,
            count,
            way,
            gb_s,
            limit_gb_s,
            100 * median(ratios),
            median(host[1:]) * 1e6,
        )

    def compute_loss(self) -> ComputeLoss:
        """Measure matrix products alone and beside copies, in turns."""
        size = 512 if self._device.type == "cpu" else 8192
        matrix = torch.rand((size, size), device=self._device)
        product = torch.empty_like(matrix)

        def compute() -> None:
            for _ in range(20):
                torch.mm(matrix, matrix, out=product)

        losses = []
        for _ in range(ROUNDS + 1):
            alone = self._timed_on_device(compute)
            with self._copying():
                beside = self._timed_on_device(compute, only_current=True)
            losses.append(100 * (1 - alone / beside))
        return ComputeLoss(self._page_bytes // KIB, median(losses[1:]))

    def _through_engine(self, count: int, way: str, host: list[float]) -> float:
        self._synchronize()
        start = time.perf_counter()
        ids = self._submit(count, way)
        submitted = time.perf_counter()
        self._engine.wait(ids)
        ended = time.perf_counter()
        if any(end.error for end in self._engine.finished()):
            raise RuntimeError("a copy has failed: see the log")
        host.append((submitted - start) / len(ids))
        return ended - start

    def _submit(self, count: int, way: str) -> list[int]:
        ids = []
        for is_store, (ids_of_blocks, slots) in self._shares(count, way):
            self._last += 1
            ids.append(self._last)
            blocks = Blocks.make(ids_of_blocks, (len(ids_of_blocks),), (0,))
            if is_store:
                self._engine.submit_store(self._last, blocks, slots.tolist())
            else:
                self._engine.submit_load(self._last, slots.tolist(), blocks)
        return ids

    def _shares(
        self, count: int, way: str
    ) -> Iterator[tuple[bool, tuple[np.ndarray[tuple[int], np.dtype[np.int64]], ...]]]:
        """Yield for each way whether it is a store, its blocks and its slots; the two ways share none."""
        if way != "both":
            yield way == "store", tuple(order[:count] for order in self._orders)
        else:
            half = max(1, count // 2)
            yield True, tuple(order[:half] for order in self._orders)
            yield False, tuple(order[half : 2 * half] for order in self._orders)

    def _in_one_piece(self, count: int, way: str) -> None:
        flat, start = self._memory.view(-1), 0
        for number, (is_store, (blocks, _)) in enumerate(self._shares(count, way)):
            end = start + len(blocks) * self._page_bytes
            there, here = self._host[start:end], flat[start:end]
            target, source = (there, here) if is_store else (here, there)
            with self._streams[number] if self._streams else nullcontext():
                target.copy_(source, non_blocking=bool(self._streams))
            start = end

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """Have copies go both ways, all pages again and again, from a thread beside."""
        stopping = threading.Event()

        def copy() -> None:
            while not stopping.is_set():
                self._engine.wait(self._submit(self.pages, "both"))

        thread = threading.Thread(target=copy)
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join()
            self._engine.drain()
            self._engine.finished()

    def _timed_on_device(self, work: Callable[[], object], *, only_current: bool = False) -> float:
        """Time work until its end; ``only_current``: as it ends on the current stream, whatever others do."""
        if only_current and self._streams:
            start, end = (torch.Event(self._device, enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1000
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


@contextmanager
def _opened(name: str, device: torch.device, page_bytes: int, total: int) -> Iterator[_Bench]:
    count = max(2, total // page_bytes)
    memory = torch.ones((count, page_bytes), dtype=torch.int8, device=device)
    caches = KVCaches((memory,), ((PageRef(0, page_bytes),),))
    layout = SlotLayout.make(caches.page_bytes, 1)
    with Region.anonymous(count, layout.chunk_bytes) as region:
        engine = open_transfer_engine(caches, layout, region, name)
        try:
            yield _Bench(engine, memory, region)
        finally:
            engine.close()
