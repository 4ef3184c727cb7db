"""Checks that chunks are unchanged, by their trailers in a tier and the checksums of audited slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import anyio
import crc32c

from kvtier._core.messages import Put
from kvtier._core.tiers.backoff import RandomSource
from kvtier.keys import OffloadKey
from kvtier.tiers._base import Batch, SlotAuditor, Status
from kvtier.tiers._seal import Integrity, check, seal
from kvtier.tiers._waiting import in_thread

T = TypeVar("T")
_HOUR_S = 3600.0
_MOST_DISCARDS = 16
_SKIP_S = 600.0
_MOST_SKIPPED = 4096

Defect = tuple[Integrity, bytes, int]
"""The defect of a chunk that was read, its trailer, and the checksum of its bytes.

Two reads of a damaged chunk are equal. Two reads damaged by a bad link or bad memory are not.
"""


class Suspects:
    """Chunks that this host found damaged and skips for a while, but keeps for other hosts.

    Discards are limited per hour, because a host with bad memory would empty a shared tier.
    """

    def __init__(self) -> None:
        self._until_s: dict[OffloadKey, float] = {}
        self._discarded_s: deque[float] = deque(maxlen=_MOST_DISCARDS)

    def discard_or_skip(self, key: OffloadKey, *, is_confirmed: bool, now_s: float) -> str:
        """Return "" if the chunk is to be discarded, else skip it from now on and return why."""
        may_discard = len(self._discarded_s) < _MOST_DISCARDS or now_s >= self._discarded_s[0] + _HOUR_S
        if is_confirmed and may_discard:
            self._discarded_s.append(now_s)
            return ""
        if len(self._until_s) >= _MOST_SKIPPED:
            self._until_s.pop(next(iter(self._until_s)))
        self._until_s[key] = now_s + _SKIP_S
        return (
            f"{_MOST_DISCARDS} were discarded this hour" if is_confirmed else "not confirmed by a second read"
        )

    def is_skipped(self, key: OffloadKey, now_s: float) -> bool:
        return now_s < self._until_s.get(key, now_s)


class IntegrityChecks:
    """Checks of one tier's transfers, in threads. Without ``slot_checksums`` no slot is audited."""

    def __init__(
        self,
        digest: bytes,
        slot_checksums: SlotAuditor | None,
        threads: anyio.CapacityLimiter,
        chance: RandomSource,
    ) -> None:
        self._digest = digest
        self._slot_checksums = slot_checksums
        self._threads = threads
        self._chance = chance

    async def seal(self, batch: Batch) -> None:
        """Fill in the trailers of a batch before its put."""
        await self._in_thread(_seal_all, batch, self._digest)

    async def damaged(self, batch: Batch, statuses: Sequence[Status]) -> dict[int, Defect]:
        """Return the damage of a get's chunks, by position."""
        return await self._in_thread(_damaged, batch, statuses, self._digest)

    async def are_slots_intact(self, command: Put) -> bool:
        """Return whether the slots hold what was stored. Trailers made of damaged bytes would match them."""
        if self._slot_checksums is None or not (at := self._slot_checksums.audited(command.slots)):
            return True
        chunks = [(command.keys[index], command.slots[index]) for index in at]
        return await self._in_thread(self._slot_checksums.are_intact, chunks)

    async def record_slots(self, batch: Batch, statuses: Sequence[Status]) -> None:
        """Choose some promoted chunks for audits, and record their slots' checksums."""
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


def _damaged(batch: Batch, statuses: Sequence[Status], digest: bytes) -> dict[int, Defect]:
    found: dict[int, Defect] = {}
    chunks = zip(batch.keys, batch.views, batch.trailers, statuses, strict=True)
    for index, (key, view, trailer, status) in enumerate(chunks):
        if status == Status.CORRUPT:
            found[index] = Integrity.TORN, b"", 0
        elif status == Status.OK and (integrity := check(trailer, key, view, digest)).is_corrupt:
            found[index] = integrity, bytes(trailer), crc32c.crc32c(view)
    return found
