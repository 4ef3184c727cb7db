"""What ``kvtier bench fs`` and ``kvtier bench tier`` measure: things that put and get chunks in batches."""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Final, Generic, TypeVar

from kvtier import HeapMemory, Identity
from kvtier import _native as native
from kvtier.errors import KVTierError
from kvtier.keys import OffloadKey, pack_key
from kvtier.tiers import Batch, Outcome, SecondaryTier, Status
from kvtier.tiers._seal import Integrity, check, seal
from kvtier_bench import machine

SIZES: Final = (65536, 524288, 2097152)
BATCHES_IN_FLIGHT: Final = 4
MOST_GB_S: Final = 5.0  # keys are made before a stretch; beyond this rate they are made meanwhile
_NO_ROOM: Final = frozenset({"max_bytes", "min_free", "enospc", "edquot"})

BatchT = TypeVar("BatchT")


@dataclass(frozen=True, slots=True)
class Amount:
    """How much one stretch moves: until its time or its bytes are used up, whichever is first."""

    batch_chunks: int
    seconds: float = math.inf
    nbytes: float = math.inf

    def batches(self, chunk_bytes: int, share: float) -> int:
        """Return how many batches a share of a stretch can have, at ``MOST_GB_S``."""
        most = min(self.nbytes, self.seconds * MOST_GB_S * 1e9) * share
        return BATCHES_IN_FLIGHT + math.ceil(most / chunk_bytes / self.batch_chunks)


class Contestant(ABC):
    """Something whose puts and gets are measured."""

    checksum_us = 0.0
    """Processor time that it spends on the checksum of a chunk, in microseconds."""

    @abstractmethod
    async def move(self, verb: str, share: float) -> int:
        """Put new chunks, or get those that were put, for a share of a stretch. Returns bytes."""

    def prepare(self, share: float) -> None:  # noqa: B027
        """Prepare a put: what an engine would have at hand is not measured."""

    def check(self) -> None:  # noqa: B027
        """Raise KVTierError if the last get gave wrong bytes."""

    async def discard(self) -> None:  # noqa: B027
        """Remove what was put."""


class BatchMover(Contestant, Generic[BatchT]):
    """A contestant that is given batches of chunks, several at once.

    Args:
        memory: where the chunks are.
        amount: how much a stretch moves.
    """

    def __init__(self, memory: HeapMemory, amount: Amount) -> None:
        self._memory = memory
        self._amount = amount
        self._serial = 0
        self._prepared: list[BatchT] = []
        self._stored: list[BatchT] = []

    @abstractmethod
    def make(self, keys: Sequence[OffloadKey]) -> BatchT:
        """Make a batch of new chunks."""

    @abstractmethod
    async def put(self, batch: BatchT, slots: range) -> None:
        """Put a batch. Raises where one of its chunks could not be put."""

    @abstractmethod
    async def get(self, batch: BatchT, slots: range) -> None:
        """Get a batch. Raises where one of its chunks could not be had."""

    @abstractmethod
    async def remove(self, batches: Sequence[BatchT]) -> None:
        """Remove batches that were put."""

    def new_keys(self, count: int) -> list[OffloadKey]:
        """Return keys that were not used before."""
        first, self._serial = self._serial, self._serial + count
        return [key_of(number) for number in range(first, self._serial)]

    def prepare(self, share: float) -> None:
        """See ``Contestant.prepare``."""
        wanted = self._amount.batches(self._memory.chunk_bytes, share) - len(self._prepared)
        for _ in range(wanted):
            self._prepared.append(self._make_next())

    async def move(self, verb: str, share: float) -> int:
        """See ``Contestant.move``."""
        new = self._new_batches()
        batches, call = (new, self._put_and_keep) if verb == "put" else (cycle(self._stored), self.get)
        moved = await _move_all(self._limited(batches, share), self._amount.batch_chunks, call)
        return moved * self._amount.batch_chunks * self._memory.chunk_bytes

    async def discard(self) -> None:
        """See ``Contestant.discard``."""
        stored, self._stored = self._stored, []
        await self.remove(stored)

    def _make_next(self) -> BatchT:
        return self.make(self.new_keys(self._amount.batch_chunks))

    def _new_batches(self) -> Iterator[BatchT]:
        while True:
            yield self._prepared.pop() if self._prepared else self._make_next()

    async def _put_and_keep(self, batch: BatchT, slots: range) -> None:
        self._stored.append(batch)
        await self.put(batch, slots)

    def _limited(self, batches: Iterable[BatchT], share: float) -> Iterator[BatchT]:
        end_at_s = time.perf_counter() + share * self._amount.seconds
        most = share * self._amount.nbytes / self._memory.chunk_bytes / self._amount.batch_chunks
        for number, batch in enumerate(batches):
            if number >= BATCHES_IN_FLIGHT and (number >= most or time.perf_counter() >= end_at_s):
                return
            yield batch


class TierMover(BatchMover[tuple[Sequence[OffloadKey], list[bytes]]]):
    """An open tier. Chunks of one that does not verify are sealed before they are put, and checked after."""

    def __init__(
        self, tier: SecondaryTier[Any], identity: Identity, memory: HeapMemory, amount: Amount
    ) -> None:
        super().__init__(memory, amount)
        self.tier = tier
        self._digest = identity.short_digest
        self._last: Batch | None = None
        if tier.verifies:
            self.checksum_us = _checksum_us(memory)

    def make(self, keys: Sequence[OffloadKey]) -> tuple[Sequence[OffloadKey], list[bytes]]:
        """See ``BatchMover.make``. All slots hold the same bytes."""
        if self.tier.verifies:
            return keys, [b""] * len(keys)
        return keys, [seal(key, self._memory.view(0), self._digest) for key in keys]

    async def put(self, batch: tuple[Sequence[OffloadKey], list[bytes]], slots: range) -> None:
        """See ``BatchMover.put``."""
        keys, trailers = batch
        _require_ok("put", await self.tier.put(Batch(keys, slots, self._memory, list(trailers))))

    async def get(self, batch: tuple[Sequence[OffloadKey], list[bytes]], slots: range) -> None:
        """See ``BatchMover.get``."""
        wanted = Batch(batch[0], slots, self._memory)
        _require_ok("get", await self.tier.get(wanted))
        self._last = wanted

    def check(self) -> None:
        """See ``Contestant.check``."""
        if self.tier.verifies or self._last is None:
            return
        for key, view, trailer in zip(self._last.keys, self._last.views, self._last.trailers, strict=True):
            if (found := check(trailer, key, view, self._digest)) is not Integrity.SOUND:
                raise KVTierError(f"the tier under test gave wrong bytes: {found}")

    async def remove(self, batches: Sequence[tuple[Sequence[OffloadKey], list[bytes]]]) -> None:
        """See ``BatchMover.remove``."""
        for keys, _ in batches:
            await self.tier.discard(keys)


def key_of(number: int) -> OffloadKey:
    """Return the key of a chunk. It is spread like a hash, and costs next to nothing to make."""
    return pack_key((number * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "little") * 4)


async def _move_all(
    batches: Iterator[BatchT], batch_chunks: int, call: Callable[[BatchT, range], Awaitable[None]]
) -> int:
    """Move batches, several at once, each flight with slots of its own. Returns how many there were."""

    async def fly(flight: int) -> int:
        slots = range(flight * batch_chunks, (flight + 1) * batch_chunks)
        moved = 0
        for batch in batches:
            await call(batch, slots)
            moved += 1
        return moved

    try:
        async with asyncio.TaskGroup() as group:
            flights = [group.create_task(fly(flight)) for flight in range(BATCHES_IN_FLIGHT)]
    except ExceptionGroup as errors:  # one of them says it all
        raise errors.exceptions[0] from None
    return sum(flight.result() for flight in flights)


def _checksum_us(memory: HeapMemory) -> float:
    """Return the processor time of one chunk's checksum, in microseconds."""
    before_s = time.thread_time()
    for slot in range(memory.slots):
        native.crc32c(memory.address + slot * memory.chunk_bytes, memory.chunk_bytes)
    return (time.thread_time() - before_s) / memory.slots * 1e6


def _require_ok(verb: str, outcome: Outcome) -> None:
    bad = [Status(status).name for status in outcome.statuses if status != Status.OK]
    if bad:
        remedy = machine.REMEDY if _NO_ROOM.intersection(outcome.reasons) else "see the log"
        raise KVTierError(
            f"a {verb} of the tier under test failed: {len(bad)} of {len(outcome.statuses)} chunks ended "
            f"{', '.join(sorted(set(bad)))} {dict(outcome.reasons)}: {remedy}"
        )
