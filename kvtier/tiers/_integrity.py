"""Proves that chunks are unchanged: trailers of chunks in a tier, checksums of audited slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import anyio

from kvtier._core.messages import Put
from kvtier._core.tiers.backoff import RandomSource
from kvtier.tiers._base import Batch, SlotChecksums, Status
from kvtier.tiers._drain import in_thread
from kvtier.tiers._seal import Integrity, check, seal

T = TypeVar("T")


class IntegrityChecks:
    """The checks of one tier's transfers, made in threads. Without ``slot_checksums`` no slot is audited."""

    def __init__(
        self,
        digest: bytes,
        slot_checksums: SlotChecksums | None,
        threads: anyio.CapacityLimiter,
        chance: RandomSource,
    ) -> None:
        self._digest = digest
        self._slot_checksums = slot_checksums
        self._threads = threads
        self._chance = chance

    async def seal(self, batch: Batch) -> None:
        """Fill in the trailers of a batch that is about to be put."""
        await self._in_thread(_seal_all, batch, self._digest)

    async def corrupt(self, batch: Batch, statuses: Sequence[Status]) -> dict[int, Integrity]:
        """Return which chunks of a get are not what was put, and what is wrong with them."""
        found = await self._in_thread(_check_all, batch, statuses, self._digest)
        return {index: integrity for index, integrity in enumerate(found) if integrity.is_corrupt}

    async def are_slots_intact(self, command: Put) -> bool:
        """Return whether the slots hold what was stored: else their trailers would fit the damage."""
        if self._slot_checksums is None or not (at := self._slot_checksums.audited(command.slots)):
            return True
        chunks = [(command.keys[index], command.slots[index]) for index in at]
        return await self._in_thread(self._slot_checksums.are_intact, chunks)

    async def record_slots(self, batch: Batch, statuses: Sequence[Status]) -> None:
        """Choose some promoted chunks for audits, and record the checksums of their slots now."""
        if self._slot_checksums is None or not (rate := self._slot_checksums.rate):
            return
        copied = [slot for slot, status in zip(batch.slots, statuses, strict=True) if status == Status.OK]
        if audited := [slot for slot in copied if self._chance() < rate]:
            await self._in_thread(self._slot_checksums.record_checksums, audited)

    async def _in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        return await in_thread(function, *arguments, limiter=self._threads)


def _seal_all(batch: Batch, digest: bytes) -> None:
    for index, (key, view) in enumerate(zip(batch.keys, batch.views, strict=True)):
        batch.trailers[index] = seal(key, view, digest)


def _check_all(batch: Batch, statuses: Sequence[Status], digest: bytes) -> list[Integrity]:
    return [
        check(trailer, key, view, digest) if status == Status.OK else Integrity.SOUND
        for key, view, trailer, status in zip(batch.keys, batch.views, batch.trailers, statuses, strict=True)
    ]
