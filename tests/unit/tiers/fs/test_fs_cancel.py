"""Cancellation: a put or a get that is cut short returns when nothing touches its slots any more."""

from __future__ import annotations

import asyncio
import threading

import anyio
import pytest

from kvtier._executor import Executor
from kvtier._memory.heap import HeapMemory
from kvtier.tiers._activity import NamedTier
from kvtier.tiers._base import Status
from kvtier.tiers.fs import FsConfig, FsTier
from kvtier.tiers.fs import _tier as tier_module

pytestmark = pytest.mark.timeout(60)


class GatedFiles:
    """Work on files that waits at a gate before each job, and counts the jobs that run."""

    def __init__(self, inner):
        self.inner = inner
        self.entered = threading.Semaphore(0)
        self.gate = threading.Event()
        self.running = 0
        self.done = []
        self._lock = threading.Lock()

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def _gated(self, work, call, first, end):
        with self._lock:
            self.running += 1
        self.entered.release()
        self.gate.wait()
        try:
            return work(call, first, end)
        finally:
            with self._lock:
                self.running -= 1
                self.done += list(call.results[first:end])

    def put(self, call, first, end):
        return self._gated(self.inner.put, call, first, end)

    def get(self, call, first, end):
        return self._gated(self.inner.get, call, first, end)


@pytest.fixture
async def gated(world):
    files = GatedFiles(world.work)
    yield files
    files.gate.set()  # or the tier's threads would never end


async def _entered(files):
    await anyio.to_thread.run_sync(files.entered.acquire)


async def _open(world, gated):
    """Have chunks there, and the gate closed."""
    gated.gate.set()
    tier = await world.open(gated)
    await world.put(tier, range(8))
    while gated.entered.acquire(blocking=False):
        pass
    gated.gate.clear()
    gated.done.clear()
    return tier


async def _start(world, gated, verb):
    """Have chunks there, and a put of others or a get of them waiting at the gate."""
    tier = await _open(world, gated)
    batch = world.to_put(range(100, 164)) if verb == "put" else world.to_get(range(8))
    task = asyncio.create_task(getattr(tier, verb)(batch))
    await _entered(gated)
    return tier, batch, task


@pytest.mark.parametrize("verb", ["put", "get"])
@pytest.mark.parametrize("times", [1, 3])
async def test_a_cancelled_transfer_ends_after_its_jobs(world, gated, verb, times):
    _, _, task = await _start(world, gated, verb)
    for _ in range(times):
        task.cancel()
        await anyio.wait_all_tasks_blocked()
    assert not task.done()
    assert gated.running > 0
    gated.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gated.running == 0
    assert set(gated.done) == {-125}  # ECANCELED: what had not begun was left


async def test_closing_waits_for_jobs(world, gated):
    tier, _, task = await _start(world, gated, "put")
    closing = asyncio.create_task(tier.aclose())
    await anyio.wait_all_tasks_blocked()
    assert not closing.done()
    gated.gate.set()
    await closing
    assert gated.running == 0
    await task


@pytest.fixture
def uncountable(world, gated, monkeypatch):
    """Work on files whose first count hangs at the gate, as on a file system that does not answer."""
    monkeypatch.setattr(tier_module, "_FIRST_COUNT_PATIENCE_S", 0.0)

    def hang(root_fd, path, stop):
        gated.entered.release()
        gated.gate.wait()
        return world.work.tree_bytes(root_fd, path, stop)

    gated.tree_bytes = hang
    return gated


async def test_a_close_that_a_hung_disk_holds_up_can_be_given_up(world, uncountable):
    tier = await world.open(uncountable)
    await _entered(uncountable)
    with anyio.move_on_after(0.05) as scope:
        await tier.aclose()
    assert scope.cancelled_caught
    assert world.writers() != []
    uncountable.gate.set()
    await world.eventually(lambda: world.writers() == [])  # all is closed when the disk answers


async def test_a_shutdown_ends_at_its_deadline_while_the_disk_hangs(world, uncountable, caplog):
    tier = FsTier(FsConfig(root_dir=world.root, n_threads=2, min_free_bytes=0), uncountable)
    memory = HeapMemory(1, world.chunk_bytes)
    named = NamedTier("files", tier)
    with anyio.fail_after(30):
        async with Executor([named], world.identity, memory, lambda event: None, close_s=0.05) as executor:
            await executor.settled()
            await _entered(uncountable)
    assert "did not close within 0.05 s" in caplog.text
    uncountable.gate.set()
    await world.eventually(lambda: world.writers() == [])


async def test_gets_do_not_wait_for_puts(world, gated):
    tier, _, task = await _start(world, gated, "put")
    ungated = world.to_get(range(8))
    gated.get = world.work.get
    outcome = await tier.get(ungated)
    assert outcome.statuses == (Status.OK,) * 8
    assert not task.done()
    gated.gate.set()
    await task


async def test_an_error_in_a_job_is_raised_when_all_have_ended(world, gated, monkeypatch):
    tier = await _open(world, gated)

    def put(call, first, end):
        raise RuntimeError("broken helper")

    monkeypatch.setattr(world.work, "put", put)
    failing = asyncio.create_task(tier.put(world.to_put(range(200, 240))))
    await _entered(gated)
    gated.gate.set()
    with pytest.raises(RuntimeError, match="broken helper"):
        await failing
    assert gated.running == 0
    monkeypatch.undo()
    assert (await world.put(tier, [300])).statuses == (Status.OK,)
