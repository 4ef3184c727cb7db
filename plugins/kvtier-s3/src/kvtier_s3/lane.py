"""Many requests at once, but not too many: over all batches together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

from kvtier.tiers.drain import until_done

One = Callable[[int], Awaitable[None]]


class Lane:
    """Requests of one kind.

    Args:
        width: how many of them may be under way at once.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._turns = asyncio.Semaphore(width)

    async def each(self, count: int, one: One) -> None:
        """Await ``one(0)`` to ``one(count - 1)``, many at once. Where it is cancelled they are, too."""
        await self._spread(count, one, _Stop())

    async def each_to_its_end(self, count: int, one: One) -> None:
        """Do the same, but have what has begun come to its end before a cancellation goes on.

        For requests that read slots: the client goes on reading after a cancellation.
        """
        stop = _Stop()
        work = asyncio.ensure_future(self._spread(count, one, stop))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            stop.is_set = True
            await until_done(work)
            raise

    async def _spread(self, count: int, one: One, stop: _Stop) -> None:
        numbers = iter(range(count))
        if count == 1:
            await self._work(numbers, one, stop)
            return
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(count, self._width)):
                tasks.create_task(self._work(numbers, one, stop))

    async def _work(self, numbers: Iterator[int], one: One, stop: _Stop) -> None:
        for number in numbers:
            async with self._turns:
                if stop.is_set:
                    return
                await one(number)


class _Stop:
    """Says that nothing more is to be begun."""

    def __init__(self) -> None:
        self.is_set = False
