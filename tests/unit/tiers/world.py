"""An executor with a test in place of its owner, and tiers with scripted answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any

import anyio

from kvtier import HeapMemory
from kvtier._core.messages import Command, Event, Get, GetEnded, Put, PutEnded, Reset, TierDown, TierUp
from kvtier._execution.executor import Executor, NamedTier
from kvtier.keys import OffloadKey
from kvtier.tiers import Batch, Knowledge, SecondaryTier, TierContext, Usage
from kvtier_testing.dummy import DummyConfig, DummyTier
from tests.common import named_tier
from tests.unit.isolation.conftest import CHUNK_BYTES, IDENTITY, PATIENCE_S, SLOTS, content, keys

AnyTier = SecondaryTier[Any]
Ended = PutEnded | GetEnded
Act = Callable[[], Any]


def ends_of(events: Iterable[Event]) -> list[Ended]:
    """Return the ends of puts and gets among some events."""
    return [event for event in events if isinstance(event, PutEnded | GetEnded)]


def now_s() -> float:
    """Return the loop's time, which may be virtual."""
    return asyncio.get_running_loop().time()


class World:
    """An executor and its events. Chunk ``n`` has the bytes ``content(n)``; puts use slot ``n``.

    Attributes:
        events: events so far.
        times: times of the events, on the loop's clock.
    """

    def __init__(
        self, *tiers: AnyTier | NamedTier, memory: HeapMemory | None = None, **settings: Any
    ) -> None:
        named = [
            tier if isinstance(tier, NamedTier) else named_tier(f"tier{index}", tier)
            for index, tier in enumerate(tiers)
        ]
        self.memory = memory or HeapMemory(SLOTS, CHUNK_BYTES)
        self.executor = Executor(named, IDENTITY, self.memory, self._post, **settings)
        self.events: list[Event] = []
        self.times: list[float] = []
        self.submitted = 0
        self._arrived = anyio.Event()

    def _post(self, event: Event) -> None:
        self.events.append(event)
        self.times.append(now_s())
        arrived, self._arrived = self._arrived, anyio.Event()
        arrived.set()

    def put(self, numbers: Sequence[int], tier: int = 0) -> int:
        for number in numbers:
            self.memory.view(number)[:] = content(number)
        return self.submit(Put, tier, keys(numbers), list(numbers))

    def fetch(
        self,
        numbers: Sequence[int],
        slots: Sequence[int] | None = None,
        tier: int = 0,
        located: bool = False,
    ) -> int:
        """Get chunks; chunk ``n`` goes into slot ``30 + n`` unless other slots are named."""
        slots = [30 + number for number in numbers] if slots is None else list(slots)
        return self.submit(Get, tier, keys(numbers), slots, located)

    def reset(self, epoch: int = 1, tier: int = 0) -> None:
        self.executor.submit([Reset(tier, epoch)])

    def submit(self, kind: Callable[..., Command], *args: object) -> int:
        self.submitted += 1
        self.executor.submit([kind(self.submitted, *args)])
        return self.submitted

    async def until(self, holds: Callable[[], object]) -> None:
        """Wait for events until the condition holds."""
        with anyio.fail_after(PATIENCE_S):
            while not holds():
                await self._arrived.wait()

    async def ended(self, id_: int) -> Any:
        """Wait for the end of a put or a get, and check that it ends once."""
        await self.until(lambda: self.of(id_))
        (event,) = self.of(id_)
        return event

    def of(self, id_: int) -> list[Ended]:
        return [event for event in ends_of(self.events) if event.id == id_]

    @property
    def downs(self) -> list[TierDown]:
        return [event for event in self.events if isinstance(event, TierDown)]

    def conditions(self) -> list[tuple[float, type]]:
        """Return when tiers went down and came up."""
        happened = zip(self.times, self.events, strict=True)
        return [(when, type(event)) for when, event in happened if isinstance(event, TierDown | TierUp)]

    async def hold(self, numbers: Sequence[int], tier: int = 0) -> None:
        """Put chunks and check that they are stored."""
        ended = await self.ended(self.put(numbers, tier))
        assert list(ended.kept) == [True] * len(numbers), ended

    def clear(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.memory.view(slot)[:] = bytes(CHUNK_BYTES)

    def bytes_in(self, slot: int) -> bytes:
        return bytes(self.memory.view(slot))


@asynccontextmanager
async def world(*tiers: AnyTier | NamedTier, **settings: Any) -> AsyncIterator[World]:
    it = World(*tiers, **settings)
    async with it.executor:
        yield it


class Scripted(DummyTier):
    """A dummy tier whose verbs follow scripts first.

    A script is a list of acts, or one act for all calls. The verb returns the act's result, awaited if it
    is a coroutine; after None the dummy's verb runs. The tier supplies no proofs, so no thread checks them.
    """

    verifies = True
    reasons = MappingProxyType({"busy": "come again", "sad": "never"})
    transient = frozenset({"busy"})

    def __init__(self, config: DummyConfig | None = None, /, **scripts: Act | Sequence[Act | None]) -> None:
        super().__init__(config or DummyConfig(complete_index=False))
        self.scripts = {verb: acts if callable(acts) else list(acts) for verb, acts in scripts.items()}
        self.calls: list[tuple[str, float]] = []
        self.batches: list[list[OffloadKey]] = []

    def of(self, verb: str) -> list[float]:
        """Return when a verb was called."""
        return [when for what, when in self.calls if what == verb]

    def _next(self, verb: str) -> Any:
        script = self.scripts.get(verb)
        act = script.pop(0) if script and not callable(script) else script
        return act() if callable(act) else None

    async def _scripted(self, verb: str, *arguments: Any) -> Any:
        self.calls.append((verb, now_s()))
        result = self._next(verb)
        if asyncio.iscoroutine(result):
            result = await result
        return await getattr(DummyTier, verb)(self, *arguments) if result is None else result

    async def open(self, context: TierContext) -> None:
        await self._scripted("open", context)

    async def reset(self) -> None:
        await self._scripted("reset")

    async def aclose(self) -> None:
        """Keep the chunks, as a disk does."""
        self.calls.append(("aclose", now_s()))
        self._next("aclose")

    def known(self, keys: Sequence[OffloadKey]) -> Sequence[Knowledge]:
        answer = self._next("known")
        return super().known(keys) if answer is None else answer

    def usage(self) -> Usage:
        answer = self._next("usage")
        return super().usage() if answer is None else answer

    async def contains(self, keys: Sequence[OffloadKey]) -> Any:
        return await self._scripted("contains", keys)

    async def put(self, batch: Batch) -> Any:
        self.batches.append(list(batch.keys))
        return await self._scripted("put", batch)

    async def get(self, batch: Batch) -> Any:
        self.batches.append(list(batch.keys))
        return await self._scripted("get", batch)

    async def touch(self, keys: Sequence[OffloadKey]) -> None:
        self.batches.append(list(keys))
        await self._scripted("touch", keys)

    async def discard(self, keys: Sequence[OffloadKey]) -> None:
        await self._scripted("discard", keys)


def raises(error: BaseException) -> Act:
    def act() -> Any:
        raise error

    return act
