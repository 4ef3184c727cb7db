"""What a tier is doing now: the turns of its puts and gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import anyio

from kvtier.tiers._base import Usage
from kvtier.tiers._supervisor import AnyTier


@dataclass(frozen=True, slots=True)
class NamedTier:
    """A tier and the name that logs and metrics give it.

    Attributes:
        tier: the tier, not opened yet.
        recreate: makes another one like it, for the next attempt where opening it has failed; None where the
            same object may be opened again.
    """

    name: str
    tier: AnyTier
    recreate: Callable[[], AnyTier] | None = None


class ConcurrencyLimit:
    """Limits how many commands of one kind run at once. Each command enters it, and waits there for its turn.

    Attributes:
        submitted: commands that have not ended.
        running: those of them that have been given their turn.
    """

    def __init__(self, width: int) -> None:
        self.submitted = 0
        self.running = 0
        self._semaphore = anyio.Semaphore(width)

    @property
    def waiting(self) -> int:
        """Commands that wait for their turn. May be asked from any thread."""
        return max(0, self.submitted - self.running)

    async def __aenter__(self) -> None:
        await self._semaphore.acquire()
        self.running += 1

    async def __aexit__(self, *exc: object) -> None:
        self.running -= 1
        self._semaphore.release()


class TierActivity:
    """The current work of a tier. Only the event loop writes it; any thread may read it.

    Attributes:
        usage: how full it is, at most about a second old; None if unknown.
    """

    def __init__(self, max_concurrency: int) -> None:
        self.puts = ConcurrencyLimit(puts_at_once(max_concurrency))
        self.gets = ConcurrencyLimit(max_concurrency)
        self.usage: Usage | None = None


def puts_at_once(max_concurrency: int) -> int:
    """Return how many puts of a tier run at once: half as many as gets, which somebody waits for."""
    return max(1, max_concurrency // 2)
