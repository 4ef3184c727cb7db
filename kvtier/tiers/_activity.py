"""The current work of a tier: the turns of its puts and gets."""

from __future__ import annotations

import anyio

from kvtier.tiers._base import Usage
from kvtier.tiers._supervisor import AnyTier

_MOST_BYTES = 2**63 - 1  # upper bound of a number in a message


class ConcurrencyLimit:
    """Limits the number of commands of one kind that run at once. A command waits for its turn on entry."""

    def __init__(self, width: int) -> None:
        self.submitted = 0  # number of commands that have not ended
        self.running = 0  # number of commands that have entered
        self._semaphore = anyio.Semaphore(width)

    @property
    def waiting(self) -> int:
        """Number of commands waiting for their turn. Any thread may read it."""
        return max(0, self.submitted - self.running)

    async def __aenter__(self) -> None:
        await self._semaphore.acquire()
        self.running += 1

    async def __aexit__(self, *exc: object) -> None:
        self.running -= 1
        self._semaphore.release()


class TierActivity:
    """The current work of a tier. Only the event loop writes it; any thread may read it."""

    def __init__(self, max_concurrency: int) -> None:
        self.puts = ConcurrencyLimit(puts_at_once(max_concurrency))
        self.gets = ConcurrencyLimit(max_concurrency)
        self.usage: Usage | None = None  # about a second old at most; None if unknown


def puts_at_once(max_concurrency: int) -> int:
    """Return how many puts of a tier run at once: half as many as gets, because requests wait for gets."""
    return max(1, max_concurrency // 2)


def usage_of(tier: AnyTier) -> Usage | None:
    """Return a tier's usage as integers that the tier process can send, whatever numbers the tier returns."""
    usage = tier.usage()
    if usage is None:
        return None
    numbers = usage.used_bytes, usage.capacity_bytes
    return Usage(*(None if it is None else min(max(0, int(it)), _MOST_BYTES) for it in numbers))
