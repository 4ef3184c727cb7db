"""The worker's side without an engine: failed copies and the reports to the scheduler."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from kvtier import KVCaches, PageRef
from kvtier._core.tiering import Tiering
from kvtier._device._engine import TransferEngine
from kvtier._device.backends.cpu import copy_batch
from kvtier._device.plan import CopyPlan
from kvtier._memory.layout import SlotLayout
from kvtier._memory.region import Region
from kvtier._memory.worker_status import (
    StatusField,
    StatusTable,
    Unfilled,
    WorkerStatus,
    status_table_bytes,
)
from kvtier.adapters.vllm._manager import Slots
from kvtier.adapters.vllm._telemetry.metrics import Published
from kvtier.adapters.vllm._worker import KVTierWorker, end_copies
from kvtier.adapters.vllm.spec import _shut_down
from kvtier.errors import TransferError
from kvtier.policies import LRU
from kvtier_testing.device_model import GivenCopies

SLOTS = 8
PAGE = 4096


class Bench:
    """A worker over in-memory tensors, and the scheduler's view of it. ``failures`` copies fail.

    ``hold``: copies do not end while this is set. ``made``: number of copies that have ended.
    """

    def __init__(self, deadline_s: float = 60, *, flushes_late: bool = False) -> None:
        caches = KVCaches((torch.zeros((SLOTS, PAGE), dtype=torch.int8),), ((PageRef(0, PAGE),),))
        layout = SlotLayout.make(caches.page_bytes, 1)
        status_table = memoryview(bytearray(status_table_bytes(SLOTS, 1)))
        region = Region.anonymous(SLOTS, layout.chunk_bytes)
        engine = TransferEngine(caches, layout, region, GivenCopies(self._copy), deadline_s=deadline_s)
        self.failures = 0
        self.hold = False
        self.made = 0
        self._go_on = threading.Event()
        row = WorkerStatus(status_table, SLOTS, 0)
        self.worker = KVTierWorker(engine, region, row, flushes_late=flushes_late)
        self.status_table = StatusTable(status_table, SLOTS, 1)
        self.published = Published(Tiering(LRU()), (), self.status_table)
        self._last_job = 0

    def store(self, *slots: int) -> None:
        self._last_job += 1
        self.worker.submit_store(self._last_job, _blocks(slots), Slots(list(slots), chunks=[len(slots)]))

    def load(self, *slots: int, request: str = "r", expedited: bool = False) -> None:
        self._last_job += 1
        spec = Slots(list(slots), request)
        self.worker.submit_load(self._last_job, spec, _blocks(slots), expedited)

    def finish(self) -> list[bool]:
        """Let all copies end; return what the worker reports to vLLM."""
        self.worker.wait(set(range(self._last_job + 1)))
        return [result.success for result in self.worker.get_finished()]

    def close(self) -> None:
        self.release()
        self.worker.shutdown()

    def release(self) -> None:
        """Release the held copies."""
        self._go_on.set()

    def counts(self) -> dict[Any, float]:
        return self.published.take_worker_counts()

    def _copy(self, plan: CopyPlan) -> None:
        if self.hold:
            assert self._go_on.wait(20)
        if self.failures:
            self.failures -= 1
            raise OSError("told to fail")
        copy_batch(plan)
        self.made += 1


def _blocks(slots: tuple[int, ...]) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(list(slots), group_sizes=(len(slots),), block_indices=(0,))


@pytest.fixture
def it() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


@pytest.fixture
def impatient() -> Iterator[Bench]:
    """A bench whose copies hang, and which gives up soon."""
    bench = Bench(deadline_s=0.2)
    bench.hold = True
    yield bench
    bench.close()


def test_store_without_chunk_counts_refused(it: Bench) -> None:
    with pytest.raises(ValueError, match="1 slots for 0 chunks"):
        it.worker.submit_store(1, _blocks((0,)), Slots([0]))


@pytest.mark.parametrize("flushes_late", [False, True])
def test_overwritten_store_is_dropped(flushes_late: bool) -> None:
    bench = Bench(flushes_late=flushes_late)
    bench.store(1, 2)
    bench.store(3)
    bench.load(4)
    bench.worker.wait({1, 3})
    bench.worker.wait({1})
    changed = dict.fromkeys([1, 2], Unfilled.CHANGED)
    assert bench.status_table.take_marks([1, 2]) == (changed if flushes_late else {})
    assert not bench.status_table.take_marks([3, 4])
    assert bench.finish() == [True, True, True]
    bench.close()


@pytest.mark.parametrize("chunks", [1, SLOTS])
def test_load_is_one_copy(it: Bench, chunks: int) -> None:
    it.load(*range(chunks)[::-1])
    assert it.finish() == [True]
    assert it.made == 1


def test_failed_load_told_once(it: Bench, caplog: pytest.LogCaptureFixture) -> None:
    it.worker.report_failed_loads()
    it.failures = 2
    it.load(1, request="first\nERROR forged")
    it.load(2, request="second")
    assert it.finish() == [True, True]
    assert it.worker.take_failed_requests() == {"first\nERROR forged"}
    assert "load of request 'first\\nERROR forged' failed" in caplog.text
    assert it.worker.take_failed_requests() == set()
    assert it.counts() == {("copy_failed", "load", "recomputed"): 1}


def test_unreportable_load_is_staged(it: Bench) -> None:
    it.failures = 2
    it.load(1)
    assert it.finish() == [True]
    assert it.counts() == {("copy_failed", "load", "staged"): 1}
    it.failures = 3
    it.load(1)
    with pytest.raises(TransferError, match="a copy of 1 chunks failed in every way: told to fail"):
        it.finish()


def test_awaited_load_is_not_late(it: Bench) -> None:
    it.worker.report_failed_loads()
    it.failures = 3
    it.load(1, expedited=True)
    with pytest.raises(TransferError):
        it.finish()
    assert it.worker.take_failed_requests() == set()


def test_endless_store_drops_device(impatient: Bench) -> None:
    impatient.store(2, 3)
    impatient.store(4)
    assert impatient.finish() == [True, True]
    assert impatient.status_table.is_lost
    assert [*impatient.status_table.take_marks([2, 4])] == [2, 4]


@pytest.mark.parametrize("can_tell", [False, True])
def test_endless_load_is_an_error(impatient: Bench, can_tell: bool) -> None:
    if can_tell:
        impatient.worker.report_failed_loads()
    impatient.load(1, request="stuck")
    impatient.load(2, request="behind")
    with pytest.raises(TransferError, match=r"a load of 1 chunks does not end: .* within 0.2 s"):
        impatient.worker.wait({1})
    with pytest.raises(TransferError, match="a load of 1 chunks does not end"):
        impatient.worker.get_finished()
    assert impatient.status_table.is_lost
    assert impatient.worker.take_failed_requests() == set()


def test_waiting_hides_no_hang(impatient: Bench) -> None:
    impatient.load(1)
    impatient.store(5)
    impatient.worker.wait({2})
    with pytest.raises(TransferError):
        impatient.worker.wait({1, 2})


def test_no_copy_touches_a_suspended_cache(it: Bench) -> None:
    it.worker.report_failed_loads()
    it.hold = True
    it.store(1)
    it.load(2)
    threading.Timer(0.05, it.release).start()
    it.worker.suspend()
    assert it.made == 2
    it.store(3)
    it.load(4, request="asleep")
    assert it.finish() == [True] * 4
    assert it.made == 2
    assert [*it.status_table.take_marks([1, 3])] == [3]
    assert it.worker.take_failed_requests() == {"asleep"}
    it.worker.resume()
    it.store(5)
    assert it.finish() == [True]
    assert it.made == 3
    assert not it.status_table.take_marks([5])


def test_a_forked_child_awaits_no_copies_of_its_parent(it: Bench) -> None:
    it.hold = True
    it.store(1)
    child = os.fork()
    if not child:
        signal.alarm(20)
        end_copies()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


class Closing:
    """An executor that records the seconds that it gets to close."""

    def close(self, drain_s: float, close_s: float) -> bool:
        self.given_s = (drain_s, close_s)
        return True


def test_drain_starts_after_workers() -> None:
    """vLLM waits for its workers first, and its limit for both is 5 s."""
    bench = Bench()
    executor: Any = Closing()
    bench.worker.shutdown()
    bench.status_table.rows[0][StatusField.STOPPED_MS] -= 2_000
    _shut_down(executor, Region.anonymous(SLOTS, PAGE), bench.status_table, 3.0)
    drain_s, close_s = executor.given_s
    assert 0 <= drain_s <= 1.0
    assert close_s <= 1.5
