"""Audits of real copies: they accept correct copies, change nothing, and detect wrong copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier import PageMapping
from kvtier._device._engine import TransferEngine
from kvtier._device.backends.cpu import CpuRuntime, HostStream, copy_batch, copy_each
from kvtier._device.base import Attempt, Audits, Blocks, CopyQueue, Finished, PieceRun
from kvtier._device.plan import CopyPlan
from kvtier._memory.slot_checksums import Fault, SlotChecksums, slot_checksums_bytes
from kvtier.errors import AuditError, BlocksChangedError, DamagedSlotError
from kvtier_testing.device import Rig, Shape, rig
from tests.effort import effort

PLAIN = Shape(blocks_per_chunk=2)
OWN_AREAS = Shape(blocks_per_chunk=2, workers=3, rank=1)
HYBRID = Shape((512, 192, 64), groups=(((0, 512), (1, 100)), ((2, 64),)), blocks_per_chunk=2)
GAPS = Shape((512, 192, 64), gaps=(64, 0, 1), blocks_per_chunk=2)
HALF_OF_HEADS = PageMapping(1024, (PieceRun(0, 32, 32, 16, 32, 64),), writers=2, writer=1)
SHARED = Shape((512, 192), mappings=(HALF_OF_HEADS,), blocks_per_chunk=2)
SHAPES = [PLAIN, OWN_AREAS, HYBRID, GAPS, SHARED]

SLOTS = [9, 3, 14, 5]
STORED = {2: Blocks.make(range(4, 12), (4, 4), (2, 6)), 1: Blocks.make(range(4, 12), (8,), (2,))}
LOADED = {2: Blocks.make(range(47, 39, -1), (4, 4), (2, 6)), 1: Blocks.make(range(47, 39, -1), (8,), (2,))}


@pytest.fixture(autouse=True)
def evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "kvtier" / "evidence"


class LoadsAlike(CpuRuntime):
    """Makes every load attempt with the one function that audits do not use."""

    def __init__(self, copy: Callable[[CopyPlan], None]) -> None:
        self._copy = copy

    def open_stream(self, queue: CopyQueue, *, plain: bool = False) -> HostStream:
        return HostStream(copy_each if plain and queue is CopyQueue.STORE else self._copy)


@contextmanager
def audited(
    shape: Shape, copy: Callable[[CopyPlan], None] = copy_batch, rate: float = 1.0
) -> Iterator[tuple[Rig, SlotChecksums]]:
    with rig(partial(TransferEngine, runtime=LoadsAlike(copy)), shape) as it:
        words = memoryview(bytearray(slot_checksums_bytes(shape.slots, shape.workers)))
        area_bytes = it.shape.layout.area_bytes
        shared = any(shape.mappings)
        slot_checksums = SlotChecksums(it.region, words, rate, shape.workers, area_bytes, is_shared=shared)
        it.engine.begin_audits(slot_checksums)
        yield it, slot_checksums


def store(it: Rig) -> Finished:
    it.store(1, STORED[len(it.caches.groups)], SLOTS)
    it.engine.drain()
    return ended(it)


def load(it: Rig, *, expedited: bool = False) -> Finished:
    it.engine.submit_load(2, SLOTS, LOADED[len(it.caches.groups)], expedited=expedited)
    it.engine.drain()
    return ended(it)


def ended(it: Rig) -> Finished:
    (one,) = it.engine.finished()
    return one


def flip(it: Rig, slot: int, byte: int) -> None:
    it.region.view(slot)[byte] ^= 0x40


class Crooked:
    """Sometimes exchanges the places of two pages."""

    def __init__(self, *at: int) -> None:
        self.count = 0
        self._at = at

    def __call__(self, plan: CopyPlan) -> None:
        self.count += 1
        if self.count in self._at:
            dst = plan.dst.copy()
            dst[[0, 1]] = dst[[1, 0]]
            plan = CopyPlan(plan.src, dst, np.minimum(plan.sizes, plan.sizes[:2].min()))
        copy_batch(plan)


def test_partial_loads_are_audited() -> None:
    with audited(PLAIN) as (it, _):
        store(it)
        it.load(2, SLOTS[1:3], Blocks.make([40, 41, 42], (3,), (5,)))
        it.check()
        assert it.engine.audits == Audits(len(SLOTS) + 2, 0)
        flip(it, SLOTS[1], 0)  # the bytes of a block that the load skips: the slot has changed nevertheless
        it.engine.submit_load(3, SLOTS[1:3], Blocks.make([40, 41, 42], (3,), (5,)))
        it.engine.drain()
        assert isinstance(it.engine.finished()[-1].error, DamagedSlotError)


class Rewriting:
    """Copies while an engine writes to a block of the store, at one of three moments."""

    def __init__(self, *, before: bool = False, within: bool = False, after: bool = False) -> None:
        self.rewrite: Callable[[], object] = bool
        self._moments = before, within, after

    def __call__(self, plan: CopyPlan) -> None:
        before, within, after = self._moments
        if before:
            self.rewrite()
        half = len(plan.src) // 2
        copy_batch(CopyPlan(plan.src[:half], plan.dst[:half], plan.sizes[:half]))
        if within:
            self.rewrite()
        copy_batch(CopyPlan(plan.src[half:], plan.dst[half:], plan.sizes[half:]))
        if after:
            self.rewrite()


@pytest.mark.parametrize("moment", ["before", "within", "after"])
@pytest.mark.parametrize("shape", SHAPES)
def test_rewritten_blocks_are_excused(shape: Shape, moment: str) -> None:
    copies = Rewriting(**{moment: True})
    with audited(shape, copies) as (it, slot_checksums):
        block = int(STORED[len(it.caches.groups)].ids[-1])
        copies.rewrite = lambda: [tensor[block].bitwise_not_() for tensor in it.caches.tensors]
        error = store(it).error
        assert isinstance(error, BlocksChangedError)
        assert it.engine.audits.failed == 0
        assert not any(slot_checksums.take_fault(slot) for slot in SLOTS)
        copies.rewrite = bool
        assert store(it).error is None, "the device is not lost"


@pytest.mark.parametrize("shape", [PLAIN, OWN_AREAS, HYBRID, GAPS])
@settings(
    max_examples=effort(10, 50),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_changed_byte_is_found(shape: Shape, data: st.DataObject) -> None:
    layout = shape.layout
    start = layout.rank * layout.area_bytes
    slot = data.draw(st.sampled_from(range(shape.slots)))
    byte = data.draw(st.integers(0, layout.chunk_bytes - 1))
    with audited(shape) as (it, slot_checksums):
        store(it)
        flip(it, slot, byte)
        error = load(it, expedited=data.draw(st.booleans())).error
        concerned = slot in SLOTS and start <= byte < start + layout.area_bytes
        assert isinstance(error, DamagedSlotError) == concerned
        assert (error is None) != concerned
        assert it.engine.audits.failed == concerned
        assert bool(slot_checksums.take_fault(slot)) == concerned


def test_changed_slot_is_not_retried(evidence: Path) -> None:
    copies = Crooked()
    with audited(PLAIN, copies) as (it, slot_checksums):
        store(it)
        flip(it, SLOTS[2], 700)
        end = load(it)
        assert "slot 14" in str(end.error)
        assert (end.attempt, copies.count) == (Attempt.FIRST, 2)
        (kept,) = evidence.glob("*.slot")
        held = kept.read_bytes()
        assert held == it.region.view(SLOTS[2])[: len(held)]
        assert kept.with_suffix(".device").read_bytes() == held  # the device has just received it
        assert slot_checksums.take_fault(SLOTS[2]) is Fault.SLOT
        assert not slot_checksums.take_fault(SLOTS[1])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("wrong", [1, 2], ids=["store", "load"])
def test_misplaced_copy_is_repeated(shape: Shape, wrong: int) -> None:
    with audited(shape, Crooked(wrong)) as (it, slot_checksums):
        ends = [store(it)]
        it.load(2, SLOTS, LOADED[len(it.caches.groups)])
        it.check()
        ends.append(ended(it))
        assert [end.error for end in ends] == [None, None]
        assert (ends[wrong - 1].attempt, it.engine.audits.failed) == (Attempt.RETRY, 1)
        assert any(slot_checksums.take_fault(slot) & Fault.COPY for slot in SLOTS)


def test_misplaced_load_keeps_device() -> None:
    with audited(PLAIN, Crooked(*range(2, 100))) as (it, _):
        it.engine.stages_loads = False
        store(it)
        for _ in range(6):
            error = load(it).error
            assert type(error) is AuditError


def test_reused_slot_is_forgotten() -> None:
    with audited(PLAIN) as (it, slot_checksums):
        store(it)
        slot_checksums.rate = 0.0
        it.store(2, Blocks.make(range(20, 28), (8,), (2,)), SLOTS)
        it.engine.drain()
        it.engine.finished()
        assert slot_checksums.audited(SLOTS) == []
        assert load(it).error is None


def test_promoted_bytes_are_expected() -> None:
    with audited(SHARED) as (it, slot_checksums):  # its workers cannot describe every byte of a slot
        store(it)
        assert slot_checksums.audited(SLOTS) == []
        slot_checksums.record_checksums(SLOTS)
        assert load(it).error is None
        flip(it, SLOTS[1], 1)
        assert isinstance(load(it).error, DamagedSlotError)


def test_frequent_loads_are_audited_less() -> None:
    with audited(PLAIN) as (it, slot_checksums):
        store(it)
        slot_checksums.rate = 0.0
        counts = []
        for _ in range(9):
            assert load(it).error is None
            counts.append(it.engine.audits.chunks // len(SLOTS) - 1)
        assert counts == [1, 2, 2, 3, 3, 3, 3, 4, 4]
        it.region.view(SLOTS[0])[:] = it.region.view(SLOTS[1])  # another chunk, as after a promotion
        slot_checksums.record_checksums(SLOTS[:1])
        load(it)
        assert it.engine.audits.chunks == 5 * len(SLOTS) + 1
