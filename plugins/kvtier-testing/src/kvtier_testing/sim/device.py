"""A simulated device: copies take time, end in any order, and sometimes fail.

A copy in flight has exclusive use of the slots that it writes. It moves half of its bytes at its start and
half at its end, so the bytes reveal other changes to a slot meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvtier_testing.sim.model import CHUNK_BYTES, SimMemory, World

_HALF = CHUNK_BYTES // 2


class Copies:
    """Copies between a device and the slots.

    Args:
        failures: fraction of copies that fail.
        longest_s: longest duration of a copy.
    """

    def __init__(
        self, world: World, memory: SimMemory, *, failures: float, until_s: float, longest_s: float
    ) -> None:
        self._world = world
        self._memory = memory
        self._failures = failures
        self._until_s = until_s
        self._longest_s = longest_s
        self._chance = world.chance(f"device/{world.process}")
        self._under_way: dict[Callable[[], None], asyncio.TimerHandle] = {}  # by ending callback

    @property
    def under_way(self) -> int:
        """The number of copies in flight."""
        return len(self._under_way)

    def store(self, slots: Sequence[int], contents: Sequence[bytes], done: Callable[[bool], object]) -> None:
        """Copy to slots; ``done`` gets whether it succeeded."""
        memory, fails = self._memory, self._fails()
        use = memory.begin_use(slots, "a store", writes=True)
        memory.scribble(slots)
        for slot, one in zip(slots, contents, strict=True):
            memory.view(slot)[:_HALF] = one[:_HALF]

        def end() -> None:
            del self._under_way[end]
            if not fails:
                for slot, one in zip(slots, contents, strict=True):
                    memory.view(slot)[_HALF:] = one[_HALF:]
            memory.end_use(slots, use)
            done(not fails)

        self._end_later(end)

    def load(self, slots: Sequence[int], done: Callable[[list[bytes] | None], object]) -> None:
        """Copy from slots; ``done`` is called with the bytes, or None if the copy failed."""
        memory, fails = self._memory, self._fails()
        use = memory.begin_use(slots, "a load", writes=False)
        halves = [bytes(memory.view(slot)[:_HALF]) for slot in slots]

        def end() -> None:
            del self._under_way[end]
            rest = [bytes(memory.view(slot)[_HALF:]) for slot in slots]
            memory.end_use(slots, use)
            done(None if fails else [a + b for a, b in zip(halves, rest, strict=True)])

        self._end_later(end)

    def hurry(self) -> None:
        """End all copies now, with the same effect as waiting for them."""
        for end, timer in list(self._under_way.items()):
            timer.cancel()
            end()

    def stop(self) -> None:
        """Stop the copies halfway, as the death of their process does."""
        for timer in self._under_way.values():
            timer.cancel()

    def _end_later(self, end: Callable[[], None]) -> None:
        seconds = self._chance.random() * self._longest_s
        self._under_way[end] = self._world.loop.call_later(seconds, end)

    def _fails(self) -> bool:
        fails = self._world.now_s < self._until_s and self._chance.random() < self._failures
        self._world.seen["copy failed"] += fails
        return fails
