"""The CPU backend: the contract, with and without the native helper, and its additions."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from kvtier import _native as native
from kvtier._device._engine import TransferEngine
from kvtier._device._queues import LOST_AFTER
from kvtier._device.auto import open_transfer_engine
from kvtier._device.backends.cpu import copy_batch
from kvtier._device.base import Attempt, Blocks
from kvtier._device.plan import CopyPlan
from kvtier._memory.layout import SlotLayout
from kvtier._memory.region import Region
from kvtier.errors import DeviceLostError
from kvtier_testing.device import DeviceConformance, EngineFactory, Gate, GatedFactory, rig
from kvtier_testing.device_model import GivenCopies


class OnCpu(DeviceConformance):
    @pytest.fixture
    def gated_factory(self, gate: Gate) -> GatedFactory:
        def copy(plan: CopyPlan) -> None:
            gate.go_through()
            copy_batch(plan)

        return lambda deadline_s: with_copy(copy, deadline_s)


class TestNative(OnCpu):
    @pytest.fixture
    def engine_factory(self) -> EngineFactory:
        if not native.available:
            pytest.skip("the native helper is not built")
        return open_transfer_engine


class TestFallback(OnCpu):
    @pytest.fixture
    def engine_factory(self, monkeypatch: pytest.MonkeyPatch) -> EngineFactory:
        monkeypatch.setattr(native, "library", None)
        return open_transfer_engine


def with_copy(copy: Callable[[CopyPlan], None], deadline_s: float = 60) -> EngineFactory:
    return lambda caches, layout, region: TransferEngine(
        caches, layout, region, GivenCopies(copy), deadline_s=deadline_s
    )


def one(block: int) -> Blocks:
    return Blocks.make([block], (1,), (0,))


class Faulty:
    """Fails the first ``failures`` calls, half-way."""

    def __init__(self, failures: int, error: BaseException) -> None:
        self.failures = failures
        self.error = error

    def __call__(self, plan: CopyPlan) -> None:
        if self.failures:
            self.failures -= 1
            half = len(plan.sizes) // 2
            copy_batch(CopyPlan(plan.src[:half], plan.dst[:half], plan.sizes[:half]))
            raise self.error
        copy_batch(plan)


@pytest.mark.parametrize("error", [OSError("no"), SystemExit("no")])
def test_second_failure_is_reported(error: BaseException) -> None:
    with rig(with_copy(Faulty(2, error))) as it:
        it.engine.submit_store(1, one(3), [2])
        it.store(2, one(3), [2])
        it.check()
        assert [(end.transfer_id, end.error) for end in it.engine.finished()] == [(1, error), (2, None)]


@pytest.mark.parametrize(("expedited", "attempt"), [(False, Attempt.RETRY), (True, Attempt.STAGED)])
def test_only_awaited_loads_are_staged(expedited: bool, attempt: Attempt) -> None:
    with rig(with_copy(Faulty(2, OSError("no")))) as it:
        it.engine.stages_loads = False
        it.engine.submit_load(1, [2], one(3), expedited=expedited)
        it.engine.drain()
        (end,) = it.engine.finished()
        assert (end.error is None, end.attempt) == (expedited, attempt)


def test_repeated_failures_lose_device(
    caplog: pytest.LogCaptureFixture,
) -> None:
    faulty = Faulty(2 * (LOST_AFTER - 1), OSError("no"))
    with rig(with_copy(faulty)) as it:
        for number in range(LOST_AFTER - 1):
            it.engine.submit_store(number, one(3), [2])
        it.store(98, one(3), [2])  # a success in between: the failures are not consecutive
        it.engine.drain()
        it.engine.finished()
        faulty.failures = 1000
        for number in range(LOST_AFTER + 2):
            it.engine.submit_store(number, one(3), [2])
            it.engine.drain()
        ends = it.engine.finished()
        tried = 1000 - faulty.failures
        it.engine.submit_load(99, [2], one(3), expedited=True)  # in another queue
        it.engine.drain()
        ends += it.engine.finished()
    lost = [isinstance(end.error, DeviceLostError) for end in ends]
    assert lost == [False] * (LOST_AFTER - 1) + [True] * 4
    assert tried == 2 * LOST_AFTER == 1000 - faulty.failures
    assert [end.attempt for end in ends[LOST_AFTER:]] == [None] * 3
    assert sum("device disabled" in record.getMessage() for record in caplog.records) == 1


def test_lost_device_is_believed() -> None:
    with rig(with_copy(Faulty(2, DeviceLostError("gone")))) as it:
        it.engine.submit_store(1, one(3), [2])
        it.engine.submit_store(2, one(3), [2])
        it.engine.drain()
        assert [(str(end.error), end.attempt) for end in it.engine.finished()] == [
            ("gone", Attempt.RETRY),
            ("gone", None),
        ]


@pytest.mark.parametrize("name", ["kvtier-watch", "kvtier-store"])
def test_missing_thread_fails_one_copy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start, refused = threading.Thread.start, [name]

    def refuse(thread: threading.Thread) -> None:
        if thread.name in refused:
            refused.remove(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    with rig(open_transfer_engine) as it:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        it.engine.submit_store(1, one(3), [2])
        it.store(2, one(3), [2])
        it.check()
        assert [(end.transfer_id, str(end.error)) for end in it.engine.finished()] == [
            (1, "can't start new thread"),
            (2, "None"),
        ]


def test_failing_wakeup_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def closed_loop() -> None:
        raise RuntimeError("Event loop is closed")

    with rig(open_transfer_engine) as it:
        it.engine.set_wakeup(closed_loop)
        it.store(1, one(1), [1])
        it.store(2, one(2), [2])
        it.check()
        woken = threading.Event()
        it.engine.set_wakeup(woken.set)  # a late callback also gets transfers that ended before
        assert woken.is_set()
        assert [end.transfer_id for end in it.engine.finished()] == [1, 2]
    assert "Event loop is closed" in caplog.text


def test_region_must_fit_layout() -> None:
    with rig(open_transfer_engine) as it, Region.anonymous(4, 8192) as region:
        with pytest.raises(ValueError, match="slots have 8192 bytes, but the layout 4096"):
            open_transfer_engine(it.caches, it.shape.layout, region)
        with pytest.raises(ValueError, match=r"are \(512, 192\), the layout's \(512, 64\)"):
            open_transfer_engine(it.caches, SlotLayout.make((512, 64), 1), it.region)
