"""A limit on concurrent requests, shared by all batches."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kvtier.tiers import wait_for_end

Request = Callable[[int], Awaitable[None]]


class RequestLimiter:
    """Runs at most ``limit`` requests at once."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._free = asyncio.Semaphore(limit)

    async def run(self, count: int, request: Request) -> None:
        """Await ``request(0)`` to ``request(count - 1)``. A cancellation cancels the requests in flight."""
        await self._run(count, request, asyncio.Event())

    async def run_drained(self, count: int, request: Request) -> None:
        """Do the same, but after a cancellation start no more requests and await those in flight.

        For requests that read slots, because obstore continues to read after a cancellation.
        """
        stopping = asyncio.Event()
        running = asyncio.ensure_future(self._run(count, request, stopping))
        cancelled = await wait_for_end(running, stopping.set)
        if cancelled is not None:
            raise cancelled
        running.result()

    async def _run(self, count: int, request: Request, stopping: asyncio.Event) -> None:
        indices = iter(range(count))

        async def work() -> None:
            for index in indices:
                async with self._free:
                    if stopping.is_set():
                        return
                    await request(index)

        if count == 1:
            await work()
            return
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(count, self._limit)):
                tasks.create_task(work())
