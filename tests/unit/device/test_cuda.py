"""The CUDA backend on a real GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from kvtier.device.auto import open_transfer_engine
from kvtier.device.base import Blocks
from kvtier.device.cuda import CudaTransferEngine
from kvtier.device.cuda_runtime import Cudart, TorchRuntime, find_cudart
from kvtier.errors import TransferError
from kvtier.testing.device import DeviceConformance, EngineFactory, Rig, Shape, rig

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.version.hip is not None, reason="torch finds no NVIDIA GPU"
    ),
]
SLOTS = Shape().slots


class Watched(TorchRuntime):
    """The real runtime, which tells when memory is pinned and can be made to wait or to fail.

    Attributes:
        before_pinning: called in the pinning thread before each piece, with the number of those before.
    """

    def __init__(self) -> None:
        torch.cuda.init()
        super().__init__(torch.device("cuda", torch.cuda.current_device()), Cudart(find_cudart()))
        self.before_pinning: Callable[[int], object] = lambda count: None
        self._count = 0
        self._pinned = threading.Condition()

    def host_register(self, address: int, nbytes: int) -> None:
        self.before_pinning(self._count)
        super().host_register(address, nbytes)
        with self._pinned:
            self._count += 1
            self._pinned.notify_all()

    def wait_until_pinned(self, count: int) -> None:
        with self._pinned:
            assert self._pinned.wait_for(lambda: self._count >= count, 60)


def engine_on(runtime: Watched, piece_slots: int = SLOTS, pinned: bool = True) -> EngineFactory:
    """Make engines that pin so many slots at once; ``pinned``: and have pinned all of them."""

    def factory(caches, layout, region):
        engine = CudaTransferEngine(caches, layout, region, runtime, piece_slots * layout.chunk_bytes)
        if pinned:
            runtime.wait_until_pinned(-(-region.slots // piece_slots))
        return engine

    return factory


def no_memory(count: int) -> None:
    raise TransferError("out of memory")


cuda_rig = partial(rig, device="cuda")


class TestPinned(DeviceConformance):
    device = "cuda"

    @pytest.fixture(params=[1, 5])
    def engine_factory(self, request: pytest.FixtureRequest) -> EngineFactory:
        return engine_on(Watched(), request.param)


class TestPageable(DeviceConformance):
    device = "cuda"

    @pytest.fixture
    def engine_factory(self) -> EngineFactory:
        runtime = Watched()
        runtime.before_pinning = no_memory
        return engine_on(runtime, pinned=False)


class TestByDeviceType(DeviceConformance):
    """As an engine opens it; the slots are pinned while they are used."""

    device = "cuda"

    @pytest.fixture
    def engine_factory(self) -> EngineFactory:
        return open_transfer_engine


def is_pinned(it: Rig, slot: int) -> bool:
    return bool(torch.frombuffer(it.region.view(slot), dtype=torch.uint8).is_pinned())


def test_slots_are_pinned_until_the_engine_closes() -> None:
    with cuda_rig(engine_on(Watched(), 5)) as it:
        assert all(is_pinned(it, slot) for slot in range(SLOTS))
        it.engine.close()
        assert not any(is_pinned(it, slot) for slot in range(SLOTS))


def test_a_pinned_part_and_a_pageable_one_work_side_by_side() -> None:
    def fail_later(count: int) -> None:
        if count == 2:
            no_memory(count)

    runtime = Watched()
    runtime.before_pinning = fail_later
    with cuda_rig(engine_on(runtime, 5, pinned=False), Shape((4096,))) as it:
        runtime.wait_until_pinned(2)
        it.store(1, Blocks.make(range(SLOTS), (SLOTS,), (0,)), range(SLOTS))
        it.check()
        assert [is_pinned(it, slot) for slot in (0, 9, 10, 23)] == [True, True, False, False]


@pytest.fixture
def busy() -> Iterator[Callable[[], None]]:
    """Give the current stream, which is not the default one, a tenth of a second and more to do."""
    matrix = torch.rand((8192, 8192), device="cuda")
    product = torch.empty_like(matrix)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.mm(matrix, matrix, out=product)
        torch.cuda.synchronize()

        def work() -> None:
            for _ in range(30):
                torch.mm(matrix, matrix, out=product)

        yield work
        torch.cuda.synchronize()


@pytest.mark.parametrize("pinned", [True, False])
def test_a_store_copies_what_was_to_be_computed_before(busy: Callable[[], None], pinned: bool) -> None:
    runtime = Watched()
    if not pinned:
        runtime.before_pinning = no_memory
    with cuda_rig(engine_on(runtime, pinned=pinned)) as it:
        busy()
        it.caches.tensors[0][5].fill_(17)
        computed = torch.cuda.current_stream().record_event()
        it.model.rows[0][5][:512] = bytes([17]) * 512
        it.store(1, Blocks.make([5], (1,), (0,)), [3])
        assert not computed.query()  # the submission did not wait
        it.check()
        assert computed.query()


@pytest.mark.parametrize("expedited", [False, True])
def test_a_load_comes_after_what_was_to_be_written_before(busy: Callable[[], None], expedited: bool) -> None:
    with cuda_rig(engine_on(Watched())) as it:
        busy()
        it.caches.tensors[0][5].zero_()
        zeroed = torch.cuda.current_stream().record_event()
        it.load(1, [3], Blocks.make([5], (1,), (0,)), expedited=expedited)
        assert not zeroed.query()
        it.check()


def test_pinning_does_not_spoil_the_capture_of_a_graph() -> None:
    gate = threading.Event()
    runtime = Watched()
    runtime.before_pinning = lambda count: gate.wait(60)
    numbers = torch.zeros(8, device="cuda")
    with cuda_rig(engine_on(runtime, 8, pinned=False)) as it:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # in the mode that forbids most to all other threads
            numbers += 1
            gate.set()
            runtime.wait_until_pinned(3)
        graph.replay()
        assert numbers.tolist() == [1] * 8
        assert all(is_pinned(it, slot) for slot in range(SLOTS))
