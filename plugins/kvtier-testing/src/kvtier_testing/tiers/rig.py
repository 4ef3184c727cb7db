"""An open tier, chunks with known bytes, and slots with guard slots between them."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import mmap
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any, NoReturn

import anyio

from kvtier import HeapMemory, Identity
from kvtier._reasons import TRANSFER
from kvtier.keys import OffloadKey, pack_key
from kvtier.tiers import Batch, Knowledge, Outcome, SecondaryTier, Status, TierContext, Usage, in_thread
from kvtier.tiers._base import ignore
from kvtier.tiers._seal import Integrity, check, seal

Removed = Callable[[Sequence[OffloadKey]], None]
UNUSED = 0xA5
EMPTY = 0x5A
REUSED = 0xEE
_READS = 5

_POSSIBLE = {
    "put": (Status.OK, Status.REFUSED, Status.FAILED),
    "get": (Status.OK, Status.ABSENT, Status.CORRUPT, Status.FAILED),
}


def expect(condition: object, message: str) -> None:
    """Fail with ``message`` unless the condition holds."""
    if not condition:
        fail(message)


def fail(message: str) -> NoReturn:
    raise AssertionError(message)


def key(number: int) -> OffloadKey:
    """Return the offload key of chunk ``number``."""
    return pack_key(hashlib.sha256(number.to_bytes(8, "big")).digest(), number % 3)


def keys(numbers: Iterable[int]) -> list[OffloadKey]:
    """Return the offload keys of chunks."""
    return [key(number) for number in numbers]


_PATTERNS: tuple[Callable[[int], bytes], ...] = (
    lambda size: bytes(size),
    lambda size: b"\xff" * size,
    lambda size: bytes([EMPTY]) * size,
    lambda size: (b"line\r\n\0\x1a" * size)[:size],
    lambda size: bytes(size - 1) + b"\1",
    lambda size: b"\1" + bytes(size - 1),
)
PATTERNED = range(10_000, 10_000 + len(_PATTERNS))
"""Chunks of zeros, ones, the bytes of empty slots, text, and zeros with one other byte at an end."""


@lru_cache(maxsize=256)
def content(number: int, chunk_bytes: int, version: int = 0) -> bytes:
    """Return the bytes of chunk ``number``. Versions differ in every part."""
    if number in PATTERNED:
        return _PATTERNS[number - PATTERNED.start](chunk_bytes)
    return random.Random(f"{number}/{version}").randbytes(chunk_bytes)


class BatchSlots:
    """Slots for one batch, in random order, each next to an unused slot.

    Attributes:
        numbers: the slots that the batch uses.
    """

    def __init__(self, chunks: int, chunk_bytes: int) -> None:
        self.memory = HeapMemory(2 * chunks + 1, chunk_bytes)
        self.numbers = random.Random(chunks).sample(range(1, 2 * chunks, 2), chunks)
        self.fill(UNUSED)

    def fill(self, byte: int) -> None:
        """Fill every slot, including unused ones."""
        pattern = bytes([byte]) * self.memory.chunk_bytes
        for slot in range(self.memory.slots):
            self.memory.view(slot)[:] = pattern

    def reuse(self) -> None:
        """Fill all slots with other bytes, as other chunks do after a transfer."""
        self.fill(REUSED)

    def check_unused(self, what: str) -> None:
        """Check that nothing was written outside the slots of the batch."""
        unused = set(range(self.memory.slots)) - set(self.numbers)
        touched = changed(self.memory, UNUSED, sorted(unused))
        expect(not touched, f"{what} has written into slots that are not in its batch: {touched}")

    def check_reused(self, what: str) -> None:
        """Check that nothing was written into slots that are in use again."""
        check_reused(self.memory, range(self.memory.slots), what)


def changed(memory: HeapMemory, byte: int, slots: Iterable[int]) -> list[int]:
    """Return the ``slots`` with bytes other than ``byte``."""
    pattern = bytes([byte]) * memory.chunk_bytes
    return [slot for slot in slots if memory.view(slot) != pattern]


def check_reused(memory: HeapMemory, slots: Iterable[int], what: str) -> None:
    """Check that nothing was written into slots that are in use again."""
    touched = changed(memory, REUSED, slots)
    expect(
        not touched,
        f"{what} has written into slots {touched} after it had ended, when they belonged to others",
    )


class CountedMemory:
    """Slots that can tell whether a view, part of a view, or array still refers to their bytes."""

    def __init__(self, slots: int, chunk_bytes: int) -> None:
        self.slots, self.chunk_bytes = slots, chunk_bytes
        self._bytes = mmap.mmap(-1, slots * chunk_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._bytes))

    def view(self, slot: int) -> memoryview:
        """Return the bytes of one slot."""
        return memoryview(self._bytes)[slot * self.chunk_bytes : (slot + 1) * self.chunk_bytes]

    def is_referenced(self) -> bool:
        """Return whether there is a view of a slot."""
        gc.collect()  # a traceback may be in a cycle
        try:
            self._bytes.resize(len(self._bytes))  # raises if there is one; the size stays
        except BufferError:
            return True
        except (OSError, SystemError, ValueError):  # not on this system
            pass
        return False


class TierRig:
    """An open tier, as tests call it. Chunk ``n`` has the key ``key(n)`` and known bytes."""

    def __init__(
        self, tier: SecondaryTier[Any], identity: Identity, chunk_bytes: int, *, is_lossy: bool = False
    ) -> None:
        self.tier = tier
        self.identity = identity
        self.chunk_bytes = chunk_bytes
        self._is_lossy = is_lossy

    def context(self, removed: Removed = ignore, name: str = "tested") -> TierContext:
        """Return the context to open the tier with."""
        return TierContext(name, self.identity, self.chunk_bytes, removed)

    @asynccontextmanager
    async def opened(self, removed: Removed = ignore, name: str = "tested") -> AsyncIterator[TierRig]:
        """Open the tier, and close it at the end; ``removed`` is called with evicted keys."""
        await self.tier.open(self.context(removed, name))
        try:
            yield self
        finally:
            with anyio.CancelScope(shield=True):
                await self.tier.aclose()

    def content(self, number: int, version: int = 0) -> bytes:
        """Return the bytes of one chunk."""
        return content(number, self.chunk_bytes, version)

    def filled(self, numbers: Iterable[int], version: int = 0) -> tuple[Batch, BatchSlots]:
        """Make a batch to put."""
        wanted = list(numbers)
        slots = BatchSlots(len(wanted), self.chunk_bytes)
        for slot, number in zip(slots.numbers, wanted, strict=True):
            slots.memory.view(slot)[:] = self.content(number, version)
        return self.batch(keys(wanted), slots), slots

    def batch(self, chosen: Sequence[OffloadKey], slots: BatchSlots) -> Batch:
        """Make a batch to put ``slots``, with trailers if the tier needs them."""
        return self.sealed(Batch(chosen, slots.numbers, slots.memory, is_put=True))

    def sealed(self, batch: Batch) -> Batch:
        """Add trailers to a batch for a put, if the tier needs them."""
        if not self.tier.verifies:
            digest = self.identity.short_digest
            batch.trailers[:] = [
                seal(key, view, digest) for key, view in zip(batch.keys, batch.views, strict=True)
            ]
        return batch

    def empty(self, numbers: Iterable[int]) -> tuple[Batch, BatchSlots]:
        """Make a batch to get."""
        wanted = keys(numbers)
        slots = BatchSlots(len(wanted), self.chunk_bytes)
        for slot in slots.numbers:
            slots.memory.view(slot)[:] = bytes([EMPTY]) * self.chunk_bytes
        return Batch(wanted, slots.numbers, slots.memory), slots

    async def put(self, numbers: Iterable[int], version: int = 0) -> list[Status]:
        """Put chunks; check the answer, and that the slots are unchanged."""
        wanted = list(numbers)
        batch, slots = self.filled(wanted, version)
        outcome = await self.tier.put(batch)
        self.check_outcome(outcome, batch, "put")
        for number, view in zip(wanted, batch.views, strict=True):
            expect(view == self.content(number, version), "a put has changed the bytes of a slot")
        slots.check_unused("a put")
        return list(outcome.statuses)

    async def get(
        self, numbers: Iterable[int], versions: Sequence[int] = (0,), *, may_mix: bool = False
    ) -> list[Status]:
        """Get chunks; check the answer, and the bytes and trailers of those that are OK.

        Args:
            numbers: chunks to get.
            versions: versions of each chunk that may have been put.
            may_mix: whether a chunk that does not match its trailer counts as a miss, as in kvtier.
        """
        wanted = list(numbers)
        batch, slots = self.empty(wanted)
        outcome = await self.tier.get(batch)
        self.check_outcome(outcome, batch, "get")
        if may_mix and not self.tier.verifies:
            outcome = self._without_mixed(batch, outcome)
        self.check_given(wanted, batch, outcome, versions)
        slots.check_unused("a get")
        return list(outcome.statuses)

    async def outcome_of_put(self, numbers: Iterable[int]) -> Outcome:
        """Put chunks, check the answer, and return it with its reasons."""
        batch, _ = self.filled(numbers)
        outcome = await self.tier.put(batch)
        self.check_outcome(outcome, batch, "put")
        return outcome

    async def outcome_of_get(self, numbers: Iterable[int]) -> Outcome:
        """Get chunks, check the bytes of those found, and reuse the slots."""
        wanted = list(numbers)
        batch, slots = self.empty(wanted)
        outcome = await self.tier.get(batch)
        self.check_outcome(outcome, batch, "get")
        self.check_given(wanted, batch, outcome, (0,))
        slots.reuse()
        return outcome

    def check_given(
        self, numbers: Sequence[int], batch: Batch, outcome: Outcome, versions: Sequence[int]
    ) -> None:
        """Check the result of a get: whole chunks of these versions, with the trailers that were put."""
        for index, (number, status) in enumerate(zip(numbers, outcome.statuses, strict=True)):
            if status == Status.OK:
                self.check_chunk(number, batch, index, versions)

    def check_chunk(self, number: int, batch: Batch, index: int, versions: Iterable[int]) -> set[int]:
        """Check one chunk from a get; return the versions that its bytes match."""
        view = batch.views[index]
        found = {version for version in versions if view == self.content(number, version)}
        expect(found, f"a get gave wrong bytes: {self._describe(number, view, versions)}")
        self._check_trailer(batch, index)
        return found

    def _without_mixed(self, batch: Batch, outcome: Outcome) -> Outcome:
        statuses = list(outcome.statuses)
        for index, status in enumerate(statuses):
            if status is Status.OK and self._integrity(batch, index) is not Integrity.SOUND:
                statuses[index] = Status.CORRUPT
        return Outcome(statuses, outcome.reasons)

    def _integrity(self, batch: Batch, index: int) -> Integrity:
        trailer, key, view = batch.trailers[index], batch.keys[index], batch.views[index]
        return check(trailer, key, view, self.identity.short_digest)

    def _check_trailer(self, batch: Batch, index: int) -> None:
        if self.tier.verifies:
            return
        verdict = self._integrity(batch, index)
        expect(
            verdict is Integrity.SOUND,
            f"a get gave right bytes, but not the trailer that was put with them ({verdict}): it has to "
            "be kept beside the bytes and written into batch.trailers, unless verifies is true",
        )

    def _describe(self, number: int, view: memoryview, versions: Iterable[int]) -> str:
        """Return the origin of a chunk's bytes, page by page."""
        sources = {f"of version {version}": self.content(number, version) for version in range(3)}
        sources["of the slot's next chunk"] = bytes([REUSED]) * self.chunk_bytes
        sources["of the empty slot"] = bytes([EMPTY]) * self.chunk_bytes
        step = 4096
        shares = dict.fromkeys([*sources, "of something else"], 0)
        for start in range(0, self.chunk_bytes, step):
            page = view[start : start + step]
            names = [name for name, source in sources.items() if page == source[start : start + step]]
            shares[names[0] if names else "of something else"] += 1
        found = ", ".join(f"{pages} pages {name}" for name, pages in shares.items() if pages)
        return f"chunk {number} has {found}; versions {list(versions)} were put"

    def expect_kept(self, statuses: Sequence[Status], what: str) -> None:
        """Check that all chunks were OK; a lossy tier may have lost some."""
        allowed = {Status.OK, Status.ABSENT} if self._is_lossy else {Status.OK}
        expect(set(statuses) <= allowed, f"{what}: {names_of(statuses)}")

    def check_usage(self) -> int | None:
        """Check that ``usage`` answers in valid form; return the used bytes, if known."""
        usage = self.tier.usage()
        expect(usage is None or isinstance(usage, Usage), f"usage() answered {usage!r}, which is no Usage")
        if usage is None:
            return None
        for amount in (usage.used_bytes, usage.capacity_bytes):
            expect(amount is None or amount >= 0, f"usage() answered {usage!r}")
        if usage.used_bytes is not None and usage.capacity_bytes is not None:
            expect(usage.used_bytes <= usage.capacity_bytes, f"usage() is beyond its bound: {usage!r}")
        return usage.used_bytes

    def check_outcome(self, outcome: Outcome, batch: Batch, verb: str) -> None:
        """Check that an outcome is well formed."""
        expect(
            isinstance(outcome, Outcome),
            f"{verb}() returned {outcome!r}; return a kvtier.tiers.Outcome with one Status per chunk",
        )
        statuses, reasons = outcome.statuses, outcome.reasons
        count = len(statuses)
        expect(count == len(batch), f"a {verb} of {len(batch)} chunks answered with {count} statuses")
        others = [status for status in statuses if type(status) is not Status]
        expect(
            not others,
            f"{verb}() returned the statuses {others}; use kvtier.tiers.Status, as Status.OK, which "
            "is 0; True would be ABSENT",
        )
        strange = [status for status in statuses if status not in _POSSIBLE[verb]]
        expect(not strange, f"a {verb} cannot end as {names_of(strange)}, only {names_of(_POSSIBLE[verb])}")
        for reason, number in reasons.items():
            expect(type(number) is int and number > 0, f"a {verb} counts {number!r} for {reason!r}")
        failed, told = sum(status is not Status.OK for status in statuses), sum(reasons.values())
        expect(told <= failed, f"a {verb} gives {told} reasons for {failed} chunks that did not end OK")
        bad = sum(status not in (Status.OK, Status.ABSENT) for status in statuses)
        expect(
            told >= bad,
            f"a {verb} gives {told} reasons for {bad} chunks that are neither OK nor ABSENT; Outcome.reasons "
            "counts each of them",
        )
        unknown = set(reasons) - set(TRANSFER) - set(self.tier.reasons)
        expect(
            not unknown,
            f"a {verb} gave the reasons {sorted(unknown)}, which no tier has and this one does not declare: "
            "they would be counted as 'error'; add them to the class's reasons, each with its meaning",
        )

    async def contains(self, numbers: Iterable[int]) -> list[bool]:
        """Ask the tier for chunks, and check that ``known`` agrees."""
        wanted = keys(numbers)
        known = self.tier.known(wanted)
        answers = await self.tier.contains(wanted)
        expect(len(known) == len(wanted), f"known() answered {len(known)} of {len(wanted)} keys")
        expect(len(answers) == len(wanted), f"contains() answered {len(answers)} of {len(wanted)} keys")
        for knowledge, there in zip(known, answers, strict=True):
            expect(isinstance(there, bool), f"contains() answered {there!r}, which is no bool")
            agreeing = (Knowledge.UNKNOWN, Knowledge.PRESENT if there else Knowledge.ABSENT)
            expect(
                knowledge in agreeing,
                f"known() says {Knowledge(knowledge).name} where contains() says {there}",
            )
        return list(answers)


async def check_whole(it: TierRig, numbers: Sequence[int], versions: Sequence[int]) -> None:
    """Check that cancelled puts left whole chunks or none.

    Chunks that cannot be read now, as on a busy machine, are read again: they prove nothing.
    """
    left = list(numbers)
    for _ in range(_READS):
        statuses = await it.get(left, versions)  # checks the bytes of those found
        expect(
            Status.CORRUPT not in statuses,
            f"a put() that was cancelled has left a partial chunk: {names_of(statuses)}",
        )
        left = [number for number, status in zip(left, statuses, strict=True) if status is Status.FAILED]
        if not left:
            return
    fail(f"gets of {len(left)} chunks after a cancelled put() FAILED {_READS} times: see the tier's log")


def calls_of(it: TierRig, chunks: int) -> dict[str, Callable[[], Coroutine[Any, Any, object]]]:
    """Return a call for each verb of an open tier, all with the same chunks."""
    chosen = keys(range(chunks))
    filled, empty = it.filled(range(chunks))[0], it.empty(range(chunks))[0]

    async def known() -> object:
        return it.tier.known(chosen)

    return {
        "put": lambda: it.tier.put(filled),
        "get": lambda: it.tier.get(empty),
        "contains": lambda: it.tier.contains(chosen),
        "known": known,
        "touch": lambda: it.tier.touch(chosen),
        "discard": lambda: it.tier.discard(chosen),
        "reset": lambda: it.tier.reset(),
    }


def names_of(statuses: Iterable[Status]) -> str:
    """Return statuses in words."""
    return ", ".join(Status(status).name for status in statuses)


async def aside(function: Any, *arguments: object) -> Any:
    """Call a function that may block, such as a hook, in a thread."""
    return await in_thread(function, *arguments)
