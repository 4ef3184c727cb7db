"""The contract of a device backend as tests: subclass ``DeviceConformance`` and run it with pytest.

Every test compares the whole memory with ``TransferModel``, which makes the same transfers page by page in
plain Python: exactly the right bytes have changed.

With a double of a device the suite checks an engine's logic, but not the hardware.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time

import pytest

from kvtier import PageMapping
from kvtier._device.base import Blocks, CopyQueue, PieceRun
from kvtier._memory.slot_checksums import SlotChecksums
from kvtier.errors import DamagedSlotError, DeviceLostError, DeviceStuckError, StateError
from kvtier_testing.device_model import (
    Compute,
    DeviceSetup,
    EngineFactory,
    Gate,
    GatedFactory,
    Rig,
    Shape,
    TransferModel,
    neighbours,
    rig,
)

_GROUPS = (((0, 512), (1, 100)), ((2, 64),), ((1, 192), (2, 63)), ((0, 1),))


def _canonical(rank: int, blocks_per_chunk: int) -> Shape:
    """Return the pages of one of four workers: half of the heads, shared with another worker; a latent
    shared by all four; a page of as many bytes in another order; a plain page."""
    halves = PageMapping(1024, (PieceRun(0, rank // 2 * 32, 32, 16, 32, 64),), writers=2, writer=rank % 2)
    latent = PageMapping(192, (PieceRun(0, 0, 192),), writers=4, writer=rank)
    turned = PageMapping(96, (PieceRun(0, 64, 32), PieceRun(32, 0, 64)))
    mappings = (halves, latent, turned)
    return Shape((512, 192, 96, 40), mappings=mappings, blocks_per_chunk=blocks_per_chunk)


LAYOUTS = [
    *(Shape(blocks_per_chunk=blocks) for blocks in (1, 2, 4)),
    Shape((512, 192, 64), gaps=(64, 0, 1), blocks_per_chunk=2),
    Shape((4096,), blocks_per_chunk=2),  # the chunks of the only tensor are adjacent
    Shape(rank=1, workers=3, blocks_per_chunk=2),
    *(Shape((512, 192, 64), groups=_GROUPS, blocks_per_chunk=blocks) for blocks in (1, 2, 4)),
    *(_canonical(rank, blocks_per_chunk=1 + 2 * (rank % 2)) for rank in range(4)),
]


class TransferTests(DeviceSetup):
    """Transfers of any layout, their results and audits."""

    @pytest.mark.parametrize("shape", LAYOUTS)
    def test_blocks_come_back_from_their_slots(self, engine_factory: EngineFactory, shape: Shape) -> None:
        noise, groups = random.Random(2), len(shape.page_refs())
        with rig(engine_factory, shape, self.device) as it:
            for number in range(0, 6 if shape.mappings else 24, 2):  # pages with many pieces take long
                ids, slots = list(range(48)), list(range(24))
                if number % 6:  # otherwise adjacent blocks, whose copies may be merged
                    noise.shuffle(ids)
                    noise.shuffle(slots)
                width = shape.blocks_per_chunk
                chunks = [noise.randrange(16 // groups // width + 1) for _ in range(groups)]
                firsts = [noise.randrange(9) * width for _ in range(groups)]
                sizes = [count * width for count in chunks]
                total = sum(sizes)
                blocks = Blocks.make(ids[:total], sizes, firsts)
                # loads of only some blocks
                skips = [noise.randrange(width) if count else 0 for count in chunks]
                ends = [noise.randrange(width) if count > 1 else 0 for count in chunks]
                sizes = [size - skip - end for size, skip, end in zip(sizes, skips, ends, strict=True)]
                firsts = [first + skip for first, skip in zip(firsts, skips, strict=True)]
                target = Blocks.make(ids[total : total + sum(sizes)], sizes, firsts)
                it.check_there_and_back(number, blocks, slots[: sum(chunks)], target)

    @pytest.mark.parametrize("blocks_per_chunk", [1, 4])
    def test_audits_hold_and_find_what_has_changed(
        self, engine_factory: EngineFactory, blocks_per_chunk: int
    ) -> None:
        shape = Shape(blocks_per_chunk=blocks_per_chunk)
        with rig(engine_factory, shape, self.device) as it:
            it.engine.begin_audits(SlotChecksums.private(it.region, 1.0, shape.layout.area_bytes))
            slots = random.Random(2).sample(range(24), 16 // blocks_per_chunk)
            it.store(1, neighbours(3, 16), slots)
            it.check()
            it.load(2, slots, Blocks.make(range(47, 31, -1), (16,), (0,)))
            it.load(3, slots[:1], neighbours(20, blocks_per_chunk), expedited=True)
            it.check()
            assert [end.error for end in it.engine.finished()] == [None] * 3
            if not it.engine.audits.chunks:
                pytest.skip("this engine does not audit")
            assert (it.engine.audits.chunks, it.engine.audits.failed) == (2 * len(slots) + 1, 0)
            it.region.view(slots[-1])[7] ^= 1
            it.engine.submit_load(4, slots, neighbours(3, 16))
            it.engine.drain()
            (end,) = it.engine.finished()
            assert isinstance(end.error, DamagedSlotError)

    @pytest.mark.parametrize("count", [0, 5])
    def test_results_say_what_was_moved(self, engine_factory: EngineFactory, count: int) -> None:
        with rig(engine_factory, device=self.device) as it:
            for _ in range(2):  # Each id is used only once at a time.
                it.store(7, neighbours(0, count), range(count))
                it.engine.wait([7])
                (end,) = it.engine.finished()
                assert (end.transfer_id, end.nbytes) == (7, it.model.nbytes(neighbours(0, count)))
                assert end.error is None
            it.check()

    @pytest.mark.parametrize("blocks", [neighbours(0, 3, 1), neighbours(0, 3), neighbours(0, 1, 1)])
    def test_a_store_of_chunks_that_lack_blocks_is_refused(
        self, engine_factory: EngineFactory, blocks: Blocks
    ) -> None:
        slots = range(sum(blocks.slots_needed(2)))
        with rig(engine_factory, Shape(blocks_per_chunk=2), self.device) as it:
            with pytest.raises(ValueError, match="all 2 blocks of each chunk"):
                it.engine.submit_store(1, blocks, slots)
            it.load(1, slots, blocks)
            it.check()

    @pytest.mark.parametrize(
        ("blocks", "slots", "words"),
        [
            (neighbours(0, 6, 2), [0, 1], "need 3 slots, but 2 "),
            (neighbours(0, 6, 2), [0, 1, 2, 3], "need 3 slots, but 4 "),
            (neighbours(47, 2), [0], "out of range"),
            (neighbours(-1, 2), [0], "out of range"),
            (neighbours(0, 2), [24], "out of range"),
            (neighbours(0, 2), [-1], "out of range"),
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


class OrderTests(DeviceSetup):
    """Transfers concurrent with other transfers and with the engine's computation."""

    def test_stores_and_loads_happen_in_order(self, engine_factory: EngineFactory) -> None:
        with rig(engine_factory, device=self.device) as it:
            for number in range(0, 40, 2):
                it.store(number, neighbours(number // 2, 8), range(8))  # the last write wins
                it.load(number + 1, range(8 + number // 5, 16 + number // 5), neighbours(40, 8))
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
                it.store(number, neighbours(block, 1), [number])
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
                it.load(number, [number], neighbours(number, 1), expedited=expedited)
            compute.finish()
            it.check()

    @pytest.mark.parametrize("seed", range(3))
    def test_all_at_once(self, engine_factory: EngineFactory, compute: Compute, seed: int) -> None:
        # Stores from blocks 0 to 23 to slots 0 to 11, loads from the other slots to the other blocks; a
        # block is recomputed only after its stores have ended.
        noise = random.Random(seed)
        with rig(engine_factory, Shape(blocks_per_chunk=2), self.device) as it:
            last_store: dict[int, int] = {}
            for number in range(0, 240, 2):
                block = noise.randrange(23)
                it.engine.wait({last_store.get(block, -1), last_store.get(block + 1, -1)})
                it.paint(compute, block, noise.randrange(128))
                it.store(number, neighbours(block, 2), [noise.randrange(12)])
                last_store[block] = last_store[block + 1] = number
                slots, target = [noise.randrange(12, 24)], 24 + 2 * noise.randrange(12)
                it.load(number + 1, slots, neighbours(target, 2))
            compute.finish()
            it.check()

    def test_a_store_and_an_expedited_load_overtake_a_load(
        self, gated_factory: GatedFactory, gate: Gate
    ) -> None:
        with rig(gated_factory(60), device=self.device) as it:
            gate.hold(CopyQueue.LOAD)
            it.load(1, [1], neighbours(1, 1))
            it.load(2, [2], neighbours(2, 1))
            it.load(3, [3], neighbours(3, 1), expedited=True)
            it.store(4, neighbours(5, 1), [7])
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
                it.load(number, [number], neighbours(number, 1))
            assert it.engine.finished() == []
            with pytest.raises(ValueError, match="transfer 7 is in flight"):
                it.engine.submit_load(7, [7], neighbours(7, 1))
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
                it.store(number, neighbours(number, 1), [number])
            await asyncio.sleep(0.01)
            assert (it.engine.finished(), wakeups) == ([], 0)
            gate.open()
            found: list[int] = []
            while len(found) < 3 or wakeups < 3:  # a result can be taken just before its wake-up
                await asyncio.wait_for(ended.wait(), 20)
                ended.clear()
                found += [end.transfer_id for end in it.engine.finished()]
            await asyncio.sleep(0.01)
            it.engine.set_wakeup(None)
            assert found == [0, 1, 2]
            return wakeups

        with rig(gated_factory(60), device=self.device) as it:
            gate.hold(CopyQueue.STORE)
            assert asyncio.run(wait_for_three(it)) == 3  # one wake-up for each result, without polling
            it.check()

    def test_wait_ignores_what_is_unknown_or_ended(self, engine_factory: EngineFactory) -> None:
        with rig(engine_factory, device=self.device) as it:
            it.engine.wait([99])
            for number in range(10):
                it.store(number, neighbours(number, 8), range(8))
            it.engine.wait(iter([4, 2, 99]))
            assert [end.transfer_id for end in it.engine.finished()][:5] == [0, 1, 2, 3, 4]
            it.engine.wait([4])
            it.check()


class EndTests(DeviceSetup):
    """Copies that hang, and engines that are closed."""

    def test_a_copy_that_hangs_is_abandoned_and_the_device_with_it(
        self, gated_factory: GatedFactory, gate: Gate, caplog: pytest.LogCaptureFixture
    ) -> None:
        it = Rig(gated_factory(0.2), Shape(), self.device)
        gate.hold(CopyQueue.STORE)
        woken = threading.Event()
        it.engine.set_wakeup(woken.set)
        for number in (1, 2):
            it.engine.submit_store(number, neighbours(number, 1), [number])
        it.engine.wait([1, 2])
        assert woken.is_set()
        it.engine.submit_store(3, neighbours(3, 1), [3])
        it.engine.submit_load(4, [4], neighbours(4, 1))
        it.engine.drain()
        ends = {end.transfer_id: end for end in it.engine.finished()}
        assert isinstance(ends[1].error, DeviceStuckError)
        assert "has not ended within 0.2 s" in str(ends[1].error)
        kinds = [type(ends[number].error) for number in (2, 3, 4)]
        assert kinds == [DeviceLostError] * 3  # none of their bytes moves
        assert [end.attempt for end in ends.values()] == [None] * 4
        it.engine.close()
        gate.open()  # The end of an abandoned copy is not reported, and its memory is still mapped.
        time.sleep(0.05)
        assert it.engine.finished() == []
        assert sum("device disabled" in record.getMessage() for record in caplog.records) == 1
        it.close()

    def test_many_copies_may_take_longer_than_the_deadline_of_one(self, gated_factory: GatedFactory) -> None:
        with rig(gated_factory(1.0), device=self.device) as it:
            start = time.monotonic()
            number = 0
            while time.monotonic() < start + 1.5:
                it.load(number, [number % 24], neighbours(number % 48, 1))
                it.engine.wait([number - 3])
                number += 1
            it.check()
            assert {end.error for end in it.engine.finished()} == {None}

    def test_close_finishes_what_was_submitted_and_accepts_no_more(
        self, engine_factory: EngineFactory
    ) -> None:
        with rig(engine_factory, device=self.device) as it:
            for number in range(0, 60, 2):
                it.store(number, neighbours(number % 20, 16), range(16))
                it.load(number + 1, range(16, 24), neighbours(40, 8), expedited=number % 4 == 0)
            it.engine.close()
            assert sorted(end.transfer_id for end in it.engine.finished()) == list(range(60))
            it.check()
            it.engine.close()
            it.engine.wait([1])
            with pytest.raises(StateError, match="closed"):
                it.engine.submit_store(60, neighbours(0, 1), [0])
            with pytest.raises(StateError, match="closed"):
                it.engine.submit_load(61, [0], neighbours(0, 1))

    def test_close_while_somebody_submits(self, engine_factory: EngineFactory) -> None:
        with rig(engine_factory, device=self.device) as it:
            accepted: list[int] = []
            refused: list[StateError] = []

            def submit() -> None:
                while not refused:
                    try:
                        it.store(len(accepted), neighbours(len(accepted) % 40, 8), range(8))
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


class DeviceConformance(TransferTests, OrderTests, EndTests):
    """Tests of the contract of ``TransferEngine``. A subclass has the fixtures of ``DeviceSetup``."""


__all__ = [
    "Compute",
    "DeviceConformance",
    "EngineFactory",
    "Gate",
    "GatedFactory",
    "Rig",
    "Shape",
    "TransferModel",
    "rig",
]
