"""The conformance kit for tiers fails for every broken tier here, in the test and the words expected."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import anyio
import hypothesis
import pytest

from kvtier.keys import OffloadKey
from kvtier.tiers.base import Batch, Knowledge, Outcome, SecondaryTier, Status, TierConfig, TierContext, Usage
from kvtier.tiers.drain import in_thread
from kvtier_testing.tiers import TierConformance

Store = dict[bytes, tuple[bytes, bytes]]


class Config(TierConfig):
    place: str


class GoodTier(SecondaryTier[Config]):
    """A tier that keeps the contract: a dict for each place and identity, copied in threads."""

    Config = Config
    stores: dict[tuple[str, object], Store] = {}  # what a disk or a server would be

    async def open(self, context: TierContext) -> None:
        await asyncio.sleep(0)
        self.store = self.stores.setdefault((self.config.place, self.partition(context)), {})
        self.resets = 0

    def partition(self, context: TierContext) -> object:
        return context.identity.digest

    def name(self, key: OffloadKey) -> bytes:
        return key

    async def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        await asyncio.sleep(0)
        return [self.name(key) in self.store for key in keys]

    async def put(self, batch: Batch) -> Outcome:
        resets = self.resets
        chunks = await in_thread(self.copies, batch)
        if resets != self.resets:
            return Outcome.all(Status.REFUSED, len(batch), "reset")
        self.store.update(chunks)
        return Outcome.all(Status.OK, len(batch))

    def copies(self, batch: Batch) -> Store:
        chunks = {}
        for key, view, trailer in zip(batch.keys, batch.views, batch.trailers, strict=True):
            chunks[self.name(key)] = bytes(view), trailer
            time.sleep(0.001)
        return chunks

    async def get(self, batch: Batch) -> Outcome:
        return Outcome(await in_thread(self.fill, batch))

    def fill(self, batch: Batch) -> list[Status]:
        return [self.fill_one(batch, index) for index in range(len(batch))]

    def fill_one(self, batch: Batch, index: int) -> Status:
        found = self.store.get(self.name(batch.keys[index]))
        if found is None:
            return Status.ABSENT
        time.sleep(0.001)
        batch.views[index][:], batch.trailers[index] = found
        return Status.OK

    async def discard(self, keys: Sequence[OffloadKey]) -> None:
        await asyncio.sleep(0)
        for key in keys:
            self.store.pop(self.name(key), None)

    async def reset(self) -> None:
        await asyncio.sleep(0)
        self.resets += 1
        self.store.clear()
        self.store = {}  # for nobody who opens later


def blocking_call() -> None:
    time.sleep(0.15)


HUNG = threading.Event()  # set when a test has ended
OPENED: dict[str, int] = {}  # open files, closed when a test has ended


async def abandoned(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in a thread as many clients do: a cancellation ends the waiting, not the work."""
    return await asyncio.get_running_loop().run_in_executor(None, function, *arguments)


# --- slots -------------------------------------------------------------------------------------------


class LeavesAPutBehind(GoodTier):
    async def put(self, batch: Batch) -> Outcome:
        self.store.update(await abandoned(self.copies, batch))
        return Outcome.all(Status.OK, len(batch))


class LeavesAPutBehindThatStores(GoodTier):
    async def put(self, batch: Batch) -> Outcome:
        await abandoned(lambda: self.store.update(self.copies(batch)))
        return Outcome.all(Status.OK, len(batch))


class LeavesAGetBehind(GoodTier):
    async def get(self, batch: Batch) -> Outcome:
        return Outcome(await abandoned(self.fill, batch))


class KeepsViews(GoodTier):
    """Answers at once and flushes later."""

    async def put(self, batch: Batch) -> Outcome:
        asyncio.get_running_loop().call_later(0.02, lambda: self.store.update(self.copies(batch)))
        await asyncio.sleep(0)
        return Outcome.all(Status.OK, len(batch))


class FlushesWhenClosing(GoodTier):
    """Gives what it has not flushed yet from its buffer, which is the slots."""

    unflushed: list[Batch]

    async def open(self, context: TierContext) -> None:
        await super().open(context)
        self.unflushed = []

    async def put(self, batch: Batch) -> Outcome:
        outcome = await super().put(batch)
        self.unflushed.append(batch)
        return outcome

    async def aclose(self) -> None:
        for batch in self.unflushed:
            self.store.update(await in_thread(self.copies, batch))


class WritesLater(GoodTier):
    async def get(self, batch: Batch) -> Outcome:
        outcome = await super().get(batch)
        asyncio.get_running_loop().call_later(0.02, self.fill, batch)
        return outcome


class ChangesSlots(GoodTier):
    """Compresses in place."""

    async def put(self, batch: Batch) -> Outcome:
        outcome = await super().put(batch)
        batch.views[-1][:4] = b"done"
        return outcome


class WritesBesideTheSlot(GoodTier):
    def fill_one(self, batch: Batch, index: int) -> Status:
        batch.memory.view(batch.slots[index] + 1)[:1] = b"\0"
        return super().fill_one(batch, index)


# --- bytes -------------------------------------------------------------------------------------------


class StoresTornValues(GoodTier):
    """Writes a value in pieces under its final name."""

    async def put(self, batch: Batch) -> Outcome:
        for key, view, trailer in zip(batch.keys, batch.views, batch.trailers, strict=True):
            value = bytearray(view.nbytes)
            half = view.nbytes // 2
            value[:half] = view[:half]
            self.store[self.name(key)] = bytes(value), trailer
            await asyncio.sleep(0)
            value[half:] = view[half:]
            self.store[self.name(key)] = bytes(value), trailer
        return Outcome.all(Status.OK, len(batch))

    async def get(self, batch: Batch) -> Outcome:
        await asyncio.sleep(0)
        return Outcome(self.fill(batch))  # not in a thread, which may come when all is whole


class LosesTrailers(GoodTier):
    def fill_one(self, batch: Batch, index: int) -> Status:
        status = super().fill_one(batch, index)
        batch.trailers[index] = b""
        return status


class ShortensKeys(GoodTier):
    def name(self, key: OffloadKey) -> bytes:
        return key[:-4].rstrip(b"\0")


class MixesUpABatch(GoodTier):
    """Answers in the order of its index."""

    def fill(self, batch: Batch) -> list[Status]:
        for index, key in enumerate(sorted(batch.keys)):
            batch.views[index][:], batch.trailers[index] = self.store[key]
        return [Status.OK] * len(batch)


class TrimsZeros(GoodTier):
    def copies(self, batch: Batch) -> Store:
        return {
            key: (value.rstrip(b"\0"), trailer) for key, (value, trailer) in super().copies(batch).items()
        }

    def fill_one(self, batch: Batch, index: int) -> Status:
        found = self.store.get(self.name(batch.keys[index]))
        if found is None:
            return Status.ABSENT
        batch.views[index][: len(found[0])], batch.trailers[index] = found
        return Status.OK


# --- answers -----------------------------------------------------------------------------------------


class CountsWrong(GoodTier):
    async def get(self, batch: Batch) -> Outcome:
        outcome = await super().get(batch)
        return Outcome([status for status in outcome.statuses if status is Status.OK])


class SaysNoMore(GoodTier):
    """Raises where a key is not there."""

    def fill_one(self, batch: Batch, index: int) -> Status:
        self.store[batch.keys[index]]
        return super().fill_one(batch, index)


class SaysYes(GoodTier):
    async def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        return [True] * len(keys)


class SaysNo(GoodTier):
    async def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        return [False] * len(keys)


class KnowsWrong(GoodTier):
    """An index that learns of puts and not of discards."""

    def known(self, keys: Sequence[OffloadKey]) -> Sequence[Knowledge]:
        return [Knowledge.PRESENT if key in self.seen else Knowledge.ABSENT for key in keys]

    async def open(self, context: TierContext) -> None:
        await super().open(context)
        self.seen: set[OffloadKey] = set()

    async def put(self, batch: Batch) -> Outcome:
        outcome = await super().put(batch)
        self.seen.update(batch.keys)
        return outcome


class SaysNothingOfReasons(GoodTier):
    async def get(self, batch: Batch) -> Outcome:
        outcome = await super().get(batch)
        return Outcome(outcome.statuses, {"hit": len(batch)})


class CountsNothing(GoodTier):
    def usage(self) -> Usage:
        return Usage(0, 2**30)


class IsOverFull(GoodTier):
    def usage(self) -> Usage:
        return Usage(2, 1)


class LosesChunks(GoodTier):
    def copies(self, batch: Batch) -> Store:
        return dict(list(super().copies(batch).items())[:3])


# --- forgetting --------------------------------------------------------------------------------------


class IgnoresDiscard(GoodTier):
    async def discard(self, keys: Sequence[OffloadKey]) -> None:
        pass


class RaisesAtUnknownKeys(GoodTier):
    async def discard(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            del self.store[key]


class IgnoresReset(GoodTier):
    async def reset(self) -> None:
        pass


class ForgetsAReset(GoodTier):
    """Hides what was there until it is opened again."""

    async def reset(self) -> None:
        self.resets += 1
        self.store = {}


class SharesWhatFollowsAReset(GoodTier):
    async def reset(self) -> None:
        self.resets += 1
        self.store.clear()


class ResetsWhatIsStoredOnly(GoodTier):
    async def put(self, batch: Batch) -> Outcome:
        chunks = await in_thread(self.copies, batch)
        self.store.update(chunks)
        return Outcome.all(Status.OK, len(batch))


class ReadsTheCacheLate(GoodTier):
    """Its thread looks up where the chunks belong when it comes to it, which may be after a reset."""

    async def open(self, context: TierContext) -> None:
        await super().open(context)
        self.turn = anyio.CapacityLimiter(1)

    async def put(self, batch: Batch) -> Outcome:
        await in_thread(lambda: self.store.update(self.copies(batch)), limiter=self.turn)
        return Outcome.all(Status.OK, len(batch))


class WritesIntoTheCacheOfBefore(GoodTier):
    """A put that crosses a reset goes where whoever opens later looks."""

    async def put(self, batch: Batch) -> Outcome:
        store = self.store
        store.update(await in_thread(self.copies, batch))
        return Outcome.all(Status.OK, len(batch))


class ResetsOthers(GoodTier):
    async def reset(self) -> None:
        self.resets += 1
        for (place, _), store in self.stores.items():
            if place == self.config.place:
                store.clear()


class IgnoresTheIdentity(GoodTier):
    def partition(self, context: TierContext) -> object:
        return context.identity.model


class DropsWhenClosing(GoodTier):
    async def aclose(self) -> None:
        self.store.clear()


# --- the loop ----------------------------------------------------------------------------------------


class Swallows(GoodTier):
    """Goes on after a cancellation as if nothing had been."""

    async def put(self, batch: Batch) -> Outcome:
        try:
            return await super().put(batch)
        except asyncio.CancelledError:
            return Outcome.all(Status.FAILED, len(batch), "cancelled")


class TurnsItIntoAnError(GoodTier):
    async def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        try:
            return await super().contains(keys)
        except asyncio.CancelledError:
            raise ConnectionError("interrupted") from None


class Blocks(GoodTier):
    async def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        blocking_call()
        return await super().contains(keys)


class BlocksWhileOpening(GoodTier):
    async def open(self, context: TierContext) -> None:
        blocking_call()
        await super().open(context)


class BlocksForManyKeys(GoodTier):
    async def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        if len(keys) > 16:
            blocking_call()
        return await super().contains(keys)


class NeverReturns(GoodTier):
    async def get(self, batch: Batch) -> Outcome:
        HUNG.wait()
        return await super().get(batch)


class NeverEnds(GoodTier):
    async def get(self, batch: Batch) -> Outcome:
        forever: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        return await forever


class IgnoresItsCancellation(GoodTier):
    async def discard(self, keys: Sequence[OffloadKey]) -> None:
        while not HUNG.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.1)


class LeavesAThreadThatHangs(GoodTier):
    """A thread that asyncio waits for when its loop is closed."""

    async def put(self, batch: Batch) -> Outcome:
        asyncio.get_running_loop().run_in_executor(None, HUNG.wait)
        return await super().put(batch)


class ExitsInAThread(GoodTier):
    def fill(self, batch: Batch) -> list[Status]:
        sys.exit("no license")


class Exits(GoodTier):
    async def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        sys.exit("no license")


class HoldsATransactionForEachGet(GoodTier):
    async def open(self, context: TierContext) -> None:
        await super().open(context)
        self.transactions: list[object] = []

    async def get(self, batch: Batch) -> Outcome:
        self.transactions.append(object())
        return await super().get(batch)


class HoldsAFileForEachLookup(GoodTier):
    async def open(self, context: TierContext) -> None:
        await super().open(context)
        self.files: list[int] = []

    async def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        self.files.append(os.open(os.devnull, os.O_RDONLY))
        return await super().contains(keys)

    async def aclose(self) -> None:
        for file in self.files:
            os.close(file)


class KeepsEnvironments(GoodTier):
    """Opens what belongs to a place once, and never closes it."""

    async def open(self, context: TierContext) -> None:
        await super().open(context)
        if self.config.place not in OPENED:
            OPENED[self.config.place] = os.open(os.devnull, os.O_RDONLY)


class LeavesAFileWhenItsOpeningIsCancelled(GoodTier):
    async def open(self, context: TierContext) -> None:
        self.file = OPENED[str(id(self))] = os.open(os.devnull, os.O_RDONLY)
        await super().open(context)

    async def aclose(self) -> None:
        os.close(OPENED.pop(str(id(self))))


class LeaksATask(GoodTier):
    async def open(self, context: TierContext) -> None:
        await super().open(context)
        self.task = asyncio.ensure_future(asyncio.sleep(60))


class LeaksAThread(GoodTier):
    async def open(self, context: TierContext) -> None:
        await super().open(context)
        threading.Thread(target=HUNG.wait, args=(60,), daemon=True).start()


class LeaksAFile(GoodTier):
    async def open(self, context: TierContext) -> None:
        await super().open(context)
        OPENED[str(len(OPENED))] = os.open(os.devnull, os.O_RDONLY)


class LeaksATaskWhenItsOpeningIsCancelled(GoodTier):
    async def open(self, context: TierContext) -> None:
        self.task = asyncio.ensure_future(asyncio.sleep(60))
        await super().open(context)

    async def aclose(self) -> None:
        self.task.cancel()


class LetsOthersRead(GoodTier):
    """Keeps what it has in a file, too, with the mode that comes by default."""

    async def put(self, batch: Batch) -> Outcome:
        folder = Path(self.config.place)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / "chunks").write_bytes(bytes(batch.views[0]))
        return await super().put(batch)


class BreaksWhenCancelled(GoodTier):
    """Holds a lock by hand, and after a cancellation for ever."""

    async def open(self, context: TierContext) -> None:
        await super().open(context)
        self.lock = asyncio.Lock()

    async def discard(self, keys: Sequence[OffloadKey]) -> None:
        await asyncio.wait_for(self.lock.acquire(), 0.5)
        await asyncio.sleep(0)
        await super().discard(keys)
        self.lock.release()

    async def put(self, batch: Batch) -> Outcome:
        async with self.lock:
            return await super().put(batch)


class HasNoRoomForTwo(GoodTier):
    """Uses one buffer for all."""

    buffer = b"", b""

    async def put(self, batch: Batch) -> Outcome:
        for key, view, trailer in zip(batch.keys, batch.views, batch.trailers, strict=True):
            self.buffer = bytes(view), trailer
            await asyncio.sleep(0)
            self.store[key] = self.buffer
        return Outcome.all(Status.OK, len(batch))


A_CANCELLED_OPEN = "a_cancelled_open_leaves_nothing_running_or_open"
HANGING = (BreaksWhenCancelled, NeverReturns, NeverEnds, IgnoresItsCancellation, LeavesAThreadThatHangs)
CAUGHT: list[tuple[type[GoodTier], str, str]] = [
    (LeavesAPutBehindThatStores, "a_cancelled_put_leaves_whole_chunks_or_none", "wrong bytes"),
    (LeavesAPutBehindThatStores, "calls_may_be_cancelled_at_any_moment", "wrong bytes"),
    (
        LeavesAGetBehind,
        "a_cancelled_get_never_writes_into_the_slots_next_content",
        "after it had ended",
    ),
    (LeavesAGetBehind, "calls_may_be_cancelled_at_any_moment", "after it had ended"),
    (KeepsViews, "the_slots_of_a_put_may_hold_something_else_when_it_has_ended", "of the slot's next chunk"),
    (FlushesWhenClosing, "the_slots_of_a_put_may_hold_something_else_when_it_has_ended", "next chunk"),
    (WritesLater, "the_slots_of_a_get_may_hold_something_else_when_it_has_ended", "after it had ended"),
    (ChangesSlots, "a_put_leaves_its_slots_as_they_are", "changed the bytes of a slot"),
    (WritesBesideTheSlot, "what_is_put_is_got", "not in its batch"),
    (StoresTornValues, "a_cancelled_put_leaves_whole_chunks_or_none", "wrong bytes"),
    (StoresTornValues, "puts_gets_and_discards_of_one_key_at_once_never_show_other_bytes", "wrong bytes"),
    (LosesTrailers, "what_is_put_is_got", "not the trailer"),
    (ShortensKeys, "keys_of_every_length_are_told_apart", "wrong bytes"),
    (MixesUpABatch, "what_is_put_is_got", "wrong bytes"),
    (TrimsZeros, "bytes_of_every_pattern_come_back", "zeros has come back otherwise"),
    (CountsWrong, "a_batch_that_is_partly_there", "of 6 chunks answered with 3 statuses"),
    (
        SaysNoMore,
        "what_was_never_put_is_absent",
        r"KeyError(.|\n)*get.. raised this. Its contract: Fill the slots",
    ),
    (SaysYes, "what_was_never_put_is_absent", "says yes to what was never put"),
    (SaysYes, "contains_and_known_agree_with_what_a_get_finds", "a get finds"),
    (SaysNo, "a_batch_that_is_partly_there", "contains.. answered"),
    (KnowsWrong, "contains_and_known_agree_with_what_a_get_finds", "known.. says PRESENT"),
    (SaysNothingOfReasons, "what_is_put_is_got", "5 reasons for 0 chunks"),
    (LosesChunks, "what_is_put_is_got", "ABSENT"),
    (IgnoresDiscard, "discarded_chunks_are_gone_and_others_stay", "were discarded: OK"),
    (
        RaisesAtUnknownKeys,
        "discarded_chunks_are_gone_and_others_stay",
        r"KeyError(.|\n)*discard.. raised this",
    ),
    (IgnoresReset, "a_reset_hides_everything", "after a reset: OK"),
    (ForgetsAReset, "a_reset_holds_after_opening_again", "opening again: OK"),
    (SharesWhatFollowsAReset, "a_reset_holds_after_opening_again", "given to one who opened later"),
    (
        ResetsWhatIsStoredOnly,
        "a_put_in_flight_at_a_reset_does_not_appear_after_it",
        "the tier that was reset gives",
    ),
    (ResetsOthers, "a_reset_of_one_cache_leaves_another_as_it_is", "ABSENT"),
    (IgnoresTheIdentity, "chunks_of_another_cache_are_not_given", "another identity: OK"),
    (DropsWhenClosing, "chunks_are_there_after_closing_and_opening_again", "ABSENT"),
    (Swallows, "a_cancelled_call_raises_the_cancellation", "swallowed the cancellation"),
    (TurnsItIntoAnError, "a_cancelled_call_raises_the_cancellation", "ConnectionError.* in place of"),
    (Blocks, "no_call_blocks_the_event_loop", "contains.. of 64 chunks blocks"),
    (BlocksWhileOpening, "no_call_blocks_the_event_loop", "open.. of 64 chunks blocks"),
    (LeaksATask, "nothing_is_left_running_or_open_after_closing", "left: .*Task"),
    (LeaksAThread, "nothing_is_left_running_or_open_after_closing", "left: .*Thread"),
    (LeaksAFile, "nothing_is_left_running_or_open_after_closing", "2 more open files"),
    (LetsOthersRead, "nobody_else_may_read_what_it_keeps_in_files", "others may read.*chunks 666"),
    (LeaksATaskWhenItsOpeningIsCancelled, A_CANCELLED_OPEN, "open.. gives back .* left: .*Task"),
    (LeavesAFileWhenItsOpeningIsCancelled, A_CANCELLED_OPEN, "open.. gives back .* left: .*more open files"),
    (
        KeepsEnvironments,
        "nothing_is_left_running_or_open_after_closing",
        "aclose.. gives everything back.*2 more open files",
    ),
    (HoldsATransactionForEachGet, "repeated_calls_add_up_to_nothing", "each get.. holds something"),
    (HoldsAFileForEachLookup, "repeated_calls_add_up_to_nothing", "each contains.. holds .* 40 open files"),
    (BlocksForManyKeys, "no_call_blocks_the_event_loop", "contains.. of 64 chunks blocks the event loop"),
    (
        NeverReturns,
        "what_was_never_put_is_absent",
        r"get.. has not ended within 1 s.*blocks the event loop(.|\n)*HUNG.wait",
    ),
    (NeverReturns, "any_sequence_of_calls_agrees_with_a_dict", "get.. has not ended within 1 s"),
    (NeverEnds, "what_was_never_put_is_absent", "get.. has not ended within 1 s"),
    (IgnoresItsCancellation, "discarded_chunks_are_gone_and_others_stay", "discard.. has not .*swallows"),
    (
        LeavesAThreadThatHangs,
        "what_was_never_put_is_absent",
        "a task or thread that is left .* has not ended",
    ),
    (ExitsInAThread, "what_was_never_put_is_absent", "get.. raised SystemExit.*must not end the process"),
    (ExitsInAThread, "any_sequence_of_calls_agrees_with_a_dict", "get.. raised SystemExit"),
    (Exits, "what_was_never_put_is_absent", "contains.. raised SystemExit"),
    (Exits, "any_sequence_of_calls_agrees_with_a_dict", "contains.. raised SystemExit"),
    (
        ReadsTheCacheLate,
        "a_put_in_flight_at_a_reset_does_not_appear_after_it",
        "the tier that was reset gives",
    ),
    (WritesIntoTheCacheOfBefore, "a_put_in_flight_at_a_reset_does_not_appear_after_it", "opened later gives"),
    (CountsNothing, "usage_counts_the_bytes_that_are_kept", "usage.. says that 0 bytes are used"),
    (IsOverFull, "usage_counts_the_bytes_that_are_kept", "usage.. is beyond its bound"),
    (BreaksWhenCancelled, "a_cancelled_lookup_or_removal_leaves_a_usable_tier", "has not ended|TimeoutError"),
    (HasNoRoomForTwo, "puts_gets_and_discards_of_one_key_at_once_never_show_other_bytes", "wrong bytes"),
]
BY_SEQUENCE = [
    LosesTrailers,
    LosesChunks,
    SaysYes,
    SaysNo,
    KnowsWrong,
    IgnoresDiscard,
    IgnoresReset,
    ForgetsAReset,
    SharesWhatFollowsAReset,
    DropsWhenClosing,
]


# What is drawn differs between versions of hypothesis: mostly one of the first ten sequences shows what is
# wrong, at times the hundredth. That one is the last.
ENOUGH = 1000


def kit(bad: type[GoodTier]) -> TierConformance:
    class Kit(TierConformance):
        tier = bad
        is_persistent = True
        is_shared = True
        settle_s = 0.2 if bad is LeavesAGetBehind else 0.05
        patience_s = 1.0 if bad in HANGING else 30.0

        def around_test(self) -> AbstractContextManager[None]:
            return nullcontext()  # bad tiers block, too

        def sequences(self) -> hypothesis.settings:
            return hypothesis.settings(
                super().sequences(),
                max_examples=20 if bad is GoodTier else ENOUGH,
                phases=[hypothesis.Phase.generate],
                derandomize=True,
                database=None,
            )

        def settings(self, place: Path) -> Mapping[str, object]:
            return {"type": "good", "place": str(place)}

    return Kit()


def run(suite: TierConformance, test: str, place: Path) -> None:
    """Run one test of the kit, in each way where it has several."""
    function: Callable[..., None] = getattr(suite, f"test_{test}")
    parameters = [mark.args[1] for mark in getattr(function, "pytestmark", ()) if mark.name == "parametrize"]
    for number, parameter in enumerate(parameters[0] if parameters else [None]):
        here = place / str(number)
        function(here, *(() if parameter is None else (parameter,)))


@pytest.fixture(autouse=True)
def _nothing_stored():
    GoodTier.stores.clear()
    HUNG.clear()
    yield
    HUNG.set()
    for file in OPENED.values():
        os.close(file)
    OPENED.clear()


@pytest.mark.parametrize(("tier", "test", "words"), CAUGHT, ids=lambda value: getattr(value, "__name__", ""))
def test_a_bad_tier_is_caught_by_the_test_that_names_what_is_wrong(tier, test, words, tmp_path):
    with pytest.raises(BaseException) as caught:
        run(kit(tier), test, tmp_path)
    errors = getattr(caught.value, "exceptions", (caught.value,))
    said = [
        "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]) for error in errors
    ]
    assert any(re.search(words, one) for one in said), said


@pytest.mark.parametrize("test", sorted({test for _, test, _ in CAUGHT}))
def test_a_good_tier_passes_the_tests_that_catch_bad_ones(test, tmp_path):
    run(kit(GoodTier), test, tmp_path)


@pytest.mark.parametrize("tier", BY_SEQUENCE, ids=lambda value: value.__name__)
def test_a_bad_tier_is_caught_by_some_sequence_of_calls(tier, tmp_path):
    with pytest.raises(AssertionError):
        kit(tier).test_any_sequence_of_calls_agrees_with_a_dict(tmp_path / "place")


def test_a_good_tier_agrees_with_a_dict(tmp_path):
    kit(GoodTier).test_any_sequence_of_calls_agrees_with_a_dict(tmp_path / "place")


def test_blocking_calls_are_refused_where_blockbuster_is_installed(tmp_path):
    blockbuster = pytest.importorskip("blockbuster")

    class Kit(TierConformance):
        tier = Blocks

        def settings(self, place: Path) -> Mapping[str, object]:
            return {"type": "good", "place": str(place)}

    with pytest.raises(blockbuster.BlockingError, match=r"time\.sleep"):
        run(Kit(), "what_was_never_put_is_absent", tmp_path)


A_RUN = """
import sys, threading
from contextlib import nullcontext
from kvtier.tiers.drain import in_thread
from kvtier.tiers.dummy import DummyTier
from kvtier_testing.tiers import TierConformance

class Exits(DummyTier):
    async def get(self, batch):
        return await in_thread(sys.exit, 3)

class Blocks(DummyTier):
    async def get(self, batch):
        threading.Event().wait()

class HangsInAThread(DummyTier):
    async def get(self, batch):
        await in_thread(threading.Event().wait)

class Kit(TierConformance):
    patience_s = 1.0
    def around_test(self):
        return nullcontext()  # without blockbuster
    def settings(self, place):
        return {"type": "dummy"}

class TestExits(Kit):
    tier = Exits

class TestBlocks(Kit):
    tier = Blocks

class TestHangsInAThread(Kit):
    tier = HangsInAThread
"""


def test_a_run_of_the_kit_ends_whatever_a_tier_does(tmp_path):
    (tmp_path / "test_bad.py").write_text(A_RUN)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-k",
        "test_a_large_batch",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path)
    assert done.returncode == 1, done.stdout
    assert "3 failed" in done.stdout
    assert "get() raised SystemExit(3)" in done.stdout
    ended = re.findall(r"^E +AssertionError: get\(\) has not ended within 1 s", done.stdout, re.MULTILINE)
    assert len(ended) == 2, done.stdout
