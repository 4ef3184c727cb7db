"""The calls into the runtime libraries, and the engine over them, with a test library."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvtier import _native as native
from kvtier._device.backends._cuda_runtime import (
    RuntimeEvent,
    RuntimeLibrary,
    TorchRuntime,
    TorchStream,
    find_library,
    require_exact,
)
from kvtier._device.backends.cuda import Cudart
from kvtier._device.base import CopyQueue
from kvtier._device.plan import CopyPlan
from kvtier._native import build
from kvtier.errors import ConfigError, DeviceLostError, TransferError
from kvtier_testing.device import DeviceConformance, EngineFactory, Gate, GatedFactory
from tests.unit.device.conftest import PlayedEvent, Stub, engine_on, gate_copies

ADDRESS = 2**47 - 4096
CHUNK_BYTES = 4096
STREAM = SimpleNamespace(cuda_stream=ADDRESS)


@pytest.fixture(params=["native", "python"])
def library(request: pytest.FixtureRequest, stub: Any, monkeypatch: pytest.MonkeyPatch) -> RuntimeLibrary:
    if request.param == "python":
        monkeypatch.setattr(native, "library", None)
    elif not native.available:
        pytest.skip("the native helper is not built")
    return RuntimeLibrary(str(stub.path), stub.prefix)


def make_plan(src: np.ndarray, dst: np.ndarray) -> CopyPlan:
    """Copy the first 8 bytes and the last 8, from slots."""
    start = src.ctypes.data
    offsets = np.array([0, src.nbytes - 8], dtype=np.uint64)
    sizes = np.array([8, 8], dtype=np.uint64)
    source, target = offsets + np.uint64(start), offsets + np.uint64(dst.ctypes.data)
    return CopyPlan(source, target, sizes, (start, start + src.nbytes))


def arrays() -> tuple[np.ndarray, np.ndarray]:
    return np.arange(40, dtype=np.uint8), np.zeros(40, dtype=np.uint8)


def test_copies_go_to_the_stream(library: RuntimeLibrary, stub: Any) -> None:
    src, dst = arrays()
    library.copy(make_plan(src, dst), STREAM)
    assert dst.tolist() == [*range(8), *[0] * 24, *range(32, 40)]
    assert stub.variable("used_stream", ctypes.c_void_p).value == ADDRESS


@pytest.mark.parametrize("prefix", ["cuda"], indirect=True)
@pytest.mark.parametrize(("version", "failed_index"), [(12080, 1), (12090, 1), (13000, 0), (13020, 0)])
@pytest.mark.parametrize(("copies", "calls"), [(1, 1), (64, 1), (65, 2), (200, 4)])
def test_batch_is_few_calls(stub: Any, version: int, failed_index: int, copies: int, calls: int) -> None:
    stub.variable("version").value = version
    src = np.arange(copies * 2, dtype=np.uint64)
    dst = np.zeros_like(src)
    at, sizes = np.arange(copies, dtype=np.uint64) * 16, np.full(copies, 8, dtype=np.uint64)
    plan = CopyPlan(at + np.uint64(src.ctypes.data), at + np.uint64(dst.ctypes.data), sizes)
    Cudart(str(stub.path)).copy_batch(plan, STREAM)
    assert dst[::2].tolist() == src[::2].tolist()
    assert not dst[1::2].any()
    assert stub.variable("used_stream", ctypes.c_void_p).value == ADDRESS
    assert stub.variable("failed_index_given").value == failed_index
    assert stub.variable("calls").value == calls


@pytest.mark.parametrize("prefix", ["cuda"], indirect=True)
def test_refused_batch_is_error(stub: Any) -> None:
    stub.variable("fails").value = 1
    with pytest.raises(TransferError, match=r"cudaMemcpyBatchAsync failed: invalid argument \(1\)"):
        Cudart(str(stub.path)).copy_batch(make_plan(*arrays()), STREAM)


def test_error_does_not_stay(library: RuntimeLibrary, stub: Any) -> None:
    stub.variable("fails").value = 1
    src, dst = arrays()
    with pytest.raises(TransferError, match=rf"{stub.prefix}MemcpyAsync failed: invalid argument \(1\)"):
        library.copy(make_plan(src, dst), STREAM)
    assert not dst.any()
    assert stub.call("peek_error") == 0
    with pytest.raises(TransferError, match=rf"{stub.prefix}HostRegister failed: out of memory \(2\)"):
        library.host_register(ADDRESS, 4096)
    assert stub.call("peek_error") == 0


def test_fatal_error_loses_device(library: RuntimeLibrary) -> None:
    with pytest.raises(DeviceLostError):
        library.check("MemcpyAsync", 719)
    with pytest.raises(TransferError) as error:
        library.check("MemcpyAsync", 1)
    assert not isinstance(error.value, DeviceLostError)


def test_host_memory_is_portable(library: RuntimeLibrary, stub: Any) -> None:
    library.host_register(ADDRESS, 2**40)
    assert stub.variable("registered", ctypes.c_void_p).value == ADDRESS
    assert stub.variable("registered_bytes", ctypes.c_size_t).value == 2**40
    assert stub.variable("flags", ctypes.c_uint).value == 1
    library.host_unregister(ADDRESS)
    assert stub.variable("unregistered", ctypes.c_void_p).value == ADDRESS


def test_capture_mode_is_per_thread(library: RuntimeLibrary, stub: Any) -> None:
    modes: list[int] = []

    def relax() -> None:
        modes.append(stub.call("peek_mode"))
        library.relax_capture()
        library.relax_capture()
        modes.append(stub.call("peek_mode"))

    thread = threading.Thread(target=relax)
    thread.start()
    thread.join(20)
    assert modes == [0, 2]
    assert stub.call("peek_mode") == 0


@pytest.mark.parametrize("prefix", ["cuda"], indirect=True)
def test_torchs_runtime_is_used(stub: Any, tmp_path: Path) -> None:
    other = shutil.copy(stub.path, tmp_path / "other_runtime.so")
    ctypes.CDLL(str(other), ctypes.RTLD_GLOBAL)  # already loaded, for example by torchvision
    torchs = tmp_path / "libc10_cuda.so"
    link = (
        "-shared",
        "-fPIC",
        "-Wl,--no-as-needed",
        f"-Wl,-rpath,{stub.path.parent}",
        "-x",
        "c",
        "/dev/null",
    )
    subprocess.run(
        [*build.compiler(), *link, "-o", torchs, f"-L{stub.path.parent}", f"-l:{stub.path.name}"], check=True
    )
    library = RuntimeLibrary(find_library("libc10_cuda", tmp_path))
    library.host_register(ADDRESS, 4096)
    assert stub.variable("registered", ctypes.c_void_p).value == ADDRESS


def test_missing_library_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"torch has no .*/libc10_hip\.so, which kvtier needs"):
        find_library("libc10_hip", tmp_path)
    with pytest.raises(ConfigError, match="not linked to a shared cuda runtime"):
        RuntimeLibrary(find_library("libc10"))


FLAVOURS = [("cuda", "each"), ("cuda", "batch"), ("hip", "each")]


@pytest.fixture(params=FLAVOURS, ids="-".join)
def runtime(request: pytest.FixtureRequest, stub_paths: dict[str, Path], as_torch_cuda: Any) -> TorchRuntime:
    """A runtime that makes many copies in one call, or one copy per call."""
    prefix, chosen = request.param
    path = str(stub_paths[prefix])
    if chosen == "each":
        return TorchRuntime(torch.device("cpu"), RuntimeLibrary(path, prefix))
    library = Cudart(path)
    return TorchRuntime(torch.device("cpu"), library, library.copy_batch)


class TestEachMethod(DeviceConformance):
    """The whole suite over torch's runtime with each of its methods; torch and the device are simulated."""

    @pytest.fixture
    def engine_factory(self, runtime: TorchRuntime) -> EngineFactory:
        return engine_on(runtime, pinned=True)

    @pytest.fixture
    def gated_factory(
        self, runtime: TorchRuntime, gate: Gate, monkeypatch: pytest.MonkeyPatch
    ) -> GatedFactory:
        gate_copies(TorchStream, gate, monkeypatch)
        return lambda deadline_s: engine_on(runtime, pinned=True, deadline_s=deadline_s)


@pytest.mark.parametrize("prefix", ["cuda"], indirect=True)
def test_expedited_stream_has_priority(stub: Any, as_torch_cuda: Any) -> None:
    runtime = TorchRuntime(torch.device("cpu"), RuntimeLibrary(str(stub.path)))
    priorities = {queue: runtime.open_stream(queue)._stream.priority for queue in CopyQueue}
    assert priorities[CopyQueue.EXPEDITED] < priorities[CopyQueue.LOAD] == priorities[CopyQueue.STORE]


def test_transfer_is_one_call(runtime: TorchRuntime, stub_paths: Any) -> None:
    """Its stream waits for earlier work, and it reuses its events."""
    prefix = runtime.library._prefix
    stub = Stub(stub_paths[prefix], prefix)
    src, dst = arrays()
    runtime.host_register(src.ctypes.data, src.nbytes)
    stub.variable("fails").value = stub.variable("events").value = 0
    stream = runtime.open_stream(CopyQueue.LOAD)
    for _ in range(3):
        start, end = stream.start_transfer(runtime.record_compute(), make_plan(src, dst))
        end.synchronize()
        assert start.elapsed_time(end) >= 0
        del start, end
    assert dst.tolist() == [*range(8), *[0] * 24, *range(32, 40)]
    assert stub.variable("awaited", ctypes.c_void_p).value == PlayedEvent.cuda_event
    assert stub.variable("events").value == 2


@pytest.mark.parametrize("fails", [1, 3], ids=["copy", "record"])
def test_refused_transfer_waits_for_its_copies(
    runtime: TorchRuntime, stub_paths: Any, monkeypatch: pytest.MonkeyPatch, fails: int
) -> None:
    synchronized: list[RuntimeEvent] = []
    monkeypatch.setattr(RuntimeEvent, "synchronize", lambda event: synchronized.append(event))
    prefix = runtime.library._prefix
    variable = Stub(stub_paths[prefix], prefix).variable("fails")
    src, dst = arrays()
    stream = runtime.open_stream(CopyQueue.LOAD)
    variable.value = fails
    try:
        with pytest.raises(TransferError, match="invalid argument"):
            stream.start_transfer(runtime.record_compute(), make_plan(src, dst))
    finally:
        variable.value = 0
    assert len(synchronized) == (fails == 1)  # otherwise events cannot be recorded


class OverHostMemory:
    """A copy method over host memory; each fault but the last corrupts bytes."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    def __call__(self, plan: CopyPlan, stream: Any, around: object) -> None:
        if self.fault == "refuses":
            raise OSError("the driver is too old")
        copies = list(zip(plan.src.tolist(), plan.dst.tolist(), plan.sizes.tolist(), strict=True))
        for source, target, size in copies[1:] if self.fault == "leaves one out" else copies:
            ctypes.memmove(target, source, size + (8 if self.fault == "copies too much" else 0))


@pytest.mark.parametrize("fault", ["", "leaves one out", "copies too much", "refuses"])
def test_wrong_method_is_detected(fault: str, played_torch: Any) -> None:
    def check() -> None:
        require_exact(OverHostMemory(fault), torch.device("cpu"), played_torch.Stream())

    if not fault:
        check()
        return
    with pytest.raises((ValueError, OSError), match=r"wrong bytes|too old"):
        check()


def test_methods_are_tried_in_a_thread(
    stub_paths: Any, as_torch_cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream set in vLLM's thread would become vLLM's compute stream."""
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    threads: set[int] = set()

    def method(plan: CopyPlan, stream: Any, around: object) -> None:
        threads.add(threading.get_ident())
        OverHostMemory()(plan, stream, around)

    library = RuntimeLibrary(str(stub_paths["cuda"]))
    assert TorchRuntime.open(torch.device("cpu"), library, method).batched is not None
    assert len(threads - {threading.get_ident()}) == len(threads) > 0


@pytest.mark.parametrize("pinned", [0, CHUNK_BYTES, 2 * CHUNK_BYTES])
def test_only_pinned_slots_join(stub_paths: Any, as_torch_cuda: Any, pinned: int) -> None:
    used: list[CopyPlan] = []
    runtime = TorchRuntime(
        torch.device("cpu"), RuntimeLibrary(str(stub_paths["cuda"])), lambda plan, *_: used.append(plan)
    )
    slots = np.zeros(2 * CHUNK_BYTES, dtype=np.uint8)
    for start in range(0, pinned, CHUNK_BYTES):
        runtime.host_register(slots.ctypes.data + start, CHUNK_BYTES)
    target = np.zeros_like(slots)
    plan, is_batched = make_plan(slots, target), pinned == slots.nbytes
    stream = runtime.open_stream(CopyQueue.LOAD)
    stream.copy(plan)
    assert used == [plan] * is_batched
    runtime.open_stream(CopyQueue.LOAD, plain=True).copy(plan)
    runtime.host_unregister(slots.ctypes.data)
    stream.copy(plan)
    assert used == [plan] * is_batched


class KernelForMany:
    """Records its calls, and suits plans of many copies."""

    def __init__(self) -> None:
        self.copied: list[CopyPlan] = []

    def suits(self, plan: CopyPlan) -> bool:
        return len(plan.sizes) > 2

    def copy(self, plan: CopyPlan, stream: Any, around: object) -> None:
        self.copied.append(plan)


@pytest.mark.parametrize("is_mapped", [True, False])
def test_kernel_copies_fitting_loads(stub: Any, as_torch_cuda: Any, is_mapped: bool) -> None:
    kernel = KernelForMany()
    runtime = TorchRuntime(torch.device("cpu"), RuntimeLibrary(str(stub.path), stub.prefix), kernel=kernel)
    slots = np.zeros(2 * CHUNK_BYTES, dtype=np.uint8)
    stub.variable("device_offset").value = 0 if is_mapped else 4096
    runtime.host_register(slots.ctypes.data, slots.nbytes)
    target = np.zeros_like(slots)
    few = make_plan(slots, target)
    many = CopyPlan(np.tile(few.src, 2), np.tile(few.dst, 2), np.tile(few.sizes, 2), few.host)
    for plan in (few, many):
        for queue in (CopyQueue.LOAD, CopyQueue.EXPEDITED):
            runtime.open_stream(queue).copy(plan)
        store = CopyPlan(plan.dst, plan.src, plan.sizes, plan.host)
        runtime.open_stream(CopyQueue.STORE).copy(store)
    runtime.open_stream(CopyQueue.LOAD, plain=True).copy(many)
    assert kernel.copied == ([many] * 2 if is_mapped else [])


def test_failing_kernel_is_dropped(stub: Any, as_torch_cuda: Any, caplog: pytest.LogCaptureFixture) -> None:
    kernel = KernelForMany()
    kernel.copy = refuse  # type: ignore[method-assign]
    runtime = TorchRuntime(torch.device("cpu"), RuntimeLibrary(str(stub.path), stub.prefix), kernel=kernel)
    slots = np.zeros(2 * CHUNK_BYTES, dtype=np.uint8)
    target = np.zeros_like(slots)
    runtime.host_register(slots.ctypes.data, slots.nbytes)
    few = make_plan(slots, target)
    many = CopyPlan(np.tile(few.src, 2), np.tile(few.dst, 2), np.tile(few.sizes, 2), few.host)
    stream = runtime.open_stream(CopyQueue.LOAD)
    with pytest.raises(RuntimeError, match="out of memory"):
        stream.copy(many)
    stream.copy(many)
    assert "not used again" in caplog.text


def refuse(plan: CopyPlan, stream: Any, around: object) -> None:
    raise RuntimeError("out of memory")
