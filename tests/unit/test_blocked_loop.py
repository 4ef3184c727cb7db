"""A program that computes on the manager's event loop: kvtier does not blame the tiers for it."""

from __future__ import annotations

import asyncio
import time

import anyio
import pytest

from kvtier._core.states import BreakerState
from kvtier.tiers import Batch, Outcome
from kvtier_testing.dummy import DummyConfig, DummyTier
from tests.common import PATIENCE_S
from tests.unit.test_manager import World, opened, prompt

pytestmark = pytest.mark.blocking(reason="the program blocks its event loop")
DEADLINE_S = 0.6
BLOCKED_S = 1.2


class TimesOut(DummyTier):
    """A client with its own time limit. Its first puts start together, in one turn of a blocked loop."""

    PUTS = 6
    """Five failures in a row would open the breaker."""

    begun: anyio.Event
    entered = 0
    waiting = 0

    async def put(self, batch: Batch) -> Outcome:
        self.entered += 1
        if self.entered > self.PUTS:  # a retry
            return await super().put(batch)
        if self.entered == self.PUTS:
            self.begun.set()
        await self.begun.wait()
        async with asyncio.timeout(DEADLINE_S / 2):
            self.waiting += 1
            if self.waiting == self.PUTS:
                time.sleep(BLOCKED_S)  # noqa: ASYNC251
            await anyio.sleep_forever()
        raise AssertionError("no client waits for ever")


class Begun(DummyTier):
    """Signals that a put or a get is in flight."""

    def __init__(self, config: DummyConfig) -> None:
        super().__init__(config)
        self.begun = anyio.Event()

    async def put(self, batch: Batch) -> Outcome:
        self.begun.set()
        return await super().put(batch)

    async def get(self, batch: Batch) -> Outcome:
        self.begun.set()
        return await super().get(batch)


def healthy(it: World) -> None:
    """Check that nothing was dropped, late or counted against the tier."""
    (tier,) = it.manager.statistics().tiers
    assert (tier.down, tier.overdue, tier.puts, tier.gets) == (
        None,
        0,
        BreakerState.CLOSED,
        BreakerState.CLOSED,
    )
    words = {key[0] for key, count in it.manager.statistics().counts.items() if count}
    assert not words & {"overdue", "breaker_opened", "put_dropped", "put_failed", "tier_down", "expired"}


async def test_fails_no_put(caplog: pytest.LogCaptureFixture) -> None:
    tier = Begun(DummyConfig(deadline_s=DEADLINE_S, put_latency_s=0.1))
    async with opened(tier) as it:
        await it.store(prompt(1, 4))
        await tier.begun.wait()
        time.sleep(BLOCKED_S)  # noqa: ASYNC251
        await it.store(prompt(2, 4))
        await it.check_idle()
        assert it.manager.statistics().counts["put", "dummy0"] == 8
        healthy(it)
    assert "the event loop was blocked for 1." in caplog.text


async def test_fails_no_get() -> None:
    tier = Begun(DummyConfig(deadline_s=DEADLINE_S, get_latency_s=0.1, complete_index=False))
    async with opened(tier, slots=64) as it:
        await it.store(prompt(1, 4))
        await it.forget_primary()
        tier.begun = anyio.Event()
        load = asyncio.ensure_future(it.load(prompt(1, 4), 20))
        await tier.begun.wait()
        time.sleep(BLOCKED_S)  # noqa: ASYNC251
        assert await load == 4
        await it.check_idle()
        healthy(it)


async def test_client_timeout_is_excused() -> None:
    tier = TimesOut(DummyConfig(deadline_s=PATIENCE_S, max_concurrency=12))
    async with opened(tier) as it:
        tier.begun = anyio.Event()
        for number in range(tier.PUTS):
            await it.store(prompt(number, 2))
        await it.check_idle()
        assert it.manager.statistics().counts["put_failed", "dummy0", "timeout"] >= 10  # one may be retried
        (state,) = it.manager.statistics().tiers
        assert state.puts is BreakerState.CLOSED


async def test_late_tier_is_charged() -> None:
    async with opened(DummyTier(DummyConfig(deadline_s=0.2, put_latency_s=PATIENCE_S))) as it:
        await it.store(prompt(1, 2))
        await it.check_idle()
        assert it.manager.statistics().counts["overdue", "dummy0", "put"] == 1


async def test_brief_blocks_fail_no_put() -> None:
    tier = DummyTier(DummyConfig(deadline_s=DEADLINE_S, put_latency_s=DEADLINE_S / 3))
    async with opened(tier) as it:
        await it.store(prompt(1, 4))
        for _ in range(4):
            time.sleep(0.4)  # noqa: ASYNC251
            await asyncio.sleep(0)
        await it.check_idle()
        healthy(it)


def test_uvloop_fails_no_put() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def use() -> None:
        tier = Begun(DummyConfig(deadline_s=DEADLINE_S, put_latency_s=0.1))
        async with opened(tier) as it:
            await it.store(prompt(1, 4))
            await tier.begun.wait()
            time.sleep(BLOCKED_S)  # noqa: ASYNC251
            await it.store(prompt(2, 4))
            await it.check_idle()
            healthy(it)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(use())
