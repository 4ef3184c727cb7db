"""The engine over streams, on a simulated device: the contract, the order of streams, and pinning.

The simulated device copies later and in its own threads, as a GPU does, and rejects the calls that CUDA
rejects.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvtier._device._pinning import PinnedSlots
from kvtier._device._runtime import Runtime, Stream
from kvtier._device.base import Attempt, Blocks, CopyQueue, Pinning
from kvtier._device.plan import CopyPlan
from kvtier._memory.region import Region
from kvtier.errors import DeviceLostError, DeviceStuckError, TransferError
from kvtier_testing.device import (
    Compute,
    DeviceConformance,
    EngineFactory,
    Gate,
    GatedFactory,
    Rig,
    Shape,
    rig,
)
from tests.common import wait_until
from tests.unit.device.conftest import engine_on

CHUNK = Shape().layout.chunk_bytes
SLOTS = Shape().slots


class PlayedEvent:
    def __init__(self, reached: Future[float]) -> None:
        self.reached = reached

    def synchronize(self) -> None:
        self.reached.result()

    def query(self) -> bool:
        return self.reached.done()

    def elapsed_time(self, end_event: Any, /) -> float:
        return float(end_event.reached.result(0) - self.reached.result(0)) * 1000


class PlayedStream(Stream):
    """A thread that runs its work in order; its callers do not wait."""

    def __init__(self, device: PlayedDevice) -> None:
        self._device = device
        self._work = ThreadPoolExecutor(1)
        self.given = 0  # the submitter increments it, and this stream's thread decrements it: no lock
        self.moved = 0

    def run(self, work: Callable[[], object]) -> None:
        self._work.submit(work)

    def wait(self, event: Any) -> None:
        self._device.require_attached()
        self.run(event.reached.result)  # wait for the work enqueued before the event was recorded

    def record(self) -> PlayedEvent:
        return PlayedEvent(self._work.submit(time.perf_counter))

    def copy(self, plan: CopyPlan) -> None:
        self._device.require_attached()
        self._device.gate.go_through()
        for src, dst, size in zip(plan.src.tolist(), plan.dst.tolist(), plan.sizes.tolist(), strict=True):
            if self._device.refuses(dst, src, size):
                raise TransferError("error 1")
            self.given += 1
            self.run(partial(self._move, dst, src, size))

    def close(self) -> None:
        self._work.shutdown()

    def _move(self, dst: int, src: int, size: int) -> None:
        self._device.before_copy(dst)
        ctypes.memmove(dst, src, size)
        self.moved += 1


class PlayedDevice(Runtime):
    """A runtime without a GPU.

    Attributes:
        compute: the engine's compute stream.
        pieces: (address, bytes) of the pinned pieces, in order.
        unpinned: unpinned addresses, in order.
        unmapped: addresses that were unmapped before they were unpinned.
        sources: source addresses of the submitted copies, in order.
        refused: numbers of the copies to refuse.
        before_copy: called in a stream's thread before each copy, with its destination.
        before_pinning: called in the pinning thread before each piece, with the number of those before.
    """

    def __init__(self) -> None:
        self._attached = threading.local()
        self._streams: list[PlayedStream] = []
        self.plain = False
        self.gate = Gate()
        self.compute = self.open_stream(CopyQueue.STORE)
        self.pieces: list[tuple[int, int]] = []
        self.unpinned: list[int] = []
        self.unmapped: list[int] = []
        self.sources: list[int] = []
        self.refused: set[int] = set()
        self.before_copy: Callable[[int], object] = lambda dst: None
        self.before_pinning: Callable[[int], object] = lambda count: None

    @property
    def copies(self) -> int:
        """The number of submitted copies."""
        return len(self.sources)

    @property
    def opened(self) -> int:
        """The number of opened streams."""
        return len(self._streams)

    @property
    def under_way(self) -> int:
        """The number of accepted copies that are still pending."""
        return sum(stream.given - stream.moved for stream in self._streams)

    def attach(self) -> None:
        self._attached.here = True

    def require_attached(self) -> None:
        if not getattr(self._attached, "here", False):
            raise TransferError("this thread may be on another device")

    def record_compute(self) -> PlayedEvent:
        return self.compute.record()

    def open_stream(self, queue: CopyQueue, *, plain: bool = False) -> PlayedStream:
        self._streams.append(PlayedStream(self))
        self.plain = plain
        return self._streams[-1]

    def host_register(self, address: int, nbytes: int) -> None:
        self.require_attached()
        self.before_pinning(len(self.pieces))
        self.pieces.append((address, nbytes))

    def host_unregister(self, address: int) -> None:
        self.require_attached()
        self.unpinned.append(address)
        if not is_mapped(address):
            self.unmapped.append(address)

    def refuses(self, dst: int, src: int, size: int) -> bool:
        """Return whether the copy is refused: it was selected, or a pinned piece holds only part of it."""
        self.sources.append(src)
        return self.copies - 1 in self.refused or any(
            start < piece + length and piece < start + size
            and not (piece <= start and start + size <= piece + length)
            for start in (dst, src)
            for piece, length in self.pieces
        )  # fmt: skip

    def close(self) -> None:
        for stream in self._streams:
            stream.close()


def is_mapped(address: int) -> bool:
    maps = Path("/proc/self/maps").read_text().splitlines()
    ranges = (line.split(maxsplit=1)[0].split("-") for line in maps)
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


@pytest.fixture
def device() -> Iterator[PlayedDevice]:
    made = PlayedDevice()
    yield made
    made.close()


class ComputeStream(Compute):
    """Computes later, on a stream of the simulated device."""

    def __init__(self, device: PlayedDevice) -> None:
        self._device = device

    def run(self, work: Callable[[], object]) -> None:
        self._device.compute.run(work)

    def finish(self) -> None:
        self._device.compute.record().synchronize()


class OnPlayedDevice(DeviceConformance):
    @pytest.fixture
    def compute(self, device: PlayedDevice) -> Compute:
        return ComputeStream(device)

    @pytest.fixture
    def gated_factory(self, device: PlayedDevice, gate: Gate) -> GatedFactory:
        device.gate = gate
        return lambda deadline_s: engine_on(device, deadline_s=deadline_s)


class TestPinned(OnPlayedDevice):
    @pytest.fixture(params=[1, 5])
    def engine_factory(self, request: pytest.FixtureRequest, device: PlayedDevice) -> EngineFactory:
        return engine_on(device, request.param, pinned=True)


class TestSlowWhilePinning(OnPlayedDevice):
    @pytest.fixture
    def engine_factory(self, device: PlayedDevice) -> EngineFactory:
        device.before_copy = lambda dst: time.sleep(0.0005)
        device.before_pinning = lambda count: time.sleep(0.001)
        return engine_on(device, 2)


class TestPageable(OnPlayedDevice):
    @pytest.fixture
    def engine_factory(self, device: PlayedDevice) -> EngineFactory:
        device.before_pinning = refuse_from(0)
        return engine_on(device)


def refuse_from(piece: int) -> Callable[[int], None]:
    def refuse(count: int) -> None:
        if count >= piece:
            raise TransferError("out of memory")

    return refuse


def one(block: int) -> Blocks:
    return Blocks.make([block], (1,), (0,))


def test_reported_failure_stops_moving(device: PlayedDevice) -> None:
    device.before_copy = lambda dst: time.sleep(0.01)
    device.refused = {5, 11}
    with rig(engine_on(device)) as it:
        moving: list[int] = []
        woken = threading.Event()

        def wake() -> None:
            moving.append(device.under_way)
            woken.set()

        it.engine.set_wakeup(wake)
        it.engine.submit_store(1, Blocks.make(range(0, 16, 2), (8,), (0,)), range(8))
        it.engine.drain()
        (end,) = it.engine.finished()
        assert (end.transfer_id, str(end.error)) == (1, "error 1")
        assert woken.wait(20)
        assert moving == [0]
        it.store(2, Blocks.make(range(0, 16, 2), (8,), (0,)), range(8))
        it.check()


def test_refused_copy_gets_fresh_stream(device: PlayedDevice) -> None:
    device.before_copy = lambda dst: time.sleep(0.01)
    device.refused = {5}
    with rig(engine_on(device)) as it:
        before = device.opened
        it.store(1, Blocks.make(range(0, 16, 2), (8,), (0,)), range(8))
        it.engine.drain()
        assert device.opened == before + 1
        it.store(2, one(6), [9])
        it.check()
        assert device.copies == 6 + 16 + 2
        assert device.opened == before + 1
        assert device.plain  # the failure may be another copy method's
        assert [(end.error, end.attempt) for end in it.engine.finished()] == [
            (None, Attempt.RETRY),
            (None, Attempt.FIRST),
        ]


def test_next_starts_before_last_ends(device: PlayedDevice) -> None:
    gate = threading.Event()
    device.before_copy = lambda dst: gate.wait(20)
    with rig(engine_on(device)) as it:
        device.gate.hold(CopyQueue.STORE)
        for number in range(3):
            it.store(number, one(number), [number])
        device.gate.open()  # only now, so that all three exist before the first one is submitted
        wait_until(lambda: device.copies >= 4)
        time.sleep(0.02)
        assert device.copies == 4  # of two transfers with two pages each; the third one waits
        assert it.engine.finished() == []
        gate.set()
        it.check()
        assert [end.transfer_id for end in it.engine.finished()] == [0, 1, 2]


@pytest.mark.parametrize("refused", [1, 3, 7, 9])
def test_retry_keeps_order(device: PlayedDevice, refused: int) -> None:
    device.before_copy = lambda dst: time.sleep(0.005)
    device.refused = {refused}
    with rig(engine_on(device)) as it:
        for number in range(5):
            it.store(number, one(number), [7])  # the last writer stays
        it.check()
        ends = it.engine.finished()
        assert [(end.transfer_id, end.error) for end in ends] == [(number, None) for number in range(5)]


def test_hang_may_leave_both_moving(
    device: PlayedDevice,
) -> None:
    gate = threading.Event()
    device.before_copy = lambda dst: gate.wait(20)
    it = Rig(engine_on(device, deadline_s=2), Shape())  # by then two must have been submitted
    device.gate.hold(CopyQueue.LOAD)
    for number in range(3):
        it.engine.submit_load(number, [number], one(number))
    device.gate.open()
    it.engine.drain()
    kinds = {end.transfer_id: type(end.error) for end in it.engine.finished()}
    assert kinds == {0: DeviceStuckError, 1: DeviceStuckError, 2: DeviceLostError}
    it.close()
    gate.set()


def test_stuck_copy_stays_pinned(device: PlayedDevice) -> None:
    it = Rig(engine_on(device, pinned=True, deadline_s=0.1), Shape())
    gate = threading.Event()
    device.before_copy = lambda dst: gate.wait(20)
    it.engine.submit_load(1, [3], one(5))
    it.engine.drain()
    it.close()
    del it
    gc.collect()
    assert device.unpinned == []
    assert is_mapped(device.pieces[0][0])
    gate.set()


def test_second_failure_is_staged(device: PlayedDevice) -> None:
    blocks = Blocks.make(range(0, 16, 2), (8,), (0,))
    with rig(engine_on(device, pinned=True)) as it:
        it.store(1, blocks, range(8))
        it.engine.drain()
        it.engine.finished()
        device.refused = {device.copies + 3, device.copies + 4 + 2}
        first = device.copies + 4 + 3
        it.load(2, range(8), Blocks.make(range(1, 17, 2), (8,), (0,)))
        it.check()
        assert [(end.error, end.attempt) for end in it.engine.finished()] == [(None, Attempt.STAGED)]
        slots = range(it.region.address, it.region.address + it.region.nbytes)
        assert device.copies == first + 16
        assert not any(source in slots for source in device.sources[first:])


def test_failed_submission_fails_alone(device: PlayedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> PlayedEvent:
        raise TransferError("no event")

    with rig(engine_on(device)) as it:
        with monkeypatch.context() as patched:
            patched.setattr(device, "record_compute", refuse)
            it.engine.submit_store(1, one(5), [3])
        it.store(2, one(5), [3])
        it.check()
        assert [(end.transfer_id, str(end.error)) for end in it.engine.finished()] == [
            (1, "no event"),
            (2, "None"),
        ]


@pytest.mark.parametrize("piece_slots", [0, 1, 7, SLOTS, 100])
def test_slots_are_pinned_once(device: PlayedDevice, piece_slots: int) -> None:
    with rig(engine_on(device, piece_slots, pinned=True)) as it:
        assert device.pieces[0][0] == it.region.address
        ends = [address + nbytes for address, nbytes in device.pieces]
        assert [address for address, _ in device.pieces[1:]] == ends[:-1]
        assert ends[-1] == it.region.address + it.region.nbytes
        assert max(nbytes for _, nbytes in device.pieces) == min(max(piece_slots, 1), SLOTS) * CHUNK
        assert device.unpinned == []
        it.engine.close()
        assert device.unpinned == [address for address, _ in device.pieces]
        it.engine.close()
        assert len(device.unpinned) == len(device.pieces)


def test_unpinnable_is_copied(device: PlayedDevice, caplog: pytest.LogCaptureFixture) -> None:
    device.before_pinning = refuse_from(2)
    with rig(engine_on(device, 5)) as it:
        it.store(1, Blocks.make(range(SLOTS), (SLOTS,), (0,)), range(SLOTS))
        it.check()
        wait_until(lambda: it.engine.pinning.failed)
        assert it.engine.pinning == Pinning(10 * CHUNK, failed=True)
        it.engine.close()
        assert it.engine.pinning == Pinning(0, failed=True)
        assert device.unpinned == [it.region.address, it.region.address + 5 * CHUNK]
    (record,) = caplog.records
    assert record.getMessage().startswith(
        f"{10 * CHUNK} of {SLOTS * CHUNK} bytes of the primary tier are pinned, the rest cannot be (out of m"
    )


def test_slots_stay_pinned_in_copies(device: PlayedDevice) -> None:
    gate = threading.Event()
    device.before_copy = lambda dst: gate.wait(20)
    with rig(engine_on(device, pinned=True)) as it:
        it.store(1, one(5), [3])
        closing = threading.Thread(target=it.engine.close)
        closing.start()
        closing.join(0.05)
        unpinned_early = list(device.unpinned)
        gate.set()
        closing.join(20)
        assert unpinned_early == []
        assert len(device.unpinned) == 1


def test_failed_unpin_spares_others(
    device: PlayedDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unregister = device.host_unregister

    def stubborn(address: int) -> None:
        if address == device.pieces[0][0]:
            raise TransferError("not found")
        unregister(address)

    monkeypatch.setattr(device, "host_unregister", stubborn)
    with rig(engine_on(device, 8, pinned=True)) as it:
        it.engine.close()
        assert device.unpinned == [address for address, _ in device.pieces[1:]]
    assert "cannot be unpinned" in caplog.text


def test_pins_outlive_region_close(device: PlayedDevice) -> None:
    it = Rig(engine_on(device, pinned=True), Shape())
    it.region.close()
    it.engine.submit_store(1, one(1), [1])
    it.engine.drain()
    assert [end.error for end in it.engine.finished()] == [None]
    it.close()
    assert len(device.unpinned) == 1
    assert device.unmapped == []


def test_memory_precedes_pinning(device: PlayedDevice) -> None:
    with Region.unnamed(SLOTS, CHUNK) as region:
        allocated: list[int] = []
        device.before_pinning = lambda count: allocated.append(os.fstat(region.fileno()).st_blocks * 512)
        pinned = PinnedSlots(device, region, 5)
        wait_until(lambda: pinned.state.nbytes == region.nbytes)
        pinned.close()
        ends = [address + nbytes - region.address for address, nbytes in device.pieces]
        assert all(found >= end for found, end in zip(allocated, ends, strict=True))
