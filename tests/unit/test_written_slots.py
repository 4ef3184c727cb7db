"""Chunks that the caller writes into slots itself, and the places of chunks without a load."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from kvtier._core.limits import Limits
from kvtier.errors import StateError
from kvtier.keys import OffloadKey
from kvtier_testing.dummy import DummyConfig, DummyTier
from tests.common import PATIENCE_S
from tests.unit.test_manager import Deaf, World, dummy, files, opened, prompt


class Waiting(DummyTier):
    """Answers no lookup until the test releases it."""

    def __init__(self) -> None:
        super().__init__(DummyConfig(complete_index=False, deadline_s=60.0))
        self.asked, self.let_go = anyio.Event(), anyio.Event()

    async def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        self.asked.set()
        await self.let_go.wait()
        return await super().contains(keys)


async def write(it: World, keys: list[OffloadKey]) -> int:
    """Write chunks whose bytes follow from their keys; return how many got a slot."""
    async with it.manager.write(keys) as written:
        for key, view in zip(written.keys, written.views, strict=True):
            view[:] = (key * len(view))[: len(view)]
    return len(written.keys)


async def check(it: World, keys: list[OffloadKey]) -> int:
    async with it.manager.acquire(keys) as acquired:
        for key, view in zip(acquired.keys, acquired.views, strict=True):
            assert view == (key * len(view))[: len(view)]
        return len(acquired.keys)


async def test_written_is_found_in_every_tier(tmp_path: Path) -> None:
    async with opened(files(tmp_path)) as it:
        assert await write(it, prompt(1, 4)) == 4
        assert await write(it, prompt(1, 6)) == 2, "the others are there"
        assert await check(it, prompt(1, 8)) == 6
        await it.forget_primary()
        assert await check(it, prompt(1, 8)) == 6
        await it.check_idle()


async def test_unfinished_write_is_not_stored() -> None:
    async with opened(dummy()) as it:
        block = it.manager.write(prompt(1, 4))
        written = await block.__aenter__()
        written.views[0][:] = bytes(len(written.views[0]))
        error = ZeroDivisionError()
        assert not await block.__aexit__(type(error), error, None), "it goes on to the caller"
        with pytest.raises(StateError, match="inside of the write block"):
            _ = written.views
        assert await it.manager.locate(prompt(1, 4)) == [False] * 4
        assert await write(it, prompt(1, 4)) == 4
        await it.check_idle()


async def test_thread_of_cancelled_write_harms_nobody() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def fill(views: Sequence[memoryview]) -> None:
        begun.set()
        may_end.wait()
        for view in views:
            view[:] = b"x" * len(view)

    async def fill_in_thread() -> None:
        async with it.manager.write(prompt(1, 3)) as written:
            await asyncio.get_running_loop().run_in_executor(None, fill, written.views)

    async with opened(slots=4) as it:
        writing = asyncio.ensure_future(fill_in_thread())
        try:
            await asyncio.to_thread(begun.wait)
            writing.cancel()
            with suppress(asyncio.CancelledError):
                await writing
            assert await write(it, prompt(2, 4)) == 1, "the thread may still write to the other slots"
        finally:
            may_end.set()
        del writing
        with anyio.fail_after(PATIENCE_S):
            while it.manager.statistics().free_slots < 3:
                gc.collect()
                await asyncio.sleep(0)
        assert await check(it, prompt(2, 4)) == 1
        await it.check_idle()


async def test_write_across_reset_is_lost() -> None:
    async with opened(dummy()) as it:
        async with it.manager.write(prompt(1, 4)):
            await it.manager.reset()
        assert await it.manager.locate(prompt(1, 4)) == [False] * 4
        await it.check_idle()


async def test_no_room_writes_nothing() -> None:
    async with opened(slots=2) as it:
        await write(it, prompt(1, 2))
        async with it.manager.acquire(prompt(1, 2)):
            assert await write(it, prompt(2, 2)) == 0
        assert await write(it, prompt(2, 3)) == 2
        await it.check_idle()


async def test_locating_brings_nothing(tmp_path: Path) -> None:
    async with opened(dummy(), files(tmp_path)) as it:
        await write(it, prompt(1, 2))
        await it.forget_primary()
        await write(it, prompt(2, 1))
        wanted = [*prompt(1, 1), *prompt(3, 1), *prompt(2, 1), prompt(1, 2)[1]]
        assert await it.manager.locate(wanted) == [True, False, True, True]
        assert await it.manager.locate([]) == []
        await it.check_idle()
        assert "fetched" not in {key[0] for key, count in it.manager.statistics().counts.items() if count}


async def test_known_is_counted_once() -> None:
    limits = Limits(request_deadline_s=60.0)
    async with opened(dummy(get_latency_s=0.05, complete_index=False), limits=limits) as it:
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(it.manager.locate(prompt(name, 3))) for name in range(4)]
        assert [task.result() for task in asked] == [[False] * 3] * 4
        assert it.manager.statistics().counts["miss", "absent"] == 12
        await it.check_idle()


async def test_reset_during_locate() -> None:
    tier = Waiting()
    async with opened(tier, limits=Limits(request_deadline_s=60.0)) as it:
        await write(it, prompt(1, 1))
        locating = asyncio.ensure_future(it.manager.locate([*prompt(1, 1), *prompt(2, 1)]))
        await tier.asked.wait()
        resetting = asyncio.ensure_future(it.manager.reset())
        await asyncio.sleep(0)
        tier.let_go.set()
        await resetting
        assert await locating == [False, False]
        await it.check_idle()


async def test_locate_beside_acquire() -> None:
    tier = Waiting()
    async with opened(tier, slots=8, limits=Limits(request_deadline_s=60.0)) as it:
        tier.let_go.set()
        await write(it, prompt(1, 2))
        await it.forget_primary()
        tier.let_go, tier.asked = anyio.Event(), anyio.Event()
        locating = asyncio.ensure_future(it.manager.locate(prompt(1, 3)))
        await tier.asked.wait()
        acquiring = asyncio.ensure_future(check(it, prompt(1, 3)))
        also = asyncio.ensure_future(it.manager.locate(prompt(1, 3)))
        await asyncio.sleep(0)
        tier.let_go.set()
        assert await locating == await also == [True, True, False]
        assert await acquiring == 2
        await it.check_idle()


async def test_timely_puts_are_drained() -> None:
    tier = Waiting()
    async with opened(tier, limits=Limits(request_deadline_s=60.0)) as it:
        locating = asyncio.ensure_future(it.manager.locate(prompt(1, 1)))
        await tier.asked.wait()
        await write(it, prompt(2, 2))
        await it.manager.drain_puts()
        assert not locating.done()
        assert it.manager.statistics().tiers[0].backlog_chunks == 0
        tier.let_go.set()
        assert await locating == [False]
        await it.check_idle()


async def test_overdue_puts_are_not_drained() -> None:
    tier = Deaf(DummyConfig(deadline_s=1.0))  # deadline for the start of its put
    async with opened(tier, drain_s=0.0) as it:
        await write(it, prompt(1, 1))
        with anyio.fail_after(30):
            await it.manager.drain_puts()
        assert it.manager.statistics().tiers[0].overdue == 1
        tier.let_go.set()
        await it.check_idle()


async def test_hung_tier_locates_nothing() -> None:
    hanging = dummy(hang_rate=1.0, get_latency_s=60.0, complete_index=False, deadline_s=0.2)
    async with opened(hanging, limits=Limits(request_deadline_s=0.2), drain_s=0.0) as it:
        assert await it.manager.locate(prompt(1, 3)) == [False] * 3
        await it.check_idle()
