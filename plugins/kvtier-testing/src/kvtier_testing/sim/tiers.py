"""A simulated tier: a fault-free transport over a backend. ``FaultyTier`` adds faults."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from random import Random

import anyio

from kvtier.keys import OffloadKey
from kvtier.tiers import Batch, Knowledge, Outcome, SecondaryTier, Status, TierConfig, TierContext, Usage
from kvtier.tiers._adopted import AdoptedConfig, AdoptedTier
from kvtier.tiers._base import ignore
from kvtier_testing.sim.backend import Backend
from kvtier_testing.sim.model import CHUNK_BYTES, SimMemory, show


class SimTierConfig(TierConfig):
    """Settings of a simulated tier.

    Attributes:
        complete_index: whether its index is complete.
        durable: fraction of puts that survive a crash.
        evicts: whether it evicts to make room, or refuses puts.
        reports_evictions: whether it reports evicted chunks.
        drains: whether a cancelled call still runs to its end, as one in a thread does.
    """

    type: str = "sim"
    complete_index: bool = True
    durable: float = 1.0
    evicts: bool = True
    reports_evictions: bool = True
    drains: bool = False


class SimTier(SecondaryTier[SimTierConfig]):
    """Keeps chunks in a backend. Its transport has no faults; a wrapper adds them."""

    Config = SimTierConfig

    def __init__(self, config: SimTierConfig, backend: Backend) -> None:
        super().__init__(config)
        self.backend = backend
        self._process = -1
        self._resets = 0
        self._removed: Callable[[Sequence[OffloadKey]], None] = ignore

    async def open(self, context: TierContext) -> None:
        """Connect."""
        self._removed = context.removed
        self._process = self.backend.connect()

    def known(self, keys: Sequence[OffloadKey]) -> Sequence[Knowledge]:
        """Return the keys that are present, if there is an index."""
        if not self.config.complete_index:
            return super().known(keys)
        there = self.backend.records if self._process == self.backend.process else {}
        return [Knowledge.PRESENT if key in there else Knowledge.ABSENT for key in keys]

    def usage(self) -> Usage:
        """Return how full the backend is."""
        backend = self.backend
        return Usage(len(backend.records) * CHUNK_BYTES, backend.capacity * CHUNK_BYTES)

    async def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        """Return whether each key is present."""
        await self._pause()
        return [self.backend.read(self._process, key) is not None for key in keys]

    async def put(self, batch: Batch) -> Outcome:
        """Write chunks, one at a time."""
        resets, statuses = self._resets, list[Status]()
        for index in range(len(batch)):
            payload, trailer = bytes(batch.views[index]), batch.trailers[index]
            await self._pause()
            if resets != self._resets:
                statuses += [Status.REFUSED] * (len(batch) - index)
                return Outcome(statuses, {"reset": len(batch) - index})
            statuses.append(self._write(batch.keys[index], payload, trailer))
        full = statuses.count(Status.REFUSED)
        return Outcome(statuses, {"full": full} if full else {})

    async def get(self, batch: Batch) -> Outcome:
        """Read chunks, one at a time, in two halves."""
        statuses = [await self._get_one(batch, index) for index in range(len(batch))]
        corrupt = statuses.count(Status.CORRUPT)
        return Outcome(statuses, {"checksum": corrupt} if corrupt else {})

    async def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Mark chunks as recently used."""
        for key in reversed(keys):
            self.backend.read(self._process, key)

    async def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Forget chunks."""
        await self._pause()
        self.backend.forget(self._process, keys)

    async def reset(self) -> None:
        """Hide all chunks, including those of puts in flight."""
        self._resets += 1
        await self._pause()
        self.backend.reset(self._process)

    def lose(self, count: int) -> None:
        """Evict chunks unprompted, as another client of the backend might."""
        self._tell(self.backend.evict(count))

    async def _pause(self) -> None:
        chance = self.backend.chance
        if chance.random() < 0.5:
            await anyio.sleep(chance.random() * self.backend.faults.latency_s)

    def _write(self, key: OffloadKey, payload: bytes, trailer: bytes) -> Status:
        backend = self.backend
        if backend.faults.full:
            return Status.REFUSED
        durable = backend.chance.random() < self.config.durable
        kept = backend.write(self._process, key, payload, trailer, durable=durable)
        if not kept and self.config.evicts:
            self._tell(backend.evict(1))
            kept = backend.write(self._process, key, payload, trailer, durable=durable)
        if kept and backend.chance.random() < backend.faults.again:
            self._write_again(key, payload, trailer)
        return Status.OK if kept else Status.REFUSED

    def _write_again(self, key: OffloadKey, payload: bytes, trailer: bytes) -> None:
        """Put a chunk again later, like a request repeated in the network, but not after a reset."""
        backend, resets = self.backend, self._resets

        def arrive() -> None:
            if self._resets == resets:
                backend.write(self._process, key, payload, trailer, durable=False)
                backend.world.seen["put arrived twice"] += 1

        backend.world.loop.call_later(backend.chance.random() * 0.5, arrive)

    async def _get_one(self, batch: Batch, index: int) -> Status:
        record = self.backend.read(self._process, batch.keys[index])
        if record is None:
            return Status.ABSENT
        view, half = batch.views[index], CHUNK_BYTES // 2
        view[:half] = record.payload[:half]
        await self._pause()
        view[half:], batch.trailers[index] = record.payload[half:], record.trailer
        return Status.OK

    def _tell(self, gone: Sequence[OffloadKey]) -> None:
        if self.backend.world.traces:
            names = [show(key) for key in gone]
            self.backend.world.note(
                f"{self.backend.name}: has lost {names}, reports_evictions: {self.config.reports_evictions}"
            )
        if self.config.reports_evictions:
            self._removed(gone)
        else:
            self.backend.unreported.update(gone)


class VerifyingSimTier(SimTier):
    """A simulated tier that verifies the chunks that it returns, and sets damaged ones aside."""

    verifies = True

    async def _get_one(self, batch: Batch, index: int) -> Status:
        status = await super()._get_one(batch, index)
        key = batch.keys[index]
        if status is Status.OK and not self.backend.world.is_whole(key, batch.views[index]):
            self.backend.forget(self._process, [key])
            self._tell([key])
            return Status.CORRUPT
        return status


class SimAdoptedTier(AdoptedTier):
    """The real tier of adopted chunks, whose calls take time and register their use of slots."""

    def __init__(self, memory: SimMemory, chance: Random) -> None:
        super().__init__(AdoptedConfig())
        self._memory, self._chance = memory, chance

    async def put(self, batch: Batch) -> Outcome:
        """Keep the trailers, after a while."""
        async with self._at_work("put", batch):
            return await super().put(batch)

    async def get(self, batch: Batch) -> Outcome:
        """Return the trailers, after a while."""
        async with self._at_work("get", batch):
            return await super().get(batch)

    @asynccontextmanager
    async def _at_work(self, verb: str, batch: Batch) -> AsyncIterator[None]:
        with self._memory.using(batch.slots, f"a {verb} of adopted chunks", writes=False):
            await anyio.sleep(self._chance.choice((0.0, 0.0, 0.01)))
            yield
            await anyio.sleep(self._chance.choice((0.0, 0.0, 0.01)))
