"""A process of an engine, which runs, drains, and looks chunks up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvtier.keys import OffloadKey
from kvtier_testing.sim.faults import FaultyTier
from kvtier_testing.sim.model import CheckedTiering, World

DRAIN_S = 60.0
"""Seconds after the last fault until an engine must be idle."""


class Process(ABC):
    """A process of an engine: the driver of the core, and its parts."""

    def __init__(self, world: World, core: CheckedTiering, tiers: Sequence[FaultyTier]) -> None:
        self.core = core
        self.tiers = tiers
        self._world = world

    @abstractmethod
    async def run(self, until_s: float) -> None:
        """Start, and work until ``until_s``; stay open."""

    @abstractmethod
    async def drain(self) -> None:
        """Finish all work in flight; no new work arrives."""

    @abstractmethod
    async def store_once(self, keys: Sequence[OffloadKey]) -> None:
        """Store as much of a prompt as there is room for, and wait until the store ends."""

    @abstractmethod
    async def find(self, keys: Sequence[OffloadKey]) -> int:
        """Return the number of leading keys found, after waiting for them."""

    @abstractmethod
    async def aclose(self) -> None:
        """Shut down."""

    def kill(self) -> None:  # noqa: B027
        """Stop all activity that runs outside of tasks."""

    @property
    def tiers_are_idle(self) -> bool:
        """Whether no tier has a call in flight."""
        return not any(+tier.running for tier in self.tiers)

    async def store(self, keys: Sequence[OffloadKey]) -> None:
        """Store a prompt, and wait until it is available."""
        for _ in range(1000):
            await self.store_once(keys)
            if all(key in self.core.table.visible for key in keys):
                return
        self._world.fail(f"{keys} find no room")
