"""A device's runtime library compiled for the tests, with torch's streams and events simulated over it.

The library is plain C over host memory, so the tests check the calls and not a device's work.
"""

from __future__ import annotations

import ctypes
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier._device._engine import TransferEngine
from kvtier._device._runtime import Runtime
from kvtier._native import build
from kvtier_testing.device import EngineFactory, Gate, Shape
from tests.common import wait_until

STUB = Path(__file__).with_name("stub_runtime.c")


@dataclass(frozen=True)
class Stub:
    """The library, and its variables."""

    path: Path
    prefix: str

    def variable(self, name: str, kind: Any = ctypes.c_int) -> Any:
        """Return one of the variables, which all loads of the library share."""
        return kind.in_dll(ctypes.CDLL(str(self.path)), name)

    def call(self, name: str) -> int:
        """Call one of the library's own functions in this thread."""
        return int(getattr(ctypes.CDLL(str(self.path)), name)())


def _compiled(folder: Path, prefix: str) -> Path:
    try:
        compiler = build.compiler()
    except build.BuildError as error:
        pytest.skip(str(error))
    source, library = folder / "stub.c", folder / "stub.so"  # no name that find_library would find
    source.write_text(STUB.read_text().replace("cuda", prefix))
    subprocess.run([*compiler, "-std=c11", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    return library


@pytest.fixture(scope="session")
def stub_paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {prefix: _compiled(tmp_path_factory.mktemp(prefix), prefix) for prefix in ("cuda", "hip")}


@pytest.fixture(params=["cuda", "hip"])
def prefix(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def stub(prefix: str, stub_paths: dict[str, Path]) -> Iterator[Stub]:
    it = Stub(stub_paths[prefix], prefix)
    defaults = {"fails": 0, "calls": 0, "version": 12090, "failed_index_given": 0, "device_offset": 0}
    for name, value in defaults.items():
        it.variable(name).value = value
    yield it
    it.variable("fails").value = 0


class PlayedEvent:
    """An event of a device that finishes everything at once."""

    cuda_event = 2**46 - 4096

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.at = 0.0

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: PlayedEvent) -> float:
        return (end.at - self.at) * 1000


class PlayedStream:
    """A stream of such a device."""

    cuda_stream = 2**47 - 4096

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.device = torch.device("cpu")
        self.priority = priority

    def wait_event(self, event: PlayedEvent) -> None:
        assert event.at > 0

    def record_event(self, event: PlayedEvent) -> PlayedEvent:
        event.at = time.perf_counter()
        return event

    def synchronize(self) -> None:
        pass


class PlayedTorch:
    """The part of ``torch.cuda`` and ``torch.xpu`` that the backends use, over host memory."""

    Event = PlayedEvent
    Stream = PlayedStream

    def __init__(self) -> None:
        self.streams: list[PlayedStream] = []  # that were current

    def is_available(self) -> bool:
        return False  # host memory is not pinned in this case

    def set_device(self, device: torch.device) -> None:
        pass

    def current_stream(self, device: torch.device) -> PlayedStream:
        return PlayedStream()

    def get_device_properties(self, device: torch.device) -> object:
        return object()

    @contextmanager
    def stream(self, stream: PlayedStream) -> Iterator[None]:
        self.streams.append(stream)
        yield


@pytest.fixture
def played_torch() -> PlayedTorch:
    return PlayedTorch()


@pytest.fixture
def as_torch_cuda(played_torch: PlayedTorch, monkeypatch: pytest.MonkeyPatch) -> PlayedTorch:
    """Replace ``torch.cuda`` by the simulated one."""
    names: list[str] = ["Event", "Stream", "set_device", "current_stream", "get_device_properties", "stream"]
    for name in names:
        attribute: Callable[..., Any] = getattr(played_torch, name)
        monkeypatch.setattr(torch.cuda, name, attribute)
    return played_torch


def gate_copies(kind: Any, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send the copies of all streams of a kind through a gate."""

    def gated(copy: Callable[..., Any]) -> Callable[..., Any]:
        def after_gate(stream: Any, *arguments: Any) -> Any:
            gate.go_through()
            return copy(stream, *arguments)

        return after_gate

    for name in {"copy", "start_transfer"} & vars(kind).keys():
        monkeypatch.setattr(kind, name, gated(getattr(kind, name)))


def engine_on(
    runtime: Runtime,
    piece_slots: int = Shape().slots,
    *,
    pinned: bool = False,
    deadline_s: float = 60,
) -> EngineFactory:
    """Make engines that pin at most ``most`` slots at once; with ``pinned``, all of them are pinned."""

    def factory(caches, layout, region):
        piece_bytes = piece_slots * layout.chunk_bytes
        engine = TransferEngine(
            caches, layout, region, runtime, piece_bytes=piece_bytes, deadline_s=deadline_s
        )
        if pinned:
            wait_until(lambda: engine.pinning.nbytes == region.nbytes)
        return engine

    return factory
