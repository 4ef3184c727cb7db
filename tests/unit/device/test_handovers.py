"""A transfer takes the interpreter lock a fixed number of times, however many pages it has.

Beside a busy engine thread each acquisition can cost a millisecond. The simulated device counts the calls
that release the lock in torch. Operations on large arrays release it in NumPy.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvtier import _device
from kvtier import _native as native
from kvtier._device import _engine, _queues
from kvtier._device.auto import open_transfer_engine
from kvtier._device.backends._cuda_runtime import RuntimeLibrary, TorchRuntime
from kvtier._device.backends.cpu import CpuRuntime, HostStream, copy_each
from kvtier._device.backends.cuda import Cudart
from kvtier._device.base import Blocks, CopyQueue
from kvtier._device.plan import CopyPlan, CopyPlanner
from kvtier_testing.device import EngineFactory, Rig, Shape, rig
from tests.common import wait_until
from tests.unit.device.conftest import engine_on

pytestmark = pytest.mark.skipif(not native.available, reason="the native library is not built")

TENSORS = 8
SHAPE = Shape((64,) * TENSORS, num_blocks=1024, slots=512)
QUEUES = frozenset(CopyQueue)
OWN_CODE = str(Path(_device.__file__).parent)
WAITS_FOR_WORK = ("_take", "<lambda>")  # one wake-up, if the thread slept

ON_GPU = ["copy", "EventSynchronize"]  # freeing torch's event releases it again, in the thread that frees it


@dataclass
class Cost:
    """The counts of one transfer.

    Attributes:
        calls: calls in the queue's thread that release the interpreter lock, from the last report to its own.
        instructions: instructions of Python that kvtier's code ran there meanwhile.
        submitting: the same in the submitting call.
    """

    calls: list[str]
    instructions: int
    submitting: int = 0


class Handovers:
    """Counts the work of threads for consecutive transfers."""

    def __init__(self) -> None:
        self._calls: list[str] = []
        self._instructions: Counter[int] = Counter()  # by thread

    def note(self, call: str) -> None:
        if threading.current_thread().name in QUEUES:
            self._calls.append(call)

    def trace(self, frame: Any, event: str, _: object) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(OWN_CODE) or code.co_name in WAITS_FOR_WORK:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._instructions[threading.get_ident()] += event == "opcode"
        return self.trace

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Count the instructions of this thread and of threads that start meanwhile."""
        here, others = sys.gettrace(), threading.gettrace()
        threading.settrace(self.trace)
        sys.settrace(self.trace)
        try:
            yield
        finally:
            sys.settrace(here)
            threading.settrace(others)

    def measure(self, it: Rig, submit: Callable[[], None]) -> Cost:
        found: list[Cost] = []
        reported, here = threading.Event(), threading.get_ident()

        def note_report() -> None:
            found.append(Cost(self._calls, self._instructions.pop(threading.get_ident())))
            self._calls = []
            reported.set()

        it.engine.set_wakeup(note_report)
        before = self._instructions[here]
        submit()
        after = self._instructions[here]
        assert reported.wait(20)
        (end,) = it.engine.finished()
        assert end.error is None
        return replace(found[0], submitting=after - before)


@pytest.fixture
def handovers(monkeypatch: pytest.MonkeyPatch) -> Handovers:
    """Count calls of the native library, and operations on the arrays of copy plans."""
    handovers = Handovers()
    note, pairs = handovers.note, CopyPlanner._pairs

    class NotedArray(np.ndarray[Any, Any]):
        def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
            note(ufunc.__name__)
            plain = (it.view(np.ndarray) if isinstance(it, NotedArray) else it for it in inputs)
            return getattr(ufunc, method)(*plain, **options)

    class NotedLibrary:
        def __getattr__(self, name: str) -> Any:
            note("copy" if name.startswith("kvt_copy_") else name)
            return getattr(library, name)

    def noted_pairs(*arguments: Any, **options: Any) -> Any:
        return tuple(array.view(NotedArray) for array in pairs(*arguments, **options))

    library = native.library
    monkeypatch.setattr(native, "library", NotedLibrary())
    monkeypatch.setattr(CopyPlanner, "_pairs", noted_pairs)
    return handovers


@pytest.fixture
def noted_torch(handovers: Handovers, as_torch_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the calls of the runtime's library that release the lock."""
    call = RuntimeLibrary.call

    def noted_call(self: RuntimeLibrary, name: str, *arguments: Any) -> None:
        handovers.note(name)
        call(self, name, *arguments)

    monkeypatch.setattr(RuntimeLibrary, "call", noted_call)


@pytest.fixture(params=["cpu", "cuda", "hip"])
def opened(request: pytest.FixtureRequest, stub_paths: dict[str, Path]) -> tuple[EngineFactory, list[str]]:
    """A backend's engine, and its calls per transfer."""
    if request.param == "cpu":
        return open_transfer_engine, ["copy"]
    request.getfixturevalue("noted_torch")
    path = str(stub_paths[request.param])
    if request.param == "hip":
        runtime = TorchRuntime(torch.device("cpu"), RuntimeLibrary(path, "hip"))
    else:
        cudart = Cudart(path)
        runtime = TorchRuntime(torch.device("cpu"), cudart, cudart.copy_batch)
    return engine_on(runtime, SHAPE.slots, pinned=True, deadline_s=600), ON_GPU


@pytest.mark.parametrize("is_store", [False, True], ids=["load", "store"])
def test_pages_cost_no_handovers(
    handovers: Handovers, opened: tuple[EngineFactory, list[str]], is_store: bool
) -> None:
    factory, expected = opened
    costs: list[Cost] = []
    with handovers.tracing(), rig(factory, SHAPE) as it:
        for number, pages in enumerate((16, 16, 16, 4096)):  # the first one attaches the thread to the device
            blocks, slots = _scattered(pages // TENSORS)
            submit = it.engine.submit_store if is_store else it.engine.submit_load
            arguments = (blocks, slots) if is_store else (slots, blocks)
            costs.append(handovers.measure(it, partial(submit, number, *arguments)))
    *_, few, many = costs
    assert few == many
    assert few.calls == expected
    assert min(few.instructions, few.submitting) > 0


class HeldEvent:
    """An event that the test completes; ``awaited`` is set once a thread waits for it."""

    def __init__(self) -> None:
        self.awaited, self.reached = threading.Event(), threading.Event()
        self.is_broken = False

    def synchronize(self) -> None:
        self.awaited.set()
        assert self.reached.wait(20)

    def query(self) -> bool:
        if self.is_broken:
            raise RuntimeError("the device is lost")
        return self.reached.is_set()

    def elapsed_time(self, _: object) -> float:
        return 1.0


class HeldStream(HostStream):
    """Records the end events of its transfers, which the test completes."""

    def __init__(self, ends: list[HeldEvent]) -> None:
        super().__init__(copy_each)
        self._ends = ends

    def start_transfer(self, after: Any, plan: CopyPlan) -> tuple[HeldEvent, HeldEvent]:
        self._ends.append(HeldEvent())
        return self._ends[-1], self._ends[-1]


class HeldRuntime(CpuRuntime):
    """Host memory with such streams."""

    def __init__(self) -> None:
        self.ends: list[HeldEvent] = []

    def open_stream(self, queue: CopyQueue, *, plain: bool = False) -> HostStream:
        return HeldStream(self.ends)


@pytest.fixture
def kept_lock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make each thread keep the interpreter lock until it waits for something."""
    for module in (_queues, _engine):
        monkeypatch.setattr(module, "HAND_OVER_S", 60)
    before = sys.getswitchinterval()
    sys.setswitchinterval(60)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("kept_lock")
def test_busy_caller_hands_over_the_lock() -> None:
    """A load starts, and is reported, while its engine's caller runs Python without a pause."""
    runtime = HeldRuntime()
    with rig(engine_on(runtime), SHAPE) as it:
        queue = it.engine._queues[CopyQueue.LOAD]
        blocks, slots = _scattered(2)
        for transfer_id in range(3):
            wait_until(lambda: queue._is_idle or transfer_id == 0)  # noqa: B023
            it.engine.submit_load(transfer_id, slots, blocks)
            it.engine.hand_over()
            if transfer_id:  # the first one starts the thread
                assert len(runtime.ends) == transfer_id + 1
            wait_until(lambda: len(runtime.ends) == transfer_id + 1)  # noqa: B023
            end = runtime.ends[-1]
            assert end.awaited.wait(20)
            it.engine.hand_over()
            assert it.engine.finished() == []
            end.reached.set()
            it.engine.hand_over()
            assert [end.transfer_id for end in it.engine.finished()] == [transfer_id]


def test_broken_event_reaches_no_caller() -> None:
    runtime = HeldRuntime()
    with rig(engine_on(runtime), SHAPE) as it:
        blocks, slots = _scattered(2)
        it.engine.submit_load(1, slots, blocks)
        wait_until(lambda: runtime.ends)
        (end,) = runtime.ends
        assert end.awaited.wait(20)
        end.is_broken = True
        try:
            it.engine.hand_over()
        finally:
            end.reached.set()


def _scattered(count: int) -> tuple[Blocks, list[int]]:
    """Return blocks and slots without adjacent pages."""
    return Blocks.make(range(0, 2 * count, 2), (count,), (0,)), list(range(count))[::-1]
