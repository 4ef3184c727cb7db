"""The worker threads: as many as concurrent calls, and none after closing."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvtier_redis._pool import WorkerThreads


def thread() -> threading.Thread:
    return threading.current_thread()


async def test_sequential_calls_share_thread() -> None:
    threads = WorkerThreads()
    assert len({await threads.start(thread) for _ in range(500)}) == 1
    await threads.close(1)


async def test_concurrent_calls_have_threads() -> None:
    threads, all_there = WorkerThreads(), threading.Barrier(3)

    def meet() -> threading.Thread:
        all_there.wait(30)
        return thread()

    used: list[threading.Thread] = []
    for _ in range(3):
        used = await asyncio.gather(*(threads.start(meet) for _ in range(3)))
        assert len(set(used)) == 3
    await threads.close(1)
    for one in used:
        one.join(30)
        assert not one.is_alive()
    with pytest.raises(RuntimeError, match="have ended"):
        threads.start(thread)


@pytest.mark.parametrize("fails", [False, True])
async def test_abandoned_call_is_awaited(fails: bool, caplog: pytest.LogCaptureFixture) -> None:
    threads = WorkerThreads()
    begun, go_on, ended = (threading.Event() for _ in range(3))

    def call() -> None:
        begun.set()
        try:
            go_on.wait(30)
            if fails:
                raise ConnectionError("AUTH hidden refused")
        finally:
            ended.set()

    running = threads.start(call)
    while not begun.is_set():  # noqa: ASYNC110 - a thread tells
        await asyncio.sleep(0.001)
    running.cancel()
    closing = asyncio.ensure_future(threads.close(30))
    await asyncio.sleep(0)
    assert not closing.done()
    go_on.set()
    await closing
    assert ended.is_set()
    assert not caplog.records
