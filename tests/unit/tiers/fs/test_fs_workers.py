"""The file tier's threads survive failures of their work."""

from __future__ import annotations

import errno
import threading

import anyio
import pytest

from kvtier.tiers import Status
from kvtier.tiers.fs._files.workers import Workers
from kvtier.tiers.fs._maintenance import maintenance
from kvtier.tiers.fs._maintenance.evict import Evictor
from kvtier.tiers.fs._quota.ledger import SharedLedger
from kvtier.tiers.fs._quota.quota import Quota

pytestmark = pytest.mark.timeout(60)


def test_failing_job_keeps_thread(caplog):
    done = threading.Event()

    def fail():
        raise RuntimeError("a bug")

    workers = Workers("test", 1)
    workers.submit(fail)
    workers.submit(done.set)
    assert done.wait(30)
    workers.close()
    workers.join()
    assert "a bug" in caplog.text


async def test_failed_flush_allows_puts(world, monkeypatch):
    failed = threading.Event()

    def fail(quota):
        failed.set()
        raise RuntimeError("a bug")

    tier = await world.open(max_bytes=2**50)
    monkeypatch.setattr(Quota, "flush", fail)
    number = 10
    while not failed.is_set():  # reports of a concurrent tick are not flushed
        assert (await world.put(tier, [number := number + 1])).statuses == (Status.OK,)
        await anyio.sleep(0.01)
    # The lease ahead is returned: the next put asks the thread.
    await anyio.to_thread.run_sync(world.session(tier).quota.refresh)
    assert (await world.put(tier, [2])).statuses == (Status.OK,)
    monkeypatch.undo()


async def test_unwritable_ledger_stops_eviction(world, monkeypatch):
    """The last known numbers may be an hour old if a stopped process holds the ledger's lock."""
    monkeypatch.setattr(maintenance, "TICK_S", 0.01)
    tier = await world.open()
    await world.put(tier, range(16))
    await tier.aclose()
    used = await world.bytes_below()
    evicted, ticks, change, refresh = [], threading.Semaphore(0), SharedLedger.change, Quota.refresh

    def fail(ledger):
        raise TimeoutError(errno.ETIMEDOUT, "another process has held it")

    def make_room(evictor, need, *arguments):
        monkeypatch.setattr(SharedLedger, "change", fail)
        evicted.append(need)
        return make_room_(evictor, need, *arguments)

    def ticked(quota):
        ticks.release()
        refresh(quota)

    make_room_ = Evictor.make_room
    monkeypatch.setattr(Evictor, "make_room", make_room)
    monkeypatch.setattr(Quota, "refresh", ticked)
    tier = await world.open(max_bytes=used // 2)
    await world.eventually(lambda: evicted)
    for _ in range(8):
        await world.eventually(lambda: ticks.acquire(blocking=False))
    assert len(evicted) == 1
    monkeypatch.setattr(SharedLedger, "change", change)
