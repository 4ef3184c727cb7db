"""A process of an engine: it runs, drains, and is asked what it finds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from kvtier.keys import OffloadKey
from kvtier_testing.sim.bridge import Bridge, SimExecutorThread
from kvtier_testing.sim.device import Copies
from kvtier_testing.sim.engine import Engine, Job
from kvtier_testing.sim.faults import FaultyTier
from kvtier_testing.sim.model import CheckedTiering, World
from kvtier_testing.sim.scenario import Scenario

DRAIN_S = 60.0
"""Seconds in which all has to come to rest after the last fault."""


class Process(Protocol):
    """A process of an engine."""

    core: CheckedTiering
    tiers: Sequence[FaultyTier]

    async def run(self, until_s: float) -> None:
        """Start, work until then, and be open still."""

    async def drain(self) -> None:
        """End what is under way; nothing new comes."""

    async def store(self, keys: Sequence[OffloadKey]) -> None:
        """Store a prompt and wait until that is done."""

    async def find(self, keys: Sequence[OffloadKey]) -> int:
        """Return how many of the leading keys are there, after waiting for them."""

    async def aclose(self) -> None:
        """Shut down."""


class EngineProcess:
    """An engine with a scheduler, and the executor beside it."""

    def __init__(
        self,
        world: World,
        scenario: Scenario,
        core: CheckedTiering,
        tiers: Sequence[FaultyTier],
        executor: SimExecutorThread,
        copies: Copies,
    ) -> None:
        self.core = core
        self.tiers = tiers
        self._world = world
        self._scenario = scenario
        self._executor = executor
        self._copies = copies
        self._bridge = Bridge(world, core, executor)
        self._engine = Engine(world, scenario, self._bridge, copies)
        self._chance = world.chance(f"process/{world.process}")
        self._asked = 0

    async def run(self, until_s: float) -> None:
        self._executor.start()
        self._bridge.slots_ready(range(self._scenario.slots))
        while self._world.now_s < until_s:
            await self._engine.step(arriving=True)
            await asyncio.sleep(self._scenario.step_s * self._chance.choice((0.5, 1.0, 1.0, 3.0)))

    async def drain(self) -> None:
        while not (self._engine.is_idle and self.core.is_idle and are_idle(self.tiers)):
            await self._engine.step(arriving=False)
            await asyncio.sleep(self._scenario.step_s)
        for _ in range(2):  # what comes in at the end of a step is seen in the next one
            self._bridge.end_schedule([], [])

    async def store(self, keys: Sequence[OffloadKey]) -> None:
        for _ in range(1000):
            await self._engine.store(keys)
            if all(key in self.core.table.visible for key in keys):
                return
        self._world.fail(f"{keys} find no room")

    async def find(self, keys: Sequence[OffloadKey]) -> int:
        self._asked += 1
        return await self._engine.ask(Job(f"probe{self._asked}", keys), DRAIN_S)

    async def aclose(self) -> None:
        if self._executor.task is None:
            return
        await self._executor.aclose(self._chance.choice((0.0, 0.1, 1.0)))
        self._bridge.take_in()


def are_idle(tiers: Sequence[FaultyTier]) -> bool:
    """Return whether no call of a tier is under way."""
    return not any(+tier.running for tier in tiers)


__all__ = ["EngineProcess", "Process", "are_idle"]
