"""The measured subjects of ``kvtier bench fs`` and ``kvtier bench tier``, which move batches of chunks."""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from itertools import cycle, islice
from typing import Any, Final, Generic, TypeVar

import crc32c

from kvtier import HeapMemory, Identity
from kvtier.errors import KVTierError
from kvtier.keys import OffloadKey, pack_key
from kvtier.tiers import Batch, Outcome, SecondaryTier, Status
from kvtier.tiers._seal import Integrity, check, seal
from kvtier_bench import machine

SIZES: Final = (65536, 524288, 2097152)
BATCHES_IN_FLIGHT: Final = 4
_NO_ROOM: Final = frozenset({"max_bytes", "min_free", "enospc", "edquot"})

BatchT = TypeVar("BatchT")


class Contestant(ABC):
    """A subject whose puts and gets are measured."""

    checksum_us = 0.0
    """Processor time that it spends on the checksum of a chunk, in microseconds."""

    @abstractmethod
    async def move(self, verb: str, nbytes: float) -> int:
        """Put ``nbytes`` of new chunks, or get chunks put earlier; return the number of bytes moved."""

    def prepare(self, nbytes: float) -> None:  # noqa: B027
        """Prepare a put. This is not measured, because an engine's bytes are already in memory."""

    def check(self) -> None:  # noqa: B027
        """Raise KVTierError if the last get returned wrong bytes."""

    async def discard(self) -> None:  # noqa: B027
        """Remove all chunks that were put."""


class BatchMover(Contestant, Generic[BatchT]):
    """A subject that moves several batches of chunks concurrently.

    Attributes:
        memory: the slots of the chunks. Each batch in flight has its own slots.
    """

    def __init__(self, memory: HeapMemory) -> None:
        self.memory = memory
        self._batch_chunks = memory.slots // BATCHES_IN_FLIGHT
        self._serial = 0
        self._prepared: list[BatchT] = []
        self._stored: list[BatchT] = []
        self._held: list[BatchT] = []

    def make(self, keys: Sequence[OffloadKey]) -> BatchT:
        """Make a batch of new chunks."""
        raise NotImplementedError

    async def put(self, batch: BatchT, slots: range) -> None:
        """Put a batch. Raise if one of its chunks cannot be put."""
        raise NotImplementedError

    @abstractmethod
    async def get(self, batch: BatchT, slots: range) -> None:
        """Get a batch. Raise if one of its chunks cannot be got."""

    async def remove(self, batches: Sequence[BatchT]) -> None:
        """Remove batches that were put earlier."""

    def hold(self, batches: Sequence[BatchT]) -> None:
        """Get these batches from now on. Another process stored them and keeps them."""
        self._held = list(batches)

    def new_keys(self, count: int) -> list[OffloadKey]:
        """Return unused keys."""
        first, self._serial = self._serial, self._serial + count
        return [key_of(number) for number in range(first, self._serial)]

    def prepare(self, nbytes: float) -> None:
        for _ in range(self._batches(nbytes)):
            self._prepared.append(self.make(self.new_keys(self._batch_chunks)))

    async def move(self, verb: str, nbytes: float) -> int:
        count = self._batches(nbytes)
        if verb == "put":
            batches, self._prepared = self._prepared[:count], self._prepared[count:]
            self._stored += batches
            await self._move_all(batches, self.put)
        else:
            await self._move_all(list(islice(cycle(self._held or self._stored), count)), self.get)
        return count * self._batch_chunks * self.memory.chunk_bytes

    async def discard(self) -> None:
        stored, self._stored, self._prepared = self._stored, [], []
        await self.remove(stored)

    def _batches(self, nbytes: float) -> int:
        return max(BATCHES_IN_FLIGHT, math.ceil(nbytes / self.memory.chunk_bytes / self._batch_chunks))

    async def _move_all(
        self, batches: Sequence[BatchT], call: Callable[[BatchT, range], Awaitable[None]]
    ) -> None:
        """Move several batches concurrently. Each one in flight has its own slots."""
        left = iter(batches)

        async def fly(flight: int) -> None:
            first = flight * self._batch_chunks
            for batch in left:
                await call(batch, range(first, first + self._batch_chunks))

        try:
            async with asyncio.TaskGroup() as group:
                for flight in range(BATCHES_IN_FLIGHT):
                    group.create_task(fly(flight))
        except ExceptionGroup as errors:  # One of the exceptions is enough.
            raise errors.exceptions[0] from None


class TierMover(BatchMover[tuple[Sequence[OffloadKey], list[bytes]]]):
    """An open tier.

    If it does not verify chunks itself, they are sealed before a put and checked after a get.
    """

    def __init__(self, tier: SecondaryTier[Any], identity: Identity, memory: HeapMemory) -> None:
        super().__init__(memory)
        self.tier = tier
        self._digest = identity.short_digest
        self._last: Batch | None = None
        if tier.verifies:
            self.checksum_us = _checksum_us(memory)

    def make(self, keys: Sequence[OffloadKey]) -> tuple[Sequence[OffloadKey], list[bytes]]:
        """Make a batch. All slots hold the same bytes. See ``BatchMover.make``."""
        if self.tier.verifies:
            return keys, [b""] * len(keys)
        return keys, [seal(key, self.memory.view(0), self._digest) for key in keys]

    async def put(self, batch: tuple[Sequence[OffloadKey], list[bytes]], slots: range) -> None:
        keys, trailers = batch
        require_ok("put", await self.tier.put(Batch(keys, slots, self.memory, list(trailers))))

    async def get(self, batch: tuple[Sequence[OffloadKey], list[bytes]], slots: range) -> None:
        wanted = Batch(batch[0], slots, self.memory)
        require_ok("get", await self.tier.get(wanted))
        self._last = wanted

    def check(self) -> None:
        if self.tier.verifies or self._last is None:
            return
        for key, view, trailer in zip(self._last.keys, self._last.views, self._last.trailers, strict=True):
            if (found := check(trailer, key, view, self._digest)) is not Integrity.SOUND:
                raise KVTierError(f"the tier under test gave wrong bytes: {found}")

    async def remove(self, batches: Sequence[tuple[Sequence[OffloadKey], list[bytes]]]) -> None:
        for keys, _ in batches:
            await self.tier.discard(keys)


def key_of(number: int) -> OffloadKey:
    """Return the key of a chunk. Keys are distributed like hashes, and cost little to make."""
    return pack_key((number * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "little") * 4)


def _checksum_us(memory: HeapMemory) -> float:
    """Return the processor time of one chunk's checksum, in microseconds."""
    before_s = time.thread_time()
    for slot in range(memory.slots):
        crc32c.crc32c(memory.view(slot))
    return (time.thread_time() - before_s) / memory.slots * 1e6


def require_ok(verb: str, outcome: Outcome) -> None:
    """Raise KVTierError unless all chunks of a put or get are OK."""
    bad = [Status(status).name for status in outcome.statuses if status != Status.OK]
    if bad:
        remedy = machine.REMEDY if _NO_ROOM.intersection(outcome.reasons) else "see the log"
        raise KVTierError(
            f"a {verb} of the tier under test failed: {len(bad)} of {len(outcome.statuses)} chunks ended "
            f"{', '.join(sorted(set(bad)))} {dict(outcome.reasons)}: {remedy}"
        )
