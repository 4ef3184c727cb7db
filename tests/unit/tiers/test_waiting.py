"""Calls in threads: a cancelled caller waits for its started calls, and starts no more."""

from __future__ import annotations

import asyncio
import threading

import anyio
import pytest

from kvtier.tiers import in_thread

pytestmark = pytest.mark.anyio


async def test_cancelled_call_never_begins() -> None:
    limiter, goes_on, begun = anyio.CapacityLimiter(1), threading.Event(), list[int]()

    def call(number: int) -> None:
        begun.append(number)
        goes_on.wait(60)

    first = asyncio.create_task(in_thread(call, 1, limiter=limiter))
    second = asyncio.create_task(in_thread(call, 2, limiter=limiter))
    with anyio.fail_after(60):
        while not begun or not limiter.statistics().tasks_waiting:  # noqa: ASYNC110 - nothing tells of it
            await anyio.sleep(0.005)
        second.cancel()
        await asyncio.wait((second,))
        assert second.cancelled()
        first.cancel()
        await anyio.wait_all_tasks_blocked()
        assert not first.done(), "what has begun is waited for"
        goes_on.set()
        await asyncio.wait((first,))
    assert first.cancelled()
    assert begun == [1]
    assert not limiter.borrowed_tokens
