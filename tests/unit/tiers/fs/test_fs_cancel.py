"""Cancellation: an interrupted put or get returns only when nothing touches its slots any more."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from kvtier.errors import StateError
from tests.unit.tiers.fs.library import patch_library

pytestmark = pytest.mark.timeout(60)


async def _entered(gate):
    await anyio.to_thread.run_sync(gate.entered.acquire)


@pytest.fixture
def gated(gate, monkeypatch):
    """A gate before puts and gets."""
    patch_library(monkeypatch, gate, "kvt_files_put", "kvt_files_get")
    return gate


async def _start(world, gate, verb):
    """Put chunks; then block a put of other chunks, or a get, at the gate."""
    gate.open()
    tier = await world.open()
    await world.put(tier, range(8))
    gate.close()
    batch = world.to_put(range(100, 164)) if verb == "put" else world.to_get(range(8))
    task = asyncio.create_task(getattr(tier, verb)(batch))
    await _entered(gate)
    return tier, batch, task


@pytest.mark.parametrize("verb", ["put", "get"])
@pytest.mark.parametrize("times", [1, 3])
async def test_cancelled_transfer_awaits_jobs(world, gated, verb, times):
    _, batch, task = await _start(world, gated, verb)
    for _ in range(times):
        task.cancel()
        await anyio.wait_all_tasks_blocked()
    assert not task.done()
    gated.open()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not any(world.file(number).exists() for number in range(100, 164))
    assert verb == "put" or not any(map(any, world.got(batch)))


async def test_close_ends_put(world, gate, monkeypatch):
    patch_library(monkeypatch, gate, "kvt_files_contains")
    tier = await world.open()
    put = asyncio.create_task(world.put(tier, [1]))  # it looks for its file before it reserves room
    await _entered(gate)
    closing = asyncio.create_task(tier.aclose())
    await anyio.wait_all_tasks_blocked()
    assert not closing.done()
    gate.open()
    with anyio.fail_after(20):
        with pytest.raises(StateError, match="clos"):
            await put
        await closing
    assert not world.file(1).exists()


async def test_hung_close_can_be_given_up(world, hung_count):
    tier = await world.open(until_counted=False)
    await _entered(hung_count)
    with anyio.move_on_after(0.05) as scope:
        await tier.aclose()
    assert scope.cancelled_caught
    assert world.writers() != []
    hung_count.open()
    await world.eventually(lambda: world.writers() == [])  # everything is closed once the disk answers
