"""The backend for Intel GPUs over host memory: torch's streams are simulated, its tensor copies are real."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvtier._device._engine import TransferEngine
from kvtier._device.backends.xpu import DeviceBytes, XpuRuntime, XpuStream
from kvtier._device.base import DEADLINE_S
from kvtier._device.plan import CopyPlan
from kvtier.errors import TransferError
from kvtier_testing.device import DeviceConformance, EngineFactory, Gate, GatedFactory
from tests.unit.device.conftest import gate_copies


def engine_on(api: Any, buffer_bytes: int, deadline_s: float = DEADLINE_S) -> EngineFactory:
    def factory(caches, layout, region):
        runtime = XpuRuntime(caches.tensors, api, buffer_bytes)
        return TransferEngine(caches, layout, region, runtime, deadline_s=deadline_s)

    return factory


class TestOverHostMemory(DeviceConformance):
    @pytest.fixture(params=[1000, 2**20])
    def engine_factory(self, request: pytest.FixtureRequest, played_torch: Any) -> EngineFactory:
        return engine_on(played_torch, request.param)

    @pytest.fixture
    def gated_factory(self, played_torch: Any, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> GatedFactory:
        gate_copies(XpuStream, gate, monkeypatch)
        return lambda deadline_s: engine_on(played_torch, 2000, deadline_s)


def test_refill_waits_for_device(played_torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # For each buffer in turn: the host may write to it only after waiting for its last event.
    order: list[tuple[str, object]] = []
    fill, synchronize = torch.Tensor.copy_, played_torch.Event.synchronize

    def copy(tensor: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        order.append(("given", None))
        return fill(tensor, source, non_blocking)

    def waited(event: Any) -> None:
        order.append(("waited", event))
        synchronize(event)

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    monkeypatch.setattr(played_torch.Event, "synchronize", waited)
    memory = torch.zeros((64, 512), dtype=torch.int8)
    slots = np.arange(64 * 512, dtype=np.int64).astype(np.uint8)
    stream = XpuStream(
        played_torch,
        played_torch.Stream(),
        DeviceBytes([memory]),
        is_store=False,
        buffer_bytes=512,
    )
    offsets = np.arange(5, dtype=np.uint64) * np.uint64(512)
    sizes = np.full(5, 512, dtype=np.uint64)
    stream.copy(
        CopyPlan(offsets + np.uint64(slots.ctypes.data), offsets + np.uint64(memory.data_ptr()), sizes)
    )
    assert [what for what, _ in order] == ["given", "given", *["waited", "given"] * 3]
    assert memory[:5].numpy().tobytes() == slots[:2560].tobytes()


def test_failed_store_writes_nothing(played_torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By then its slots hold another chunk."""
    memory = torch.ones((8, 512), dtype=torch.int8)
    slots = np.zeros((8, 512), dtype=np.uint8)
    stream = XpuStream(
        played_torch, played_torch.Stream(), DeviceBytes([memory]), is_store=True, buffer_bytes=512
    )

    def store(page: int) -> None:
        sizes = np.full(1, 512, dtype=np.uint64)
        source = np.array([memory.data_ptr() + page * 512], dtype=np.uint64)
        stream.copy(CopyPlan(source, np.array([slots[page].ctypes.data], dtype=np.uint64), sizes))

    def fail(_: Any) -> None:
        raise RuntimeError("the device has failed")

    with monkeypatch.context() as patch:
        patch.setattr(played_torch.Event, "synchronize", fail)
        with pytest.raises(RuntimeError):
            store(0)
    slots[0] = 77
    store(1)
    assert set(slots[0].tolist()) == {77}
    assert set(slots[1].tolist()) == {1}


@pytest.mark.parametrize(("start", "size"), [(-1, 1), (48, 1), (40, 9)])
def test_outside_ranges_are_refused(start: int, size: int) -> None:
    tensor = torch.zeros((3, 16), dtype=torch.int8)
    addresses = np.array([tensor.data_ptr() + start], dtype=np.uint64)
    with pytest.raises(TransferError, match="not in the engine's tensors"):
        list(DeviceBytes([tensor]).find(addresses, np.array([size], dtype=np.uint64)))
