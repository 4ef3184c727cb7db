"""A process of an engine: it runs, drains, and is asked what it finds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvtier.keys import OffloadKey
from kvtier_testing.sim.faults import FaultyTier
from kvtier_testing.sim.model import CheckedTiering, World

DRAIN_S = 60.0
"""Seconds in which all has to come to rest after the last fault."""


class Process(ABC):
    """A process of an engine: whoever drives the core, and what it needs."""

    def __init__(self, world: World, core: CheckedTiering, tiers: Sequence[FaultyTier]) -> None:
        self.core = core
        self.tiers = tiers
        self._world = world

    @abstractmethod
    async def run(self, until_s: float) -> None:
        """Start, work until then, and be open still."""

    @abstractmethod
    async def drain(self) -> None:
        """End what is under way; nothing new comes."""

    @abstractmethod
    async def store_once(self, keys: Sequence[OffloadKey]) -> None:
        """Store a prompt as far as there is room, and wait until that is done."""

    @abstractmethod
    async def find(self, keys: Sequence[OffloadKey]) -> int:
        """Return how many of the leading keys are there, after waiting for them."""

    @abstractmethod
    async def aclose(self) -> None:
        """Shut down."""

    @property
    def tiers_are_idle(self) -> bool:
        """Whether no call of a tier is under way."""
        return not any(+tier.running for tier in self.tiers)

    async def store(self, keys: Sequence[OffloadKey]) -> None:
        """Store a prompt, and wait until it is there."""
        for _ in range(1000):
            await self.store_once(keys)
            if all(key in self.core.table.visible for key in keys):
                return
        self._world.fail(f"{keys} find no room")
