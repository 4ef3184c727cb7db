"""A tier behind kvtier's executor, for tests of how transfers end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from itertools import count

from kvtier import HeapMemory
from kvtier._core.messages import Answer, Command, Event, Get, GetEnded, Put, PutEnded
from kvtier._execution.executor import Executor, NamedTier
from kvtier_testing.tiers.rig import REUSED, TierRig, check_reused, expect, keys


class TierDriver:
    """A tier behind kvtier's executor: seals, checks and limits as in an engine.

    Attributes:
        memory: the slots; the caller chooses the slot of each chunk.
        events: events posted by the executor.
    """

    def __init__(self, rig: TierRig, slots: int) -> None:
        self.rig = rig
        self.memory = HeapMemory(slots, rig.chunk_bytes)
        self.events: list[Event] = []
        self.executor = Executor(
            [NamedTier("tested", lambda: rig.tier)], rig.identity, self.memory, self._post, close_s=10.0
        )
        self._ids = count()
        self._waiting: dict[int, asyncio.Future[Event]] = {}
        self._on_end: dict[int, list[int]] = {}

    def start_put(self, numbers: Sequence[int], slots: Sequence[int]) -> asyncio.Future[Event]:
        """Put the slots' contents; the slots are reused after the put."""
        return self._start(Put(next(self._ids), 0, keys(numbers), slots), slots)

    def start_fetch(
        self, numbers: Sequence[int], slots: Sequence[int], *, keep: bool = False
    ) -> asyncio.Future[Event]:
        """Look chunks up and get the leading ones found; unless ``keep``, the slots are reused."""
        fetch = Get(next(self._ids), 0, keys(numbers), slots, located=False)
        return self._start(fetch, () if keep else slots)

    async def put(self, numbers: Sequence[int]) -> PutEnded:
        """Put chunks from the first slots."""
        slots = range(len(numbers))
        for slot, number in zip(slots, numbers, strict=True):
            self.memory.view(slot)[:] = self.rig.content(number)
        event = await self.start_put(numbers, slots)
        assert isinstance(event, PutEnded)
        return event

    async def fetch(self, numbers: Sequence[int]) -> GetEnded:
        """Get chunks into the first slots."""
        event = await self.start_fetch(numbers, range(len(numbers)), keep=True)
        assert isinstance(event, GetEnded)
        return event

    def check_copied(self, numbers: Sequence[int], fetched: GetEnded) -> None:
        """Check the bytes of all chunks that a fetch brought into the first slots."""
        for slot, (number, answer) in enumerate(zip(numbers, fetched.answers, strict=True)):
            right = self.memory.view(slot) == self.rig.content(number)
            expect(answer != Answer.COPIED or right, f"chunk {number} was given with wrong bytes")

    def ends_of(self, futures: Iterable[asyncio.Future[Event]]) -> list[int]:
        """Count the events that ended each started command."""
        wanted = {id(future): number for number, future in self._waiting.items()}
        numbers = [wanted[id(future)] for future in futures]
        ids = [event.id for event in self.events if isinstance(event, PutEnded | GetEnded)]
        return [ids.count(number) for number in numbers]

    def check_reused(self, slots: Iterable[int], what: str) -> None:
        """Check that nothing was written into slots that are in use again."""
        check_reused(self.memory, slots, what)

    def _start(self, command: Put | Get, slots: Sequence[int]) -> asyncio.Future[Event]:
        future: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
        self._waiting[command.id] = future
        self._on_end[command.id] = list(slots)
        commands: list[Command] = [command]
        self.executor.submit(commands)
        return future

    def _post(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, PutEnded | GetEnded):
            for slot in self._on_end[event.id]:
                self.memory.view(slot)[:] = bytes([REUSED]) * self.rig.chunk_bytes
            if not self._waiting[event.id].done():
                self._waiting[event.id].set_result(event)
