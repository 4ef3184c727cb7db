"""The backends for GPUs on a real one from NVIDIA, AMD or Intel, whichever torch finds."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from kvtier._device._engine import TransferEngine
from kvtier._device.auto import open_transfer_engine
from kvtier._device.backends import cuda, rocm
from kvtier._device.backends._cuda_runtime import (
    CopyMethod,
    PageKernel,
    RuntimeLibrary,
    TorchRuntime,
    TorchStream,
)
from kvtier._device.backends.xpu import XpuRuntime, XpuStream
from kvtier._device.base import Blocks
from kvtier._device.plan import CopyPlan
from kvtier.errors import TransferError
from kvtier_testing.device import DeviceConformance, EngineFactory, Gate, GatedFactory, Rig, Shape, rig
from tests.common import wait_until
from tests.unit.device.conftest import engine_on, gate_copies

FOUND = torch.accelerator.current_accelerator(check_available=True)
DEVICE = FOUND.type if FOUND is not None else "none"
SLOTS = Shape().slots
FAKE = "KVTIER_FAKE_ORDER" in os.environ  # tests/fakegpu: its kernels compute on the CPU
pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(DEVICE not in ("cuda", "xpu"), reason="torch finds no GPU"),
]
of_torch_cuda = pytest.mark.skipif(DEVICE != "cuda", reason="torch finds no NVIDIA or AMD GPU")
of_torch_xpu = pytest.mark.skipif(DEVICE != "xpu", reason="torch finds no Intel GPU")


class Watched(TorchRuntime):
    """The real runtime, which reports pinned memory, and waits or fails on request.

    Attributes:
        before_pinning: called in the pinning thread before each piece, with the number of those before.
    """

    def __init__(self, *, batched: bool = False, kernel: PageKernel | None = None) -> None:
        torch.cuda.init()
        device = torch.device("cuda", torch.cuda.current_device())
        method: CopyMethod | None = None
        if torch.version.hip is None:
            library: RuntimeLibrary = (cudart := cuda.open_library())
            method = cudart.copy_batch
        else:
            library = rocm.open_library()
        super().__init__(device, library, method if batched else None, kernel)
        self.before_pinning: Callable[[int], object] = lambda count: None
        self._count = 0

    def host_register(self, address: int, nbytes: int) -> None:
        self.before_pinning(self._count)
        super().host_register(address, nbytes)
        self._count += 1


class KernelWhereItCan:
    """The kernel for pages of any size and number, if they are aligned."""

    def suits(self, plan: CopyPlan) -> bool:
        return not int(np.bitwise_or.reduce(plan.src | plan.dst | plan.sizes)) % 16

    def copy(self, plan: CopyPlan, stream: Any, around: object) -> None:
        _page_kernel().copy(plan, stream)


def _page_kernel() -> Any:
    return pytest.importorskip("kvtier._device.backends._page_kernel", exc_type=ImportError)


def no_memory(count: int) -> None:
    raise TransferError("out of memory")


gpu_rig = partial(rig, device=DEVICE)


class OnGpu(DeviceConformance):
    device = DEVICE

    @pytest.fixture
    def gated_factory(self, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> GatedFactory:
        gate_copies(TorchStream, gate, monkeypatch)
        return lambda deadline_s: engine_on(Watched(), deadline_s=deadline_s)


@of_torch_cuda
class TestPinned(OnGpu):
    """Each way to copy."""

    @pytest.fixture(params=["each", "batch", "kernel"])
    def runtime(self, request: pytest.FixtureRequest) -> Watched:
        if request.param == "batch" and torch.version.hip is not None:
            pytest.skip("HIP has no call for many copies")
        if request.param == "kernel":
            return Watched(kernel=KernelWhereItCan())
        return Watched(batched=request.param == "batch")

    @pytest.fixture(params=[1, 5])
    def engine_factory(self, request: pytest.FixtureRequest, runtime: Watched) -> EngineFactory:
        return engine_on(runtime, request.param, pinned=True)


@of_torch_cuda
class TestPageable(OnGpu):
    @pytest.fixture
    def engine_factory(self) -> EngineFactory:
        runtime = Watched()
        runtime.before_pinning = no_memory
        return engine_on(runtime)


@of_torch_cuda
class TestByDeviceType(OnGpu):
    """A region as an engine opens it: its slots are pinned during use."""

    @pytest.fixture
    def engine_factory(self) -> EngineFactory:
        return open_transfer_engine


@of_torch_xpu
class TestIntel(DeviceConformance):
    device = DEVICE

    @pytest.fixture
    def engine_factory(self) -> EngineFactory:
        return open_transfer_engine

    @pytest.fixture
    def gated_factory(self, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> GatedFactory:
        gate_copies(XpuStream, gate, monkeypatch)
        return lambda deadline_s: (
            lambda caches, layout, region: TransferEngine(
                caches, layout, region, XpuRuntime(caches.tensors), deadline_s=deadline_s
            )
        )


def is_pinned(it: Rig, slot: int) -> bool:
    return bool(torch.frombuffer(it.region.view(slot), dtype=torch.uint8).is_pinned())


@of_torch_cuda
def test_slots_pinned_until_close() -> None:
    with gpu_rig(engine_on(Watched(), 5, pinned=True)) as it:
        assert all(is_pinned(it, slot) for slot in range(SLOTS))
        it.engine.close()
        assert not any(is_pinned(it, slot) for slot in range(SLOTS))


@of_torch_cuda
def test_pinned_and_pageable_mix() -> None:
    def fail_later(count: int) -> None:
        if count == 2:
            no_memory(count)

    runtime = Watched()
    runtime.before_pinning = fail_later
    with gpu_rig(engine_on(runtime, 5), Shape((4096,))) as it:
        wait_until(lambda: it.engine.pinning.failed)
        it.store(1, Blocks.make(range(SLOTS), (SLOTS,), (0,)), range(SLOTS))
        it.check()
        assert [is_pinned(it, slot) for slot in (0, 9, 10, 23)] == [True, True, False, False]


@of_torch_cuda
@pytest.mark.parametrize("page_bytes", [16, 4096, 8192 + 48, 32768])
def test_small_pages_use_kernel(page_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = _page_kernel()
    copy, loads = kernel.copy, list[CopyPlan]()

    def noted(plan: CopyPlan, stream: Any, around: object) -> None:
        loads.append(plan)
        copy(plan, stream)

    monkeypatch.setattr(kernel, "copy", noted)
    with gpu_rig(engine_on(Watched(kernel=kernel), pinned=True), Shape((page_bytes,))) as it:
        blocks = Blocks.make(range(SLOTS), (SLOTS,), (0,))
        it.store(1, blocks, range(SLOTS))
        it.engine.drain()
        assert not loads
        it.load(2, range(SLOTS)[::-1], blocks)
        it.check()
        assert len(loads) == 1


@pytest.fixture
def busy() -> Iterator[Callable[[], None]]:
    """Keep the current, non-default stream busy for at least a tenth of a second."""
    size = 64 if FAKE else 8192
    matrix = torch.rand((size, size), device="cuda")
    product = torch.empty_like(matrix)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.mm(matrix, matrix, out=product)
        torch.cuda.synchronize()

        def work() -> None:
            for _ in range(30):
                torch.mm(matrix, matrix, out=product)

        yield work
        torch.cuda.synchronize()


@of_torch_cuda
@pytest.mark.parametrize("pinned", [True, False])
def test_store_follows_compute(busy: Callable[[], None], pinned: bool) -> None:
    runtime = Watched()
    if not pinned:
        runtime.before_pinning = no_memory
    with gpu_rig(engine_on(runtime, pinned=pinned)) as it:
        busy()
        it.caches.tensors[0][5].fill_(17)
        computed = torch.cuda.current_stream().record_event()
        it.model.rows[0][5][:512] = bytes([17]) * 512
        it.store(1, Blocks.make([5], (1,), (0,)), [3])
        assert FAKE or not computed.query()  # the submission did not wait
        it.check()
        assert computed.query()


@of_torch_cuda
@pytest.mark.parametrize("expedited", [False, True])
def test_load_follows_writes(busy: Callable[[], None], expedited: bool) -> None:
    with gpu_rig(engine_on(Watched(), pinned=True)) as it:
        busy()
        it.caches.tensors[0][5].zero_()
        zeroed = torch.cuda.current_stream().record_event()
        it.load(1, [3], Blocks.make([5], (1,), (0,)), expedited=expedited)
        assert FAKE or not zeroed.query()
        it.check()


@of_torch_cuda
def test_copies_and_pinning_spare_graph_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = threading.Event()
    start = TorchStream.start_transfer
    monkeypatch.setattr(TorchStream, "start_transfer", lambda *them: captures.wait(60) and start(*them))
    runtime = Watched()
    runtime.before_pinning = lambda count: captures.wait(60)
    numbers = torch.zeros(8, device="cuda")
    with gpu_rig(engine_on(runtime, 8)) as it:
        it.store(1, Blocks.make([5], (1,), (0,)), [3])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # in the mode that forbids other threads the most calls
            numbers += 1
            captures.set()
            it.engine.wait([1])
            wait_until(lambda: it.engine.pinning.failed or it.engine.pinning.nbytes == it.region.nbytes)
        graph.replay()
        assert numbers.tolist() == [1] * 8
        assert all(is_pinned(it, slot) for slot in range(SLOTS))
        it.check()
