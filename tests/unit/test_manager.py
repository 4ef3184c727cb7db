"""The asyncio manager with real copies and tiers: loads return the stored bytes exactly."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from pathlib import Path
from types import coroutine
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

from kvtier import Identity, KVCaches, PageRef, TieringConfig, TieringManager, open_manager, pack_key
from kvtier._core.limits import Limits
from kvtier._core.tiering import Tiering
from kvtier._core.tiers.tier_status import TierStatus
from kvtier._device._engine import TransferEngine
from kvtier._device.backends.cpu import copy_batch
from kvtier._device.plan import CopyPlan
from kvtier._memory.layout import SlotLayout
from kvtier._memory.region import Region
from kvtier._memory.slot_checksums import SlotChecksums
from kvtier.errors import ConfigError, DeviceStuckError, StateError, TransferError
from kvtier.keys import OffloadKey, group_index
from kvtier.policies import LRU
from kvtier.tiers import Batch, Outcome, SecondaryTier, until_done
from kvtier.tiers.fs import FsConfig, FsTier
from kvtier_testing import invariants
from kvtier_testing.device_model import GivenCopies
from kvtier_testing.dummy import DummyConfig, DummyTier
from tests.common import PATIENCE_S, named_tier
from tests.unit.test_executor import SlowReset

IDENTITY = Identity.make("model", {"dtype": "int8"})
PAGES = (3072, 960)  # nearly all of a slot: few wrong bytes fall outside them
AnyTier = SecondaryTier[Any]


def prompt(name: int, length: int, group: int = 0) -> list[OffloadKey]:
    """The keys of a prompt's chunks."""
    return [pack_key(name.to_bytes(4, "big") + index.to_bytes(4, "big"), group) for index in range(length)]


def dummy(**settings: object) -> DummyTier:
    return DummyTier(DummyConfig.model_validate(settings))


def files(root: Path, **settings: object) -> FsTier:
    given = {"root_dir": root, "n_threads": 2, "min_free_bytes": 0, "max_bytes": 2**50, **settings}
    return FsTier(FsConfig.model_validate(given))


class Device:
    """The engine's tensors. A chunk's key and a version determine the content of each page."""

    def __init__(
        self, groups: int = 1, blocks_per_chunk: int = 1, blocks: int = 128, pages: Sequence[int] = PAGES
    ) -> None:
        self.blocks = blocks
        self.blocks_per_chunk = blocks_per_chunk
        tensors = tuple(torch.zeros((blocks, size), dtype=torch.int8) for size in pages)
        refs = tuple(PageRef(index, size) for index, size in enumerate(pages))
        # Group 1 uses only the first tensor, and not all of its page.
        self.caches = KVCaches(tensors, (refs, (PageRef(0, 256),))[:groups])

    def fill(self, keys: Sequence[OffloadKey], blocks: Sequence[int], version: object = 0) -> None:
        for tensor, block, page in self._pages(keys, blocks, version):
            self.caches.tensors[tensor][block, : len(page)] = page

    def holds(self, keys: Sequence[OffloadKey], blocks: Sequence[int], version: object = 0) -> bool:
        pages = self._pages(keys, blocks, version)
        return all(torch.equal(self.caches.tensors[t][b, : len(page)], page) for t, b, page in pages)

    def clear(self, blocks: Sequence[int]) -> None:
        for tensor in self.caches.tensors:
            tensor[list(blocks)] = 0

    def is_clear(self, blocks: Sequence[int]) -> bool:
        return not any(tensor[list(blocks)].any() for tensor in self.caches.tensors)

    def _pages(
        self, keys: Sequence[OffloadKey], blocks: Sequence[int], version: object
    ) -> list[tuple[int, int, torch.Tensor]]:
        pages = []
        for index, key in enumerate(keys):
            for part in range(self.blocks_per_chunk):
                block = blocks[index * self.blocks_per_chunk + part]
                for ref in self.caches.groups[group_index(key)]:
                    pages.append((ref.tensor, block, _page(key, part, ref, version)))
        return pages


@lru_cache(10_000)
def _page(key: OffloadKey, part: int, ref: PageRef, version: object) -> torch.Tensor:
    noise = random.Random(repr((key, part, ref.tensor, version))).randbytes(ref.page_bytes)
    return torch.frombuffer(bytearray(noise), dtype=torch.int8)


class World:
    """A manager, its core, and the device that it copies from and to."""

    def __init__(
        self,
        *tiers: AnyTier,
        slots: int = 32,
        limits: Limits | None = None,
        device: Device | None = None,
        copy: Callable[[CopyPlan], None] = copy_batch,
        drain_s: float = 5.0,
        copy_deadline_s: float = 60.0,
        close_s: float = 10.0,
        audited_bytes: int | None = None,
    ) -> None:
        self.device = device or Device()
        self.names = names = [f"{tier.config.type}{index}" for index, tier in enumerate(tiers)]
        gates = [TierStatus(name, tier.config.deadline_s) for name, tier in zip(names, tiers, strict=True)]
        self.core = Tiering(LRU(), gates, limits or Limits())
        layout = SlotLayout.make(self.device.caches.page_bytes, self.device.blocks_per_chunk)
        self.region = Region.anonymous(slots, layout.chunk_bytes)
        self.engine: TransferEngine = TransferEngine(
            self.device.caches, layout, self.region, GivenCopies(copy), deadline_s=copy_deadline_s
        )
        self.slot_checksums = None
        if audited_bytes is not None:  # of each chunk
            self.slot_checksums = SlotChecksums.private(self.region, 1.0, audited_bytes)
            self.engine.begin_audits(self.slot_checksums)
        self.manager = TieringManager(
            core=self.core,
            tiers=[named_tier(name, tier) for name, tier in zip(names, tiers, strict=True)],
            identity=IDENTITY,
            region=self.region,
            engine=self.engine,
            blocks_per_chunk=self.device.blocks_per_chunk,
            num_blocks=self.device.caches.num_blocks,
            drain_s=drain_s,
            close_s=close_s,
            slot_checksums=self.slot_checksums,
        )

    async def store(self, keys: Sequence[OffloadKey], first: int = 0, version: int = 0) -> int:
        """Fill blocks from ``first`` on with the content of ``keys``, and store them."""
        blocks = range(first, first + len(keys) * self.device.blocks_per_chunk)
        self.device.fill(keys, blocks, version)
        return await self.manager.store(keys, blocks)

    async def load(
        self, keys: Sequence[OffloadKey], first: int = 0, versions: Callable[[], Sequence[int]] = lambda: [0]
    ) -> int:
        """Load ``keys`` into cleared blocks; check that loaded blocks are right and the rest is untouched."""
        width = self.device.blocks_per_chunk
        blocks = range(first, first + len(keys) * width)
        self.device.clear(blocks)
        count = await self.manager.load(keys, blocks)
        for index, key in enumerate(keys[:count]):
            own = blocks[index * width : (index + 1) * width]
            assert any(self.device.holds([key], own, version) for version in versions()), (index, count)
        assert self.device.is_clear(blocks[count * width :])
        return count

    async def forget_primary(self) -> None:
        """Evict everything else from the primary tier by storing other chunks."""
        slots = self.manager.statistics().slots
        for start in range(0, 4 * slots, 8):
            first = self.device.blocks - 8 * self.device.blocks_per_chunk
            await self.store(prompt(10_000_000 + start, 8), first)
            await self.manager.drain()

    async def check_idle(self) -> None:
        """Check that nothing is left: no pin, no request, no transfer."""
        with anyio.fail_after(PATIENCE_S):
            await self.manager.drain()
        self.check()
        assert self.manager.statistics().pinned_chunks == 0
        assert not self.core.handles
        assert not self.core.holds.pending
        assert not self.core.holds.promoting

    def check(self) -> None:
        invariants.check(self.core)


@asynccontextmanager
async def opened(*tiers: AnyTier, **settings: Any) -> AsyncIterator[World]:
    it = World(*tiers, **settings)
    async with it.manager:
        yield it


class Gate:
    """Copies that wait until the test releases them, with an event for each start."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.entered = threading.Event()

    def __call__(self, plan: CopyPlan) -> None:
        self.entered.set()
        assert self.opened.wait(PATIENCE_S)
        copy_batch(plan)

    def close(self) -> None:
        self.opened.clear()
        self.entered.clear()

    async def begun(self) -> None:
        assert await anyio.to_thread.run_sync(self.entered.wait, PATIENCE_S)


# --- the main job ----------------------------------------------------------------------------------


async def test_groups_of_several_blocks() -> None:
    async with opened(dummy(), device=Device(groups=2, blocks_per_chunk=2), slots=64) as it:
        mixed = [key for pair in zip(prompt(1, 6), prompt(1, 6, group=1), strict=True) for key in pair]
        blocks = random.Random(1).sample(range(64), 24)
        it.device.fill(mixed, blocks)
        assert await it.manager.store(mixed, blocks) == 12
        await it.forget_primary()
        assert await it.load(mixed, 70) == 12
        elsewhere = random.Random(2).sample(range(64), 24)
        it.device.clear(elsewhere)
        assert await it.manager.load(mixed, elsewhere) == 12
        assert it.device.holds(mixed, elsewhere)
        await it.check_idle()


async def test_unfit_blocks_are_refused() -> None:
    async with opened(device=Device(groups=2, blocks_per_chunk=2)) as it:
        for call in (it.manager.store, it.manager.load):
            with pytest.raises(ValueError, match="2 keys need 4 blocks, not 3"):
                await call(prompt(1, 2), [1, 2, 3])
            with pytest.raises(ValueError, match=r"names KV cache group 2; the number of groups is 2"):
                await call(prompt(1, 1, group=2), [1, 2])
        await it.store(prompt(1, 1))
        for call, name in ((it.manager.store, 2), (it.manager.load, 1)):
            with pytest.raises(ValueError, match="128"):
                await call(prompt(name, 1), [127, 128])
        await it.check_idle()


async def test_acquired_chunks_stay() -> None:
    async with opened(slots=8) as it:
        keys = prompt(1, 4)
        await it.store(keys)
        async with it.manager.acquire([*keys, *prompt(2, 1)]) as acquired:
            assert acquired.keys == tuple(keys)
            before = [bytes(view) for view in acquired.views]
            assert all(view.readonly for view in acquired.views)
            for other in range(3, 9):
                await it.store(prompt(other, 4), 20)
            assert [bytes(view) for view in acquired.views] == before
            it.device.clear(range(60, 64))
            await acquired.load(range(60, 64))
            assert it.device.holds(keys, range(60, 64))
            with pytest.raises(ValueError, match="4 keys need 4 blocks"):
                await acquired.load([1])
        with pytest.raises(StateError, match="given back"):
            await acquired.load(range(60, 64))
        with pytest.raises(StateError, match="given back"):
            _ = acquired.views
        await it.check_idle()


# --- the tiers behind it -------------------------------------------------------------------------


@pytest.fixture(params=["dummy", "asked", "fs"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> AnyTier:
    if request.param == "fs":
        return files(tmp_path / "root")
    return dummy(complete_index=request.param == "dummy")


async def test_evicted_chunks_return(tier: AnyTier) -> None:
    async with opened(tier, slots=64) as it:
        keys = prompt(1, 8)
        await it.store(keys)
        await it.forget_primary()
        assert await it.load([*keys, *prompt(2, 2)], 40) == 8
        counts = it.manager.statistics().counts
        assert counts["loaded", f"{tier.config.type}0"] == 8
        assert await it.load(keys, 60) == 8
        assert it.manager.statistics().counts["loaded", "cpu"] == 8
        await it.check_idle()


async def test_slow_tier_is_skipped() -> None:
    async with opened(dummy(get_latency_s=0.05), slots=64, limits=Limits(load_gate="latency")) as it:
        keys = prompt(1, 8)
        await it.store(keys)
        await it.forget_primary()
        assert await it.load(keys, 40) == 8, "nothing is known of computing"
        it.manager.report_computed(8, 0.001)
        await it.forget_primary()
        assert await it.load(keys, 40) == 0
        counts = it.manager.statistics().counts
        assert (counts["miss", "gate"], counts["skipped", "dummy0", "gate"]) == (1, 8)
        it.manager.report_computed(8, 100.0)
        it.manager.report_computed(8, 100.0)
        assert await it.load(keys, 40) == 8
        await it.check_idle()


@pytest.mark.parametrize("report", [(0, 1.0, 0), (1, -1.0, 0), (1, float("nan"), 0), (1, 1.0, -1)])
async def test_impossible_report_is_refused(report: tuple[int, float, int]) -> None:
    chunks, seconds, first = report
    async with opened() as it:
        with pytest.raises(ValueError, match="chunks must be at least 1"):
            it.manager.report_computed(chunks, seconds, first=first)


# --- deadlines -----------------------------------------------------------------------------------


class Silent(DummyTier):
    """Keeps put chunks, and answers no get."""

    async def get(self, batch: Batch) -> Outcome:
        await anyio.sleep_forever()
        raise AssertionError


class Deaf(DummyTier):
    """Its puts neither end nor stop until the test releases them."""

    def __init__(self, config: DummyConfig) -> None:
        super().__init__(config)
        self.begun = anyio.Event()
        self.let_go = anyio.Event()

    async def put(self, batch: Batch) -> Outcome:
        self.begun.set()
        await until_done(asyncio.ensure_future(self.let_go.wait()))
        return await super().put(batch)


# --- back-pressure -------------------------------------------------------------------------------


async def test_endless_slots_stay_unused() -> None:
    gate = Gate()
    async with opened(copy=gate, copy_deadline_s=0.2, limits=Limits(request_deadline_s=0.2)) as it:
        free = it.manager.statistics().free_slots
        with pytest.raises(DeviceStuckError, match=r"3 chunks failed: a copy of .* has not ended"):
            await it.store(prompt(1, 3))
        with pytest.raises(TransferError) as lost:  # nothing moves for this one
            await it.store(prompt(2, 2))
        assert not isinstance(lost.value, DeviceStuckError)
        assert it.manager.statistics().free_slots == free - 3
        assert await it.manager.lookup(prompt(1, 3)) == 0
        it.check()
    gate.opened.set()


async def test_cancelled_slots_stay_unused() -> None:
    gate, keys = Gate(), prompt(1, 2)
    # It must be cancelled before its time is up, even on a busy machine.
    async with opened(copy=gate, copy_deadline_s=2.0, limits=Limits(request_deadline_s=0.2)) as it:
        free = it.manager.statistics().free_slots
        with anyio.CancelScope() as scope:
            async with it.manager.write(prompt(2, 3)):
                store = asyncio.ensure_future(it.store(keys))
                await gate.begun()
                store.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await store
                scope.cancel()
                await anyio.lowlevel.checkpoint()
        assert it.manager.statistics().free_slots == free - len(keys)
        assert it.manager.statistics().counts["dropped", "store", "failed"] == len(keys)
        it.check()
    gate.opened.set()


# --- reset ---------------------------------------------------------------------------------------


async def test_reset_ends_lookup() -> None:
    silent = Silent(DummyConfig(deadline_s=600))
    async with opened(silent, slots=16, limits=Limits(request_deadline_s=600), drain_s=0) as it:
        keys = prompt(1, 4)
        await it.store(keys)
        await it.forget_primary()
        look = asyncio.ensure_future(it.manager.lookup(keys))
        await anyio.wait_all_tasks_blocked()
        with anyio.fail_after(PATIENCE_S):
            await it.manager.reset()
            assert await look == 0
        it.check()


async def test_load_across_reset_is_void() -> None:
    gate = Gate()
    gate.opened.set()
    async with opened(dummy(), copy=gate) as it:
        keys = prompt(1, 4)
        await it.store(keys)
        gate.close()
        load = asyncio.ensure_future(it.manager.load(keys, range(60, 64)))
        await gate.begun()
        await it.manager.reset()
        gate.opened.set()
        with pytest.raises(TransferError, match="a reset or an audit has dropped them"):
            await load
        await it.check_idle()


async def test_acquired_chunks_are_not_loaded_after_reset() -> None:
    async with opened() as it:
        keys = prompt(1, 4)
        await it.store(keys)
        it.device.clear(range(60, 64))
        async with it.manager.acquire(keys) as acquired:
            await it.manager.reset()
            with pytest.raises(TransferError, match="a reset or an audit has dropped them"):
                await acquired.load(range(60, 64))
        assert it.device.is_clear(range(60, 64))
        await it.check_idle()


# --- opening and closing -------------------------------------------------------------------------


@pytest.mark.blocking(reason="plug-ins are looked up where the manager is made")
async def test_open_manager_wires_all(tmp_path: Path) -> None:
    device = Device(groups=2, blocks_per_chunk=2)
    config = TieringConfig.from_mapping(
        {
            "cpu_bytes_to_use": "1MiB",
            "blocks_per_chunk": 2,
            "eviction_policy": "arc",
            "secondary_tiers": [
                {"type": "dummy"},
                {"type": "fs", "root_dir": str(tmp_path), "min_free_bytes": 0, "max_bytes": 2**50},
            ],
        }
    )
    keys = [*prompt(1, 3), *prompt(1, 3, group=1)]
    for opening in range(2):
        async with open_manager(config, IDENTITY, device.caches) as manager:
            state = manager.statistics()
            assert [tier.name for tier in state.tiers] == ["dummy", "fs"]
            assert state.slots == state.free_slots == 2**20 // 8192
            if opening == 0:
                device.fill(keys, range(12))
                assert await manager.store(keys, range(12)) == 6
            else:
                device.clear(range(12, 24))
                assert await manager.load(keys, range(12, 24)) == 6
                assert device.holds(keys, range(12, 24))


@pytest.mark.blocking(reason="plug-ins are looked up where the manager is made")
async def test_namespaces_share_no_chunks(tmp_path: Path) -> None:
    device, keys = Device(), prompt(1, 2)
    device.fill(keys, range(2))
    root = {"type": "fs", "root_dir": str(tmp_path), "min_free_bytes": 0, "max_bytes": 2**50}
    found = []
    for namespace in ("", "one", "two", "one"):
        config = TieringConfig.from_mapping(
            {"cpu_bytes_to_use": "1MiB", "secondary_tiers": [root], "namespace": namespace}
        )
        async with open_manager(config, IDENTITY, device.caches) as manager:
            found.append(await manager.lookup(keys))
            await manager.store(keys, range(2))
    assert found == [0, 0, 0, 2]


@pytest.mark.blocking(reason="plug-ins are looked up where the manager is made")
async def test_other_layouts_share_no_chunks(tmp_path: Path) -> None:
    """Blocks with half the tokens, twice as many per chunk: keys and lengths of chunks are equal."""
    root = {"type": "fs", "root_dir": str(tmp_path), "min_free_bytes": 0, "max_bytes": 2**50}
    found = []
    for blocks_per_chunk in (1, 2, 1):
        config = TieringConfig.from_mapping(
            {"cpu_bytes_to_use": "1MiB", "secondary_tiers": [root], "blocks_per_chunk": blocks_per_chunk}
        )
        pages = torch.zeros((8, 4096 // blocks_per_chunk), dtype=torch.int8)
        caches = KVCaches((pages, pages), ((PageRef(0, pages.shape[1]), PageRef(1, pages.shape[1])),))
        async with open_manager(config, IDENTITY, caches) as manager:
            found.append(await manager.lookup(prompt(1, 2)))
            await manager.store(prompt(1, 2), range(2 * blocks_per_chunk))
    assert found == [0, 0, 2]


def test_settings_of_engines_are_refused() -> None:
    given = {"cpu_bytes_to_use": "1MiB", "block_size": 64, "keep_host_memory_s": 5, "explain_rate": 0.5}
    words = "block_size, explain_rate, keep_host_memory_s; remove them; set blocks_per_chunk in place of"
    with pytest.raises(ConfigError, match=words):
        open_manager(TieringConfig.from_mapping(given), IDENTITY, Device().caches)


async def test_close_puts_running_store(tmp_path: Path) -> None:
    gate = Gate()
    async with opened(files(tmp_path), copy=gate) as it:
        store = asyncio.ensure_future(it.store(prompt(1, 3)))
        await gate.begun()
        asyncio.get_running_loop().call_later(0.05, gate.opened.set)
    assert await store == 3
    async with opened(files(tmp_path)) as it:
        assert await it.load(prompt(1, 3)) == 3


async def test_exit_lets_reset_end() -> None:
    tier = SlowReset(0.1)
    async with opened(tier) as it:
        reset = asyncio.ensure_future(it.manager.reset())
        await anyio.wait_all_tasks_blocked()
    await reset
    assert tier.was_reset


async def test_close_ends_reset(caplog: pytest.LogCaptureFixture) -> None:
    async with opened(SlowReset(1000), drain_s=0.05) as it:
        reset = asyncio.ensure_future(it.manager.reset())
        await anyio.wait_all_tasks_blocked()
    with anyio.fail_after(PATIENCE_S):
        await reset
    assert "shut down before its reset to epoch 1 ended" in caplog.text


async def test_close_is_bounded(tmp_path: Path) -> None:
    silent = Silent(DummyConfig(deadline_s=600, put_latency_s=600))
    with anyio.fail_after(PATIENCE_S):
        async with opened(silent, drain_s=0.05, limits=Limits(request_deadline_s=600)) as it:
            await it.store(prompt(1, 2))
            look = asyncio.ensure_future(it.manager.lookup(prompt(1, 4)))
            await anyio.wait_all_tasks_blocked()
        assert await look == 2
    it.check()
    assert it.manager.statistics().pinned_chunks == 0


async def test_unstoppable_tier_is_abandoned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    deaf, tasks = Deaf(DummyConfig(deadline_s=600)), asyncio.all_tasks()
    with anyio.fail_after(PATIENCE_S):
        async with opened(deaf, drain_s=0.01, close_s=0.05) as it:
            await it.store(prompt(1, 2))
            await deaf.begun.wait()
            slots = [slot for slot in range(4) if any(it.region.view(slot))]
    assert "a tier did not close in time" in caplog.text
    before = [bytes(it.region.view(slot)) for slot in slots]
    assert len(before) == 2
    it.check()
    deaf.let_go.set()
    with anyio.fail_after(PATIENCE_S):
        while asyncio.all_tasks() - tasks:  # noqa: ASYNC110 - leftover tasks send no event
            await anyio.sleep(0.005)
    assert [bytes(it.region.view(slot)) for slot in slots] == before
    await anyio.to_thread.run_sync(it.region.close)  # waits for the thread that has acquired the memory


async def test_shutdown_counts_dropped_puts(caplog: pytest.LogCaptureFixture) -> None:
    slow = dummy(put_latency_s=600, deadline_s=600)
    async with opened(slow, drain_s=0.01) as it:
        await it.store(prompt(1, 3))
    (line,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert (
        "tier dummy0: 3 of 3 chunks in flight at the shutdown were not written (cancelled: 3)"
        in line.getMessage()
    )


async def test_shutdown_counts_later_puts(caplog: pytest.LogCaptureFixture) -> None:
    gate, slow = Gate(), dummy(put_latency_s=600, deadline_s=600)
    with anyio.fail_after(PATIENCE_S):
        async with opened(slow, copy=gate, drain_s=2.0) as it:
            store = asyncio.ensure_future(it.store(prompt(1, 2)))
            await gate.begun()
            asyncio.get_running_loop().call_soon(gate.opened.set)
        assert await store == 2
    (line,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "2 of 2 chunks" in line.getMessage()


async def test_copy_outlives_drain() -> None:
    gate = Gate()
    with anyio.fail_after(PATIENCE_S):
        async with opened(dummy(), copy=gate, drain_s=0) as it:
            store = asyncio.ensure_future(it.store(prompt(1, 2)))
            await gate.begun()
            asyncio.get_running_loop().call_later(0.05, gate.opened.set)
        assert await store == 2
    it.check()
    assert it.manager.statistics().pinned_chunks == 0


async def test_use_outside_life_is_refused() -> None:
    it = World(dummy())
    keys = prompt(1, 2)

    async def acquire(keys: Sequence[OffloadKey]) -> None:
        async with it.manager.acquire(keys):
            pass

    async def refused() -> None:
        calls: list[Awaitable[object]] = [
            it.manager.lookup(keys),
            it.manager.store(keys, range(2)),
            it.manager.load(keys, range(2)),
            it.manager.reset(),
            acquire(keys),
        ]
        for call in calls:
            with anyio.fail_after(5), pytest.raises(StateError, match="not open"):
                await call

    await refused()
    async with it.manager:
        await it.store(keys)
    await refused()
    await it.manager.aclose()  # twice is once
    assert it.manager.statistics().counts["stored",] == 2
    with pytest.raises(StateError):
        async with it.manager:
            pass


@pytest.mark.parametrize("kind", ["task", "scope"])
async def test_open_is_cancellable(kind: str, tmp_path: Path) -> None:
    async def open_and_store() -> None:
        async with it.manager:
            await it.store(prompt(1, 2))

    for number in itertools.count():
        it = World(files(tmp_path), slots=4, drain_s=0.5)
        with anyio.fail_after(PATIENCE_S):
            cancelled = await cancelled_at(open_and_store(), number, kind)
        with pytest.raises(StateError, match="closed"):
            it.region.view(0)
        it.check()
        if not cancelled:
            break
    assert number > 4
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvtier-store")]


# --- cancellation --------------------------------------------------------------------------------


@coroutine
def _stepped(
    work: Coroutine[Any, Any, object], number: int, cancel: Callable[[], object]
) -> Generator[Any, Any, None]:
    """Run ``work``; call ``cancel`` when it waits for the ``number``-th time."""
    step: Callable[[], Any] = lambda: work.send(None)  # noqa: E731
    for count in itertools.count():
        try:
            future = step()
        except StopIteration:
            return
        if count == number:
            cancel()
        try:
            yield future
            step = lambda: work.send(None)  # noqa: E731
        except BaseException as error:
            step = lambda error=error: work.throw(error)  # type: ignore[misc]  # noqa: E731


async def cancelled_at(work: Coroutine[Any, Any, object], number: int, kind: str) -> bool:
    """Cancel ``work`` when it waits for the ``number``-th time; return whether that happened."""
    reached = False

    async def run() -> None:
        nonlocal reached
        task = asyncio.current_task()
        assert task is not None
        with anyio.CancelScope() as scope:

            def cancel() -> None:
                nonlocal reached
                reached = True
                if kind == "scope":
                    scope.cancel()
                else:
                    task.cancel()

            await _stepped(work, number, cancel)

    with suppress(asyncio.CancelledError):
        await asyncio.ensure_future(run())
    return reached


async def _store(it: World) -> None:
    await it.store(prompt(5, 6), 20)


async def _load(it: World) -> None:
    await it.load(prompt(1, 6), 30)


async def _acquire(it: World) -> None:
    async with it.manager.acquire(prompt(1, 6)) as acquired:
        await anyio.lowlevel.checkpoint()
        await acquired.load(range(30, 30 + len(acquired.keys)))
        await anyio.sleep(0.001)


async def _lookup(it: World) -> None:
    await it.manager.lookup(prompt(1, 6))


async def _reset(it: World) -> None:
    await it.manager.reset()


@pytest.mark.parametrize("kind", ["task", "scope"])
@pytest.mark.parametrize("work", [_store, _load, _acquire, _lookup, _reset])
@pytest.mark.parametrize("promoted", [False, True])
async def test_cancelled_call_leaves_nothing(
    work: Callable[[World], Coroutine[Any, Any, None]], kind: str, promoted: bool
) -> None:
    for number in itertools.count():
        async with opened(dummy(complete_index=False, get_latency_s=0.001), slots=12) as it:
            await it.store(prompt(1, 6))
            if promoted:
                await it.forget_primary()
            with anyio.fail_after(PATIENCE_S):
                cancelled = await cancelled_at(work(it), number, kind)
            it.check()
            # Every slot is reused at once: the cancelled call must not write to it any more.
            await it.store(prompt(6, 6), 40)
            stored = await it.store(prompt(7, 6), 50)
            assert stored >= 3  # a put and a get pin the others
            assert await it.load(prompt(7, 6), 60) >= stored
            await it.load(prompt(6, 6), 70)
            await it.load(prompt(5, 6), 70)
            await it.check_idle()
        if not cancelled:
            break
    assert number > 0 or work is _lookup  # a lookup of chunks in the primary tier never waits


@pytest.mark.parametrize("kind", ["task", "scope"])
@pytest.mark.parametrize("verb", ["store", "load"])
async def test_moving_bytes_hold_slots(verb: str, kind: str) -> None:
    gate = Gate()
    gate.opened.set()
    async with opened(copy=gate, slots=4) as it:
        if verb == "load":
            await it.store(prompt(1, 4))
        gate.close()
        work = it.store(prompt(1, 4)) if verb == "store" else it.manager.load(prompt(1, 4), range(40, 44))
        done = asyncio.ensure_future(cancelled_at(work, 0, kind))
        await gate.begun()
        await anyio.wait_all_tasks_blocked()
        assert not done.done()  # cancelled, and waiting for the copy's end
        assert await it.store(prompt(2, 4), 20) == 0
        gate.opened.set()
        assert await done
        if verb == "store":
            assert await it.manager.lookup(prompt(1, 4)) == 0
            assert await it.store(prompt(2, 4), 20) == 4
            assert await it.load(prompt(2, 4), 60) == 4
        else:
            assert it.device.holds(prompt(1, 4), range(40, 44))  # and the blocks are no longer written
        await it.check_idle()


async def test_load_keeps_chunks_after_block() -> None:
    """``gather`` does this: when another task fails, the block ends while the load is in flight."""
    gate = Gate()
    gate.opened.set()
    async with opened(copy=gate, slots=4) as it:
        await it.store(prompt(1, 4))
        gate.close()
        async with it.manager.acquire(prompt(1, 4)) as acquired:
            load = asyncio.ensure_future(acquired.load(range(40, 44)))
            await gate.begun()
        assert await it.manager.lookup(prompt(1, 4)) == 4
        assert await it.store(prompt(2, 4), 20) == 0
        gate.opened.set()
        await load
        assert it.device.holds(prompt(1, 4), range(40, 44))
        assert await it.store(prompt(2, 4), 20) == 4
        await it.check_idle()


async def test_repeated_cancel_still_waits() -> None:
    gate = Gate()
    async with opened(copy=gate) as it:
        store = asyncio.ensure_future(it.store(prompt(1, 4)))
        await gate.begun()
        for _ in range(3):
            store.cancel()
            await anyio.wait_all_tasks_blocked()
            assert not store.done()
        gate.opened.set()
        with pytest.raises(asyncio.CancelledError):
            await store
        await it.check_idle()
        assert await it.store(prompt(2, 4)) == 4  # other copies' ends are still noticed
