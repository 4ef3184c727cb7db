"""The contract of a device backend as tests: subclass ``DeviceConformance`` and run it with pytest.

Every test compares the whole memory with ``TransferModel``, which makes the same transfers page by page in
plain Python: what must change has changed, and nothing else has.

Over a stand-in for a device the suite checks an engine's logic, and nothing of the hardware.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

import pytest
import torch

from kvtier import KVCaches, PageMapping, PageRef
from kvtier._device.base import Blocks, CopyQueue, Run, TransferEngine
from kvtier._memory.layout import SlotLayout
from kvtier._memory.region import Region
from kvtier._memory.slot_checksums import SlotChecksums
from kvtier.errors import DamagedSlotError, DeviceLostError, DeviceStuckError, StateError

EngineFactory = Callable[[KVCaches, SlotLayout, Region], TransferEngine]

GatedFactory = Callable[[float], EngineFactory]
"""Takes a deadline in seconds; makes engines whose copies go through the gate of the test."""


class Compute:
    """What the engine computes on the device, as far as the tests play it: the current stream of torch."""

    def run(self, work: Callable[[], object]) -> None:
        """Give the device work, which need not be done when this returns."""
        work()

    def finish(self) -> None:
        """Block until all work is done."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()


class Gate:
    """Holds copies up, in the threads of the queues. To be passed before the first byte moves."""

    def __init__(self) -> None:
        self._held: set[str] = set()
        self._opened = threading.Condition()

    def hold(self, *queues: CopyQueue) -> None:
        """Block copies of these queues from now on."""
        with self._opened:
            self._held.update(queues)

    def open(self) -> None:
        """Unblock all copies."""
        with self._opened:
            self._held.clear()
            self._opened.notify_all()

    def go_through(self) -> None:
        """Block while the queue of the calling thread is held."""
        name = threading.current_thread().name
        with self._opened:
            self._opened.wait_for(lambda: name not in self._held, 60)


@dataclass(frozen=True)
class Shape:
    """The tensors and slots of one test.

    Attributes:
        page_bytes: bytes of a block in each tensor.
        gaps: bytes between the rows of each tensor; missing ones are 0.
        groups: for each group its (tensor, used bytes) pairs; by default one group uses all of all.
        mappings: how the pages of each tensor lie in canonical ones; missing ones are None. A page that
            has a mapping is used whole.
        num_blocks, slots: rows of each tensor, and slots of the region.
        blocks_per_chunk, rank, workers: as in ``SlotLayout.make``.
    """

    page_bytes: tuple[int, ...] = (512, 192)
    gaps: tuple[int, ...] = ()
    groups: tuple[tuple[tuple[int, int], ...], ...] = ()
    mappings: tuple[PageMapping | None, ...] = ()
    num_blocks: int = 48
    slots: int = 24
    blocks_per_chunk: int = 1
    rank: int = 0
    workers: int = 1

    @property
    def layout(self) -> SlotLayout:
        """The layout of the slots."""
        pages = [
            mapping.canonical_bytes if mapping is not None else page
            for page, mapping in zip_longest(self.page_bytes, self.mappings)
        ]
        return SlotLayout.make(pages, self.blocks_per_chunk, self.rank, self.workers)

    def page_refs(self) -> tuple[tuple[PageRef, ...], ...]:
        """The groups as ``KVCaches`` takes them."""
        groups = self.groups or (tuple(enumerate(self.page_bytes)),)
        mappings = dict(enumerate(self.mappings))
        return tuple(
            tuple(PageRef(tensor, used, mappings.get(tensor)) for tensor, used in group) for group in groups
        )


class TransferModel:
    """What transfers do, as plainly as it can be said. Takes part in no copy.

    Attributes:
        rows: for each tensor its rows, gaps included.
        slots: the slots' bytes.
    """

    def __init__(self, shape: Shape, rows: list[list[bytearray]], slots: list[bytearray]) -> None:
        self._layout = shape.layout
        self._groups = shape.page_refs()
        self.rows = rows
        self.slots = slots

    def store(self, blocks: Blocks, slots: Sequence[int]) -> None:
        """Do what ``submit_store`` does."""
        for ref, row, slot, page, turn in self._pages(blocks, slots):
            if ref.mapping is None or turn % ref.mapping.writers == ref.mapping.writer:
                for here, there, size in _pieces(ref):
                    slot[page + there : page + there + size] = row[here : here + size]

    def load(self, slots: Sequence[int], blocks: Blocks) -> None:
        """Do what ``submit_load`` does."""
        for ref, row, slot, page, _ in self._pages(blocks, slots):
            for here, there, size in _pieces(ref):
                row[here : here + size] = slot[page + there : page + there + size]

    def nbytes(self, blocks: Blocks) -> int:
        """Count the bytes that a load of ``blocks`` moves; and a store, where this worker writes all."""
        return sum(
            size * sum(ref.page_bytes for ref in refs)
            for size, refs in zip(blocks.group_sizes, self._groups, strict=True)
        )

    def _pages(
        self, blocks: Blocks, slots: Sequence[int]
    ) -> Iterator[tuple[PageRef, bytearray, bytearray, int, int]]:
        """Yield each page: its row, its slot, where it begins in the slot, and its number in all slots."""
        ids, coming = iter(blocks.ids.tolist()), iter(slots)
        per_chunk = self._layout.blocks_per_chunk
        for refs, size, first in zip(self._groups, blocks.group_sizes, blocks.first_indices, strict=True):
            slot = 0
            for index in range(first, first + size):
                sub_block = index % per_chunk
                if index == first or sub_block == 0:
                    slot = next(coming)
                block = next(ids)
                for ref in refs:
                    page = self._layout.offset(ref.tensor, sub_block)
                    row = self.rows[ref.tensor][block]
                    yield ref, row, self.slots[slot], page, slot * per_chunk + sub_block


def _pieces(ref: PageRef) -> Iterator[tuple[int, int, int]]:
    """Yield where each piece of a page is in the row, where in the slot's page, and its length."""
    if ref.mapping is None:
        yield 0, 0, ref.page_bytes
        return
    for run in ref.mapping.runs:
        for number in range(run.pieces):
            here = run.local_offset + number * run.local_stride
            yield here, run.canonical_offset + number * run.canonical_stride, run.piece_bytes


class Rig:
    """An engine over patterned tensors and slots, and the model beside it.

    Attributes:
        shape: the tensors and slots.
        caches: the tensors as the engine has them.
        region: the slots.
        engine: what is tested.
        model: what should come of it.
    """

    def __init__(self, factory: EngineFactory, shape: Shape, device: str = "cpu", seed: int = 1) -> None:
        noise = random.Random(seed)
        self.shape = shape
        self.region = Region.anonymous(shape.slots, shape.layout.chunk_bytes)
        gaps = shape.gaps + (0,) * (len(shape.page_bytes) - len(shape.gaps))
        widths = [page + gap for page, gap in zip(shape.page_bytes, gaps, strict=True)]
        rows = [[bytearray(noise.randbytes(width)) for _ in range(shape.num_blocks)] for width in widths]
        slots = [bytearray(noise.randbytes(shape.layout.chunk_bytes)) for _ in range(shape.slots)]
        self._whole = [_tensor(table, device) for table in rows]
        for slot, content in enumerate(slots):
            self.region.view(slot)[:] = content
        tensors = tuple(whole[:, :page] for whole, page in zip(self._whole, shape.page_bytes, strict=True))
        self.caches = KVCaches(tensors, shape.page_refs())
        self.model = TransferModel(shape, rows, slots)
        self.engine = factory(self.caches, shape.layout, self.region)

    def store(self, transfer_id: int, blocks: Blocks, slots: Sequence[int]) -> None:
        """Submit a store, and do it in the model."""
        self.engine.submit_store(transfer_id, blocks, slots)
        self.model.store(blocks, slots)

    def load(
        self, transfer_id: int, slots: Sequence[int], blocks: Blocks, *, expedited: bool = False
    ) -> None:
        """Submit a load, and do it in the model."""
        self.engine.submit_load(transfer_id, slots, blocks, expedited=expedited)
        self.model.load(slots, blocks)

    def check_there_and_back(self, blocks: Blocks, slots: Sequence[int], target: Blocks) -> None:
        """Store blocks, load them into others, and check all bytes after each."""
        self.store(1, blocks, slots)
        self.check()
        self.load(2, slots, target)
        self.check()

    def paint(self, compute: Compute, block: int, value: int) -> None:
        """Compute all bytes of a block on the device, and write them in the model."""
        pages = self.caches.tensors
        compute.run(partial(_fill, [tensor[block] for tensor in pages], value))
        for tensor, rows in zip(pages, self.model.rows, strict=True):
            width = tensor.shape[1]
            rows[block][:width] = bytes([value]) * width

    def check(self) -> None:
        """Wait for all transfers and compare all bytes with the model."""
        self.engine.drain()
        for index, (whole, rows) in enumerate(zip(self._whole, self.model.rows, strict=True)):
            for block, (found, expected) in enumerate(zip(whole.cpu(), rows, strict=True)):
                assert found.numpy().tobytes() == expected, f"tensor {index}, block {block}"
        for slot, expected in enumerate(self.model.slots):
            assert self.region.view(slot) == expected, f"slot {slot}"

    def close(self) -> None:
        """Close engine and region."""
        self.engine.close()
        self.region.close()


@contextmanager
def rig(factory: EngineFactory, shape: Shape | None = None, device: str = "cpu") -> Iterator[Rig]:
    """Make a ``Rig`` and close it at the end."""
    made = Rig(factory, shape or Shape(), device)
    try:
        yield made
    finally:
        made.close()


def _fill(pages: Sequence[torch.Tensor], value: int) -> None:
    for page in pages:
        page.fill_(value)


def _tensor(rows: list[bytearray], device: str) -> torch.Tensor:
    flat = torch.frombuffer(bytearray().join(rows), dtype=torch.int8)
    return flat.reshape(len(rows), -1).to(device)


def _run(first_id: int, count: int, first_index: int = 0) -> Blocks:
    """Make blocks of one group: neighbours, from ``first_id`` on."""
    return Blocks.make(range(first_id, first_id + count), (count,), (first_index,))


def _half_of_heads(rank: int) -> PageMapping:
    """Map 16 tokens of 32 bytes to half of a page in which a token has 64; ranks 0 and 1 hold the first."""
    run = Run(0, rank // 2 * 32, 32, 16, 32, 64)
    return PageMapping(1024, (run,), writers=2, writer=rank % 2)


class DeviceConformance:
    """Tests of the contract of ``TransferEngine``. A subclass has the fixture ``engine_factory``.

    Attributes:
        device: torch device of the tensors.
    """

    device = "cpu"

    @pytest.fixture
    def engine_factory(self) -> EngineFactory:
        """Return what makes the engine of given tensors, layout and region."""
        raise NotImplementedError("a conformance test needs the fixture engine_factory")

    @pytest.fixture
    def compute(self) -> Compute:
        """Return what the engine computes with."""
        return Compute()

    @pytest.fixture
    def gate(self) -> Iterator[Gate]:
        """Return what holds copies up; everybody is let through at the end."""
        gate = Gate()
        yield gate
        gate.open()

    @pytest.fixture
    def gated_factory(self, gate: Gate) -> GatedFactory:
        """Return what makes engines whose copies go through ``gate``."""
        raise NotImplementedError("a conformance test needs the fixture gated_factory")

    @pytest.mark.parametrize(
        "shape",
        [
            Shape(),
            Shape(blocks_per_chunk=2),
            Shape(blocks_per_chunk=4),
            Shape((512, 192, 64), gaps=(64, 0, 1), blocks_per_chunk=2),
            Shape((4096,), blocks_per_chunk=2),  # the chunks of the only tensor are neighbours
            Shape(rank=1, workers=3, blocks_per_chunk=2),
        ],
    )
    def test_whole_chunks_there_and_back(self, engine_factory: EngineFactory, shape: Shape) -> None:
        with rig(engine_factory, shape, self.device) as it:
            slots = random.Random(2).sample(range(24), 16 // shape.blocks_per_chunk)
            it.check_there_and_back(_run(3, 16), slots, Blocks.make(range(47, 31, -1), (16,), (0,)))
            it.store(3, _run(3, 16), sorted(slots))
            it.check()

    @pytest.mark.parametrize("blocks_per_chunk", [2, 4])
    @pytest.mark.parametrize("first", [0, 1, 3, 6])
    @pytest.mark.parametrize("count", [1, 2, 5, 8])
    def test_first_and_last_chunk_may_be_partial(
        self, engine_factory: EngineFactory, blocks_per_chunk: int, first: int, count: int
    ) -> None:
        with rig(engine_factory, Shape(blocks_per_chunk=blocks_per_chunk), self.device) as it:
            blocks = _run(10, count, first)
            slots = list(range(20, 20 - sum(blocks.slots_needed(blocks_per_chunk)), -1))
            it.check_there_and_back(blocks, slots, _run(30, count, first))

    @pytest.mark.parametrize("blocks_per_chunk", [1, 2, 4])
    def test_groups_take_their_slots_in_order(
        self, engine_factory: EngineFactory, blocks_per_chunk: int
    ) -> None:
        groups = (((0, 512), (1, 100)), ((2, 64),), ((1, 192), (2, 63)), ((0, 1),))
        shape = Shape((512, 192, 64), groups=groups, blocks_per_chunk=blocks_per_chunk)
        with rig(engine_factory, shape, self.device) as it:
            sizes, firsts = (5, 0, 3, 4), (2, 3, 1, 8)
            blocks = Blocks.make(random.Random(3).sample(range(24), 12), sizes, firsts)
            slots = list(range(sum(blocks.slots_needed(blocks_per_chunk))))
            it.check_there_and_back(blocks, slots, Blocks.make(range(24, 36), sizes, firsts))

    @pytest.mark.parametrize("rank", range(4))
    @pytest.mark.parametrize("blocks_per_chunk", [1, 3])
    def test_pages_go_to_their_places_in_canonical_ones(
        self, engine_factory: EngineFactory, rank: int, blocks_per_chunk: int
    ) -> None:
        # Four workers: two halves of the heads, each held twice; a latent that all four hold; a page of
        # as many bytes but in another order; a plain page.
        latent = PageMapping(192, (Run(0, 0, 192),), writers=4, writer=rank)
        turned = PageMapping(96, (Run(0, 64, 32), Run(32, 0, 64)))
        mappings = (_half_of_heads(rank), latent, turned)
        shape = Shape((512, 192, 96, 40), mappings=mappings, blocks_per_chunk=blocks_per_chunk)
        with rig(engine_factory, shape, self.device) as it:
            blocks = _run(3, 14, 1)
            slots = random.Random(4).sample(range(24), sum(blocks.slots_needed(blocks_per_chunk)))
            it.store(1, blocks, slots)
            it.check()
            it.load(2, slots, Blocks.make(range(47, 33, -1), (14,), (1,)))
            it.check()

    @pytest.mark.parametrize("blocks_per_chunk", [1, 4])
    def test_audits_hold_and_find_what_has_changed(
        self, engine_factory: EngineFactory, blocks_per_chunk: int
    ) -> None:
        shape = Shape(blocks_per_chunk=blocks_per_chunk)
        with rig(engine_factory, shape, self.device) as it:
            it.engine.begin_audits(SlotChecksums.private(it.region, 1.0, shape.layout.area_bytes))
            slots = random.Random(2).sample(range(24), 16 // blocks_per_chunk)
            it.store(1, _run(3, 16), slots)
            it.check()
            it.load(2, slots, Blocks.make(range(47, 31, -1), (16,), (0,)))
            it.load(3, slots[:1], _run(20, blocks_per_chunk), expedited=True)
            it.check()
            assert [end.error for end in it.engine.finished()] == [None] * 3
            if not it.engine.audits.chunks:
                pytest.skip("this engine does not audit")
            assert (it.engine.audits.chunks, it.engine.audits.failed) == (2 * len(slots) + 1, 0)
            it.region.view(slots[-1])[7] ^= 1
            it.engine.submit_load(4, slots, _run(3, 16))
            it.engine.drain()
            (end,) = it.engine.finished()
            assert isinstance(end.error, DamagedSlotError)

    def test_stores_and_loads_happen_in_order(self, engine_factory: EngineFactory) -> None:
        with rig(engine_factory, device=self.device) as it:
            for number in range(0, 40, 2):
                it.store(number, _run(number // 2, 8), range(8))  # the last one to write stays
                it.load(number + 1, range(8 + number // 5, 16 + number // 5), _run(40, 8))
            it.check()
            ended = [end.transfer_id for end in it.engine.finished()]
            assert [number for number in ended if number % 2 == 0] == list(range(0, 40, 2))
            assert [number for number in ended if number % 2] == list(range(1, 40, 2))

    @pytest.mark.parametrize("awaited", [False, True])
    def test_a_store_takes_what_was_computed_before_it_and_nothing_later(
        self, engine_factory: EngineFactory, compute: Compute, awaited: bool
    ) -> None:
        with rig(engine_factory, device=self.device) as it:
            for number in range(16):
                block = 5 if awaited else number
                it.paint(compute, block, 17 + number)
                it.store(number, _run(block, 1), [number])
                if awaited:
                    it.engine.wait([number])
                it.paint(compute, block if awaited else 24 + number, 100 + number)
            compute.finish()
            it.check()

    @pytest.mark.parametrize("expedited", [False, True])
    def test_a_load_comes_after_what_was_to_be_written_to_its_blocks(
        self, engine_factory: EngineFactory, compute: Compute, expedited: bool
    ) -> None:
        with rig(engine_factory, device=self.device) as it:
            for number in range(16):
                it.paint(compute, number, 0)
                it.load(number, [number], _run(number, 1), expedited=expedited)
            compute.finish()
            it.check()

    @pytest.mark.parametrize("seed", range(3))
    def test_all_at_once(self, engine_factory: EngineFactory, compute: Compute, seed: int) -> None:
        # Stores from blocks 0 to 23 to slots 0 to 11, loads from the other slots to the other blocks; a
        # block is computed anew only when what was stored of it has been.
        noise = random.Random(seed)
        with rig(engine_factory, Shape(blocks_per_chunk=2), self.device) as it:
            last_store: dict[int, int] = {}
            for number in range(0, 240, 2):
                block = noise.randrange(23)
                it.engine.wait({last_store.get(block, -1), last_store.get(block + 1, -1)})
                it.paint(compute, block, noise.randrange(128))
                it.store(number, _run(block, 2), [noise.randrange(12)])
                last_store[block] = last_store[block + 1] = number
                slots, target = [noise.randrange(12, 24)], 24 + 2 * noise.randrange(12)
                it.load(number + 1, slots, _run(target, 2))
            compute.finish()
            it.check()

    def test_a_store_and_an_expedited_load_overtake_a_load(
        self, gated_factory: GatedFactory, gate: Gate
    ) -> None:
        with rig(gated_factory(60), device=self.device) as it:
            gate.hold(CopyQueue.LOAD)
            it.load(1, [1], _run(1, 1))
            it.load(2, [2], _run(2, 1))
            it.load(3, [3], _run(3, 1), expedited=True)
            it.store(4, _run(5, 1), [7])
            it.engine.wait([3, 4])
            assert sorted(end.transfer_id for end in it.engine.finished()) == [3, 4]
            gate.open()
            it.check()
            assert [end.transfer_id for end in it.engine.finished()] == [1, 2]

    def test_submitting_does_not_wait_for_copies_and_wait_does(
        self, gated_factory: GatedFactory, gate: Gate
    ) -> None:
        with rig(gated_factory(60), device=self.device) as it:
            gate.hold(CopyQueue.LOAD)
            for number in range(20):
                it.load(number, [number], _run(number, 1))
            assert it.engine.finished() == []
            with pytest.raises(ValueError, match="transfer 7 is in flight"):
                it.engine.submit_load(7, [7], _run(7, 1))
            waiter = threading.Thread(target=it.engine.wait, args=([19],))
            waiter.start()
            waiter.join(0.05)
            assert waiter.is_alive()
            gate.open()
            waiter.join(20)
            assert not waiter.is_alive()
            it.check()

    def test_an_event_loop_goes_on_while_it_waits(self, gated_factory: GatedFactory, gate: Gate) -> None:
        async def wait_for_three(it: Rig) -> int:
            loop = asyncio.get_running_loop()
            ended, wakeups = asyncio.Event(), 0

            def wake() -> None:
                nonlocal wakeups
                wakeups += 1
                ended.set()

            it.engine.set_wakeup(lambda: loop.call_soon_threadsafe(wake))
            for number in range(3):
                it.store(number, _run(number, 1), [number])
            await asyncio.sleep(0.01)
            assert (it.engine.finished(), wakeups) == ([], 0)
            gate.open()
            found: list[int] = []
            while len(found) < 3 or wakeups < 3:  # an end is there a moment before it wakes
                await asyncio.wait_for(ended.wait(), 20)
                ended.clear()
                found += [end.transfer_id for end in it.engine.finished()]
            await asyncio.sleep(0.01)
            it.engine.set_wakeup(None)
            assert found == [0, 1, 2]
            return wakeups

        with rig(gated_factory(60), device=self.device) as it:
            gate.hold(CopyQueue.STORE)
            assert asyncio.run(wait_for_three(it)) == 3  # one for each end: nobody asks again and again
            it.check()

    def test_a_copy_that_hangs_is_abandoned_and_the_device_with_it(
        self, gated_factory: GatedFactory, gate: Gate, caplog: pytest.LogCaptureFixture
    ) -> None:
        it = Rig(gated_factory(0.2), Shape(), self.device)
        gate.hold(CopyQueue.STORE)
        woken = threading.Event()
        it.engine.set_wakeup(woken.set)
        for number in (1, 2):
            it.engine.submit_store(number, _run(number, 1), [number])
        it.engine.wait([1, 2])
        assert woken.is_set()
        it.engine.submit_store(3, _run(3, 1), [3])
        it.engine.submit_load(4, [4], _run(4, 1))
        it.engine.drain()
        ends = {end.transfer_id: end for end in it.engine.finished()}
        assert isinstance(ends[1].error, DeviceStuckError)
        assert "has not ended within 0.2 s" in str(ends[1].error)
        kinds = [type(ends[number].error) for number in (2, 3, 4)]
        assert kinds == [DeviceLostError] * 3  # nothing of them moves
        assert [end.attempt for end in ends.values()] == [None] * 4
        it.engine.close()
        gate.open()  # what was abandoned ends after all: nobody hears of it, and its memory is there
        time.sleep(0.05)
        assert it.engine.finished() == []
        assert sum("device disabled" in record.getMessage() for record in caplog.records) == 1
        it.close()

    def test_many_copies_may_take_longer_than_the_deadline_of_one(self, gated_factory: GatedFactory) -> None:
        with rig(gated_factory(0.5), device=self.device) as it:
            start = time.monotonic()
            number = 0
            while time.monotonic() < start + 1.2:
                it.load(number, [number % 24], _run(number % 48, 1))
                it.engine.wait([number - 3])
                number += 1
            it.check()
            assert {end.error for end in it.engine.finished()} == {None}

    @pytest.mark.parametrize("count", [0, 5])
    def test_results_say_what_was_moved(self, engine_factory: EngineFactory, count: int) -> None:
        with rig(engine_factory, device=self.device) as it:
            for _ in range(2):  # an id is used once at a time
                it.store(7, _run(0, count), range(count))
                it.engine.wait([7])
                (end,) = it.engine.finished()
                assert (end.transfer_id, end.nbytes) == (7, it.model.nbytes(_run(0, count)))
                assert end.error is None
            it.check()

    def test_wait_ignores_what_is_unknown_or_ended(self, engine_factory: EngineFactory) -> None:
        with rig(engine_factory, device=self.device) as it:
            it.engine.wait([99])
            for number in range(10):
                it.store(number, _run(number, 8), range(8))
            it.engine.wait(iter([4, 2, 99]))
            assert [end.transfer_id for end in it.engine.finished()][:5] == [0, 1, 2, 3, 4]
            it.engine.wait([4])
            it.check()

    def test_close_finishes_what_was_submitted(self, engine_factory: EngineFactory) -> None:
        with rig(engine_factory, device=self.device) as it:
            for number in range(0, 60, 2):
                it.store(number, _run(number % 20, 16), range(16))
                it.load(number + 1, range(16, 24), _run(40, 8), expedited=number % 4 == 0)
            it.engine.close()
            assert sorted(end.transfer_id for end in it.engine.finished()) == list(range(60))
            it.check()

    def test_close_while_somebody_submits(self, engine_factory: EngineFactory) -> None:
        with rig(engine_factory, device=self.device) as it:
            accepted: list[int] = []
            refused: list[StateError] = []

            def submit() -> None:
                while not refused:
                    try:
                        it.store(len(accepted), _run(len(accepted) % 40, 8), range(8))
                        accepted.append(len(accepted))
                    except StateError as error:
                        refused.append(error)

            submitter = threading.Thread(target=submit)
            submitter.start()
            time.sleep(0.02)
            it.engine.close()
            submitter.join(20)
            assert refused
            assert [end.transfer_id for end in it.engine.finished()] == accepted
            it.check()

    def test_nothing_is_accepted_after_closing(self, engine_factory: EngineFactory) -> None:
        with rig(engine_factory, device=self.device) as it:
            it.engine.close()
            it.engine.close()
            it.engine.wait([1])
            with pytest.raises(StateError, match="closed"):
                it.engine.submit_store(2, _run(0, 1), [0])
            with pytest.raises(StateError, match="closed"):
                it.engine.submit_load(3, [0], _run(0, 1))

    @pytest.mark.parametrize(
        ("blocks", "slots", "words"),
        [
            (_run(0, 4, 1), [0, 1], "need 3 slots, but 2 "),
            (_run(0, 4, 1), [0, 1, 2, 3], "need 3 slots, but 4 "),
            (_run(48, 1), [0], "out of range"),
            (_run(-1, 1), [0], "out of range"),
            (_run(0, 1), [24], "out of range"),
            (_run(0, 1), [-1], "out of range"),
        ],
    )
    def test_what_is_out_of_bounds_is_refused(
        self, engine_factory: EngineFactory, blocks: Blocks, slots: list[int], words: str
    ) -> None:
        with rig(engine_factory, Shape(blocks_per_chunk=2), self.device) as it:
            with pytest.raises(ValueError, match=words):
                it.engine.submit_store(1, blocks, slots)
            with pytest.raises(ValueError, match=words):
                it.engine.submit_load(1, slots, blocks)
            it.check()
            assert it.engine.finished() == []
