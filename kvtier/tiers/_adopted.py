"""The chunks that stay in host memory when their engine ends, as a tier of the next engine.

A put writes the trailer of a chunk next to the slots. A get verifies the bytes that a slot already holds.
Nothing is copied. No other tier knows the primary tier's memory.

Meanwhile ``verify_adopted`` verifies the chunks in the background. The scheduler uses those without a get.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import anyio
from pydantic import Field

from kvtier._core.slot_trailers import SlotTrailers
from kvtier._log import GuardedLogger
from kvtier.keys import OffloadKey
from kvtier.tiers import _seal as seals
from kvtier.tiers._base import Batch, Knowledge, Outcome, SecondaryTier, SlotMemory, Status, TierConfig
from kvtier.tiers._faults import require_fault
from kvtier.tiers._waiting import in_thread

logger = GuardedLogger("kvtier.executor")

_BURST_BYTES = 32 * 2**20  # a few milliseconds of one core
# pause as a multiple of the burst: half of a core, or an eighth while tiers are busy
_REST, _REST_IF_BUSY = 1, 7

ADOPTED = "adopted"
"""The tier's name and type. ``keep_host_memory_s`` makes it; no user names it."""


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
        """Return that all keys are present, because no other keys are looked up."""
        return (Knowledge.PRESENT,) * len(keys)

    async def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        """Return that all keys are present."""
        return (True,) * len(keys)

    async def put(self, batch: Batch) -> Outcome:
        """Keep the trailers."""
        trailers: SlotTrailers = batch.memory.trailers  # type: ignore[attr-defined]
        for slot, trailer in zip(batch.slots, batch.trailers, strict=True):
            trailers.write(slot, trailer)
        return Outcome.all(Status.OK, len(batch))

    async def get(self, batch: Batch) -> Outcome:
        """Return the trailers of the slots, which hold their chunks already."""
        trailers: SlotTrailers = batch.memory.trailers  # type: ignore[attr-defined]
        batch.trailers[:] = [trailers.read(slot) for slot in batch.slots]
        return Outcome.all(Status.OK, len(batch))

    async def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Keep the trailers, because the scheduler voids them when it fills the slots."""

    async def reset(self) -> None:
        """Do nothing, because the scheduler has already voided all trailers."""


async def verify_adopted(memory: SlotMemory, digest: bytes, is_busy: Callable[[], bool]) -> None:
    """Verify adopted chunks within a share of one core, which is smaller while tiers are busy."""
    alone = anyio.CapacityLimiter(1)  # other work of the tiers must never wait for this thread
    count, burst = 0, max(1, _BURST_BYTES // memory.chunk_bytes)
    try:
        trailers: SlotTrailers = memory.trailers  # type: ignore[attr-defined]
        slots = await in_thread(trailers.unverified, limiter=alone)
        for first in range(0, len(slots), burst):
            begun_s, some = anyio.current_time(), slots[first : first + burst]
            count += await in_thread(_verify, memory, trailers, digest, some, limiter=alone)
            rest = _REST_IF_BUSY if is_busy() else _REST
            await anyio.sleep((anyio.current_time() - begun_s) * rest)
    except BaseException as error:
        require_fault(error)
        logger.exception("the background verification failed: adopted chunks are verified at their first hit")
        return
    if slots:
        logger.info("verified %d of %d chunks of the engine that has ended", count, len(slots))


def _verify(memory: SlotMemory, trailers: SlotTrailers, digest: bytes, slots: Sequence[int]) -> int:
    return sum(trailers.verify(slot, partial(_is_whole, memory.view(slot), digest)) for slot in slots)


def _is_whole(payload: memoryview, digest: bytes, trailer: bytes) -> bool:
    sealed = seals.read(trailer)
    return sealed is not None and seals.check(trailer, sealed.key, payload, digest) is seals.Integrity.SOUND
