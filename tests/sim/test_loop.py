"""The simulated loop: time jumps, nothing waits, and the seed decides what comes first."""

from __future__ import annotations

import asyncio
import threading

import anyio
import anyio.to_thread
import pytest

from kvtier_testing.sim import Spinning, Stalled, simulate


def _order(seed: int) -> list[int]:
    async def run_ten() -> list[int]:
        order: list[int] = []

        async def note(number: int) -> None:
            await asyncio.sleep(1)
            order.append(number)

        await asyncio.gather(*map(note, range(10)))
        return order

    return simulate(run_ten, seed)


def test_seed_orders_ready_tasks() -> None:
    orders = [_order(seed) for seed in range(5)]
    assert orders == [_order(seed) for seed in range(5)]
    assert len(set(map(tuple, orders))) == 5
    assert all(sorted(order) == list(range(10)) for order in orders)


def test_threads_run_inline() -> None:
    async def work() -> list[int]:
        loop = asyncio.get_running_loop()
        return [
            await anyio.to_thread.run_sync(threading.get_ident),
            await loop.run_in_executor(None, threading.get_ident),
        ]

    before = threading.active_count()
    assert simulate(work) == [threading.get_ident()] * 2
    assert threading.active_count() == before


def test_thread_outlives_its_waiter() -> None:
    async def work() -> tuple[list[str], bool]:
        done: list[str] = []
        task = asyncio.ensure_future(anyio.to_thread.run_sync(done.append, "work"))
        await asyncio.sleep(5e-5)  # by now it has started, and usually not ended
        task.cancel()
        await asyncio.wait([task])
        await asyncio.sleep(1)
        return done, task.cancelled()

    ends = [simulate(work, seed) for seed in range(20)]
    assert (["work"], True) in ends
    assert all(done == ["work"] for done, _ in ends)


def test_lost_wakeup_ends_run() -> None:
    async def wait() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Stalled):
        simulate(wait)


def test_spinning_ends_run() -> None:
    async def spin() -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    with pytest.raises(Spinning):
        simulate(spin)
