"""A program that computes on the manager's event loop: the tiers are not charged for it."""

from __future__ import annotations

import asyncio
import time

import anyio
import pytest

from kvtier._core.states import BreakerState
from kvtier.tiers._base import Batch, Outcome
from kvtier.tiers.dummy import DummyConfig, DummyTier
from tests.common import PATIENCE_S
from tests.unit.test_manager import World, opened, prompt

pytestmark = pytest.mark.blocking(reason="the program blocks its event loop")
DEADLINE_S = 0.6
BLOCKED_S = 1.2


class TimesOut(DummyTier):
    """A client with a time limit of its own, on the event loop."""

    async def put(self, batch: Batch) -> Outcome:
        async with asyncio.timeout(DEADLINE_S / 2):
            await anyio.sleep(DEADLINE_S / 4)
            return await super().put(batch)


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
    """See that nothing was dropped, late or counted against the tier."""
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
        for round_ in range(3):
            tier.begun = anyio.Event()
            await it.store(prompt(round_, 4))
            await tier.begun.wait()
            time.sleep(BLOCKED_S)  # noqa: ASYNC251
            await it.store(prompt(10 + round_, 4))
        await it.check_idle()
        assert it.manager.statistics().counts["put", "dummy0"] == 24
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
    tier = TimesOut(DummyConfig(deadline_s=PATIENCE_S))
    async with opened(tier) as it:
        for round_ in range(6):  # five failures in a row would open the breaker
            await it.store(prompt(round_, 2))
            await anyio.wait_all_tasks_blocked()
            time.sleep(1.0)  # noqa: ASYNC251
        await it.check_idle()
        (state,) = it.manager.statistics().tiers
        assert state.puts is BreakerState.CLOSED


async def test_late_tier_is_charged() -> None:
    async with opened(DummyTier(DummyConfig(deadline_s=0.2, put_latency_s=PATIENCE_S))) as it:
        await it.store(prompt(1, 2))
        await it.check_idle()
        assert it.manager.statistics().counts["overdue", "dummy0", "put"] == 1


@pytest.mark.parametrize("block_s", [0.4])
async def test_brief_blocks_fail_no_put(block_s: float) -> None:
    tier = DummyTier(DummyConfig(deadline_s=DEADLINE_S, put_latency_s=DEADLINE_S / 3))
    async with opened(tier) as it:
        await it.store(prompt(1, 4))
        for _ in range(4):
            time.sleep(block_s)  # noqa: ASYNC251
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
