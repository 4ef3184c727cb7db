"""The CUDA backend in every order of work that CUDA allows, and ordering faults that the tests must
detect."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvtier._device import _queues
from kvtier._device.backends import cuda
from kvtier._device.backends._cuda_runtime import RuntimeLibrary, TorchRuntime, TorchStream
from kvtier._device.base import Blocks, CopyQueue
from kvtier._device.plan import CopyPlan
from kvtier_testing.device import Rig, Shape, rig
from tests.unit.device.conftest import engine_on

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif("KVTIER_FAKE_ORDER" not in os.environ, reason="not on the fake GPU: nox -s fakegpu"),
]
ORDERS = ["late", "early", *(f"random:{seed}" for seed in range(4))]

Plant = Callable[[pytest.MonkeyPatch], None]


def choose(order: str) -> None:
    """Finish all work and repair the device; then use this order."""
    ctypes.CDLL("libcudart.so.13").fakegpu_order(order.encode())


@pytest.fixture
def order(request: pytest.FixtureRequest) -> Iterator[str]:
    choose(request.param)
    yield request.param
    choose(os.environ["KVTIER_FAKE_ORDER"])


@pytest.fixture
def stream() -> Iterator[torch.cuda.Stream]:
    """Compute on its own stream, as vLLM does."""
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        yield torch.cuda.current_stream()


@pytest.fixture
def machine(order: str, stream: torch.cuda.Stream) -> Iterator[Rig]:
    library = cuda.open_library()
    runtime = TorchRuntime(torch.device("cuda", 0), library, library.copy_batch)
    with rig(engine_on(runtime, pinned=True), Shape((512,)), "cuda") as it:
        yield it
        torch.cuda.synchronize()  # a planted fault leaves copies behind


def overwrite(it: Rig, block: int, value: int) -> None:
    """Compute a block on the device, and write the same bytes into the model."""
    it.caches.tensors[0][block].fill_(value)
    it.model.rows[0][block][:512] = bytes([value]) * 512


def tell_story(it: Rig) -> None:
    """Store a graph's results; load them into a zeroed block; then recompute the first block."""
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):  # as in vLLM's decode steps
        overwrite(it, 5, 17)
        overwrite(it, 7, 17)
    graph.replay()
    it.store(1, Blocks.make([5, 7], (2,), (0,)), [3, 5])  # two copies: a batch
    it.engine.wait([1])
    overwrite(it, 5, 18)
    overwrite(it, 6, 0)
    it.load(2, [3, 5], Blocks.make([6, 8], (2,), (0,)))
    it.check()


def without_wait(queue: CopyQueue) -> Plant:
    """Return a fault: one queue's stream does not wait for the work enqueued before."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        opened = TorchRuntime.open_stream

        def open_stream(self: TorchRuntime, of: CopyQueue, *, plain: bool = False) -> TorchStream:
            found = opened(self, of, plain=plain)
            if of is queue:
                start = found.start_transfer
                found.start_transfer = lambda after, plan: start(found.record(), plan)  # type: ignore[method-assign]
            return found

        monkeypatch.setattr(TorchRuntime, "open_stream", open_stream)

    return plant


def events_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record the events of a transfer again, on an idle stream."""
    start: Any = TorchStream.start_transfer

    def start_transfer(self: TorchStream, after: Any, plan: CopyPlan) -> Any:
        events = start(self, after, plan)
        idle = torch.cuda.Stream().cuda_stream
        for event in events:
            self._runtime.library.call("EventRecord", event.cuda_event, idle)
        return events

    monkeypatch.setattr(TorchStream, "start_transfer", start_transfer)


def end_in_front(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record the end of a transfer before its copies."""
    around = RuntimeLibrary.around
    monkeypatch.setattr(RuntimeLibrary, "around", lambda self, after, *ends: around(self, after, *ends[::-1]))
    monkeypatch.setattr(RuntimeLibrary, "elapsed_ms", lambda self, start, end: 0.0)


def sources_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a batch read its sources before the preceding work."""
    monkeypatch.setattr(cuda, "_IN_STREAM_ORDER", 3)  # cudaMemcpySrcAccessOrderAny


def reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report each transfer as soon as its copies are enqueued."""
    monkeypatch.setattr(_queues, "_wait_for", lambda transfer: 0.0)


@pytest.mark.parametrize("order", ORDERS, indirect=True)
def test_every_order_gives_same_bytes(machine: Rig) -> None:
    tell_story(machine)


@pytest.mark.parametrize(
    ("order", "plant"),
    [
        pytest.param("early", without_wait(CopyQueue.STORE), id="store-without-wait"),
        pytest.param("early", without_wait(CopyQueue.LOAD), id="load-without-wait"),
        pytest.param("early", sources_at_any_time, id="sources-at-any-time"),
        pytest.param("late", reported_at_once, id="end-without-wait"),
        pytest.param("late", end_in_front, id="end-in-front"),
        pytest.param("late", events_reused, id="events-reused"),
    ],
    indirect=["order"],
)
def test_missing_wait_changes_bytes(
    order: str, plant: Plant, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=r"block|slot"):
        tell_story(request.getfixturevalue("machine"))
