"""What the CPU backend costs: time to plan a transfer, and its copies beside one plain copy."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from kvtier.device.base import Blocks, KVCaches, PageRef
from kvtier.device.cpu import CpuTransferEngine
from kvtier.device.plan import CopyPlanner
from kvtier.memory.layout import SlotLayout
from kvtier.memory.region import Region

TENSORS = 32
BLOCKS_PER_CHUNK = 4
PAGE_COUNTS = tuple(64 * 2**step for step in range(8))  # 64 to 8,192
ROUNDS = 7


@dataclass(frozen=True)
class PlanCost:
    """The time to plan one transfer.

    Attributes:
        pages: pages of the transfer; a page is one block in one tensor.
        copies: copies that the plan has after joining neighbours.
        us_per_page: microseconds a page, median.
    """

    pages: int
    copies: int
    us_per_page: float


@dataclass(frozen=True)
class CopySpeed:
    """The speed of one transfer, and of numpy copying as many bytes in one piece in the same run.

    Attributes:
        page_bytes: bytes of a page.
        nbytes: bytes of the transfer.
        engine_gb_s: through the engine, from submission to the end, median.
        plain_gb_s: ``numpy.copyto`` of one array, median.
    """

    page_bytes: int
    nbytes: int
    engine_gb_s: float
    plain_gb_s: float


def run() -> tuple[list[PlanCost], list[CopySpeed]]:
    """Measure plans of 64 to 8,192 pages with scattered and with neighbouring blocks, and copies.

    Returns:
        The plans' costs, scattered ones first, and the copies' speeds.
    """
    costs = [_plan_cost(pages, scattered) for scattered in (True, False) for pages in PAGE_COUNTS]
    speeds = [_copy_speed(page_bytes) for page_bytes in (4096, 32768, 131072)]
    return costs, speeds


def report() -> str:
    """Run and return the figures as text."""
    costs, speeds = run()
    lines = ["plan: pages, copies, us/page"]
    lines += [f"{cost.pages:6} {cost.copies:6} {cost.us_per_page:8.3f}" for cost in costs]
    lines += ["copy: page bytes, MiB, engine GB/s, plain GB/s"]
    lines += [
        f"{speed.page_bytes:6} {speed.nbytes / 2**20:6.0f} {speed.engine_gb_s:8.2f} {speed.plain_gb_s:8.2f}"
        for speed in speeds
    ]
    return "\n".join(lines)


def _caches(tensors: int, num_blocks: int, page_bytes: int) -> KVCaches:
    made = tuple(torch.ones((num_blocks, page_bytes), dtype=torch.int8) for _ in range(tensors))
    return KVCaches(made, (tuple(PageRef(index, page_bytes) for index in range(tensors)),))


def _scattered(count: int, num_blocks: int) -> Blocks:
    return Blocks.make(np.random.default_rng(1).permutation(num_blocks)[:count], (count,), (0,))


def _plan_cost(pages: int, scattered: bool) -> PlanCost:
    caches = _caches(TENSORS, 512, 64)
    layout = SlotLayout.make(caches.page_bytes, BLOCKS_PER_CHUNK)
    planner = CopyPlanner(caches, layout, 0, 512)
    count = pages // TENSORS
    blocks = _scattered(count, 512) if scattered else Blocks.make(range(count), (count,), (0,))
    slots = list(range(-(-count // BLOCKS_PER_CHUNK)))
    seconds = _median(lambda: planner.store(blocks, slots), rounds=max(50, 20_000 // pages))
    return PlanCost(pages, len(planner.store(blocks, slots).sizes), seconds / pages * 1e6)


def _copy_speed(page_bytes: int, nbytes: int = 64 * 2**20) -> CopySpeed:
    count = nbytes // page_bytes // TENSORS
    caches = _caches(TENSORS, count, page_bytes)
    layout = SlotLayout.make(caches.page_bytes, BLOCKS_PER_CHUNK)
    blocks, slots = _scattered(count, count), list(range(count // BLOCKS_PER_CHUNK))
    source = np.ones(nbytes, dtype=np.int8)
    target = np.zeros_like(source)
    with Region.anonymous(len(slots), layout.chunk_bytes) as region:
        engine = CpuTransferEngine(caches, layout, region)

        def transfer() -> None:
            engine.submit_store(1, blocks, slots)
            engine.wait((1,))

        times = [(_timed(transfer), _timed(lambda: np.copyto(target, source))) for _ in range(ROUNDS + 1)]
        engine.close()
    ours, plain = zip(*times[1:], strict=True)  # the first round touches the pages
    return CopySpeed(page_bytes, nbytes, nbytes / median(ours) / 1e9, nbytes / median(plain) / 1e9)


def _median(action: Callable[[], object], rounds: int) -> float:
    return median(_timed(action) for _ in range(rounds))


def _timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


if __name__ == "__main__":
    print(report())
