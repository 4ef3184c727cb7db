"""The chunks that stay in host memory when their engine ends, as a tier of the next one.

A put writes the trailer of a chunk next to the slots. A get verifies the bytes that a slot already holds.
Nothing is copied. No other tier knows the primary tier's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pydantic import Field

from kvtier.keys import OffloadKey
from kvtier.tiers._base import Batch, Knowledge, Outcome, SecondaryTier, Status, TierConfig

ADOPTED = "adopted"
"""The tier's name and type. ``keep_host_memory_s`` makes it; no user names it."""


class Trailers(Protocol):
    """The trailers of slots; implemented by ``kvtier._memory.slot_trailers``."""

    def write(self, slot: int, trailer: bytes) -> None:
        """Write the trailer of a slot's chunk."""

    def read(self, slot: int) -> bytes:
        """Return the trailer of a slot."""


class AdoptedConfig(TierConfig):
    """Settings of the tier of adopted chunks; ``keep_host_memory_s`` makes it."""

    type: str = Field(default=ADOPTED, description="Type of the tier.")


class AdoptedTier(SecondaryTier[AdoptedConfig]):
    """The slots of the primary tier, across a restart of the engine.

    kvtier computes the trailer before a put, and checks key, identity and bytes after a get. The scheduler
    asks only for adopted chunks. It voids the trailers of slots that it fills or resets.
    """

    Config = AdoptedConfig
    medium = "memory"

    def known(self, keys: Sequence[OffloadKey]) -> Sequence[Knowledge]:
        """Return that all keys are present: no others are asked for."""
        return (Knowledge.PRESENT,) * len(keys)

    async def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        """Return that all keys are present."""
        return (True,) * len(keys)

    async def put(self, batch: Batch) -> Outcome:
        """Keep the trailers."""
        trailers: Trailers = batch.memory.trailers  # type: ignore[attr-defined]
        for slot, trailer in zip(batch.slots, batch.trailers, strict=True):
            trailers.write(slot, trailer)
        return Outcome.all(Status.OK, len(batch))

    async def get(self, batch: Batch) -> Outcome:
        """Return the trailers of the slots, which hold their chunks already."""
        trailers: Trailers = batch.memory.trailers  # type: ignore[attr-defined]
        batch.trailers[:] = [trailers.read(slot) for slot in batch.slots]
        return Outcome.all(Status.OK, len(batch))

    async def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Keep the trailers: the scheduler voids them when it fills the slots."""

    async def reset(self) -> None:
        """Do nothing: the scheduler has voided all trailers before."""
