"""A simulated device: copies take their time, end in any order, and fail now and then.

A copy that is under way has its slots for itself, as far as it writes. It moves half of its bytes at its
beginning and half at its end: what else happens to a slot meanwhile is seen in them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random

from kvtier_testing.sim.model import CHUNK_BYTES, SimMemory, World

_HALF = CHUNK_BYTES // 2

Stored = Callable[[bool], object]
Loaded = Callable[[list[bytes] | None], object]


class Copies:
    """Copies between a device and the slots.

    Args:
        world: where all this happens.
        memory: the slots.
        failures: share of copies that fail.
        until_s: when that is over.
        longest_s: how long a copy takes at most.
    """

    def __init__(
        self, world: World, memory: SimMemory, *, failures: float, until_s: float, longest_s: float
    ) -> None:
        self._under_way: dict[_Copy, None] = {}
        self._world = world
        self._memory = memory
        self._failures = failures
        self._until_s = until_s
        self._longest_s = longest_s
        self._chance: Random = world.chance(f"device/{world.process}")

    def store(self, slots: Sequence[int], contents: Sequence[bytes], done: Stored) -> None:
        """Copy to slots; ``done`` is told whether that succeeded."""
        memory, fails = self._memory, self._fails()
        use = memory.begin(slots, "a store", writes=True)
        memory.scribble(slots)

        def begin() -> None:
            for slot, one in zip(slots, contents, strict=True):
                memory.view(slot)[:_HALF] = one[:_HALF]

        def end() -> None:
            if not fails:
                for slot, one in zip(slots, contents, strict=True):
                    memory.view(slot)[_HALF:] = one[_HALF:]
            memory.end(slots, use)
            done(not fails)

        self._run(begin, end)

    def load(self, slots: Sequence[int], done: Loaded) -> None:
        """Copy from slots; ``done`` gets what came, or None where the copy has failed."""
        memory, fails = self._memory, self._fails()
        use = memory.begin(slots, "a load", writes=False)
        halves: list[bytes] = []

        def begin() -> None:
            halves.extend(bytes(memory.view(slot)[:_HALF]) for slot in slots)

        def end() -> None:
            rest = [bytes(memory.view(slot)[_HALF:]) for slot in slots]
            memory.end(slots, use)
            done(None if fails else [a + b for a, b in zip(halves, rest, strict=True)])

        self._run(begin, end)

    def hurry(self) -> None:
        """End what is under way now, as waiting for it would."""
        for copy in list(self._under_way):
            copy.hurry()

    @property
    def under_way(self) -> int:
        """Copies that have not ended."""
        return len(self._under_way)

    def _run(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        begins_s, ends_s = (self._chance.random() * self._longest_s / 2 for _ in range(2))
        copy = _Copy([(begins_s, begin), (ends_s, end)], self._world, self._under_way)
        self._under_way[copy] = None
        copy.wait()

    def _fails(self) -> bool:
        fails = self._world.now_s < self._until_s and self._chance.random() < self._failures
        self._world.seen["copy failed"] += fails
        return fails


class _Copy:
    """One copy: what it does, and after how many seconds each time."""

    def __init__(
        self, steps: list[tuple[float, Callable[[], None]]], world: World, under_way: dict[_Copy, None]
    ) -> None:
        self._steps = steps
        self._world = world
        self._under_way = under_way
        self._timer: asyncio.TimerHandle | None = None

    def wait(self) -> None:
        self._timer = self._world.loop.call_later(self._steps[0][0], self._advance)

    def hurry(self) -> None:
        assert self._timer is not None
        self._timer.cancel()
        while self._steps:
            self._do_next()

    def _advance(self) -> None:
        self._do_next()
        if self._steps:
            self.wait()

    def _do_next(self) -> None:
        _, do = self._steps.pop(0)
        if not self._steps:
            del self._under_way[self]
        do()


__all__ = ["Copies"]
