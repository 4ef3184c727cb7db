"""The kit for authors of tiers sees what is wrong: one bad tier for each rule, and the test that tells."""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from kvtier.keys import OffloadKey
from kvtier.tiers.base import Batch, Knowledge, Outcome, SecondaryTier, Status, TierConfig, TierContext
from kvtier.tiers.drain import in_thread
from kvtier_testing.tiers import TierConformance

pytestmark = pytest.mark.blocking("bad tiers block, too")

Store = dict[bytes, tuple[bytes, bytes]]


class ShopConfig(TierConfig):
    place: str


class Honest(SecondaryTier[ShopConfig]):
    """A tier that keeps the contract: a dict for each place and identity, copied in threads."""

    Config = ShopConfig
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


async def abandoned(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in a thread as many clients do: a cancellation ends the waiting, not the work."""
    return await asyncio.get_running_loop().run_in_executor(None, function, *arguments)


# --- slots -------------------------------------------------------------------------------------------


class LeavesAPutBehind(Honest):
    async def put(self, batch: Batch) -> Outcome:
        self.store.update(await abandoned(self.copies, batch))
        return Outcome.all(Status.OK, len(batch))


class LeavesAPutBehindThatStores(Honest):
    async def put(self, batch: Batch) -> Outcome:
        await abandoned(lambda: self.store.update(self.copies(batch)))
        return Outcome.all(Status.OK, len(batch))


class LeavesAGetBehind(Honest):
    async def get(self, batch: Batch) -> Outcome:
        return Outcome(await abandoned(self.fill, batch))


class KeepsViews(Honest):
    """Answers at once and flushes later."""

    async def put(self, batch: Batch) -> Outcome:
        asyncio.get_running_loop().call_later(0.02, lambda: self.store.update(self.copies(batch)))
        await asyncio.sleep(0)
        return Outcome.all(Status.OK, len(batch))


class FlushesWhenClosing(Honest):
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


class WritesLater(Honest):
    async def get(self, batch: Batch) -> Outcome:
        outcome = await super().get(batch)
        asyncio.get_running_loop().call_later(0.02, self.fill, batch)
        return outcome


class ChangesSlots(Honest):
    """Compresses in place."""

    async def put(self, batch: Batch) -> Outcome:
        outcome = await super().put(batch)
        batch.views[-1][:4] = b"done"
        return outcome


class WritesBesideTheSlot(Honest):
    def fill_one(self, batch: Batch, index: int) -> Status:
        batch.memory.view(batch.slots[index] + 1)[:1] = b"\0"
        return super().fill_one(batch, index)


# --- bytes -------------------------------------------------------------------------------------------


class StoresTornValues(Honest):
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


class LosesTrailers(Honest):
    def fill_one(self, batch: Batch, index: int) -> Status:
        status = super().fill_one(batch, index)
        batch.trailers[index] = b""
        return status


class ShortensKeys(Honest):
    def name(self, key: OffloadKey) -> bytes:
        return key[:-4].rstrip(b"\0")


class MixesUpABatch(Honest):
    """Answers in the order of its index."""

    def fill(self, batch: Batch) -> list[Status]:
        for index, key in enumerate(sorted(batch.keys)):
            batch.views[index][:], batch.trailers[index] = self.store[key]
        return [Status.OK] * len(batch)


class TrimsZeros(Honest):
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


class CountsWrong(Honest):
    async def get(self, batch: Batch) -> Outcome:
        outcome = await super().get(batch)
        return Outcome([status for status in outcome.statuses if status is Status.OK])


class SaysNoMore(Honest):
    """Raises where a key is not there."""

    def fill_one(self, batch: Batch, index: int) -> Status:
        self.store[batch.keys[index]]
        return super().fill_one(batch, index)


class SaysYes(Honest):
    async def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        return [True] * len(keys)


class SaysNo(Honest):
    async def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        return [False] * len(keys)


class KnowsWrong(Honest):
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


class SaysNothingOfReasons(Honest):
    async def get(self, batch: Batch) -> Outcome:
        outcome = await super().get(batch)
        return Outcome(outcome.statuses, {"hit": len(batch)})


class LosesChunks(Honest):
    def copies(self, batch: Batch) -> Store:
        return dict(list(super().copies(batch).items())[:3])


# --- forgetting --------------------------------------------------------------------------------------


class IgnoresDiscard(Honest):
    async def discard(self, keys: Sequence[OffloadKey]) -> None:
        pass


class RaisesAtUnknownKeys(Honest):
    async def discard(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            del self.store[key]


class IgnoresReset(Honest):
    async def reset(self) -> None:
        pass


class ForgetsAReset(Honest):
    """Hides what was there until it is opened again."""

    async def reset(self) -> None:
        self.resets += 1
        self.store = {}


class SharesWhatFollowsAReset(Honest):
    async def reset(self) -> None:
        self.resets += 1
        self.store.clear()


class ResetsWhatIsStoredOnly(Honest):
    async def put(self, batch: Batch) -> Outcome:
        chunks = await in_thread(self.copies, batch)
        self.store.update(chunks)
        return Outcome.all(Status.OK, len(batch))


class ResetsOthers(Honest):
    async def reset(self) -> None:
        self.resets += 1
        for (place, _), store in self.stores.items():
            if place == self.config.place:
                store.clear()


class IgnoresTheIdentity(Honest):
    def partition(self, context: TierContext) -> object:
        return context.identity.model


class DropsWhenClosing(Honest):
    async def aclose(self) -> None:
        self.store.clear()


# --- the loop ----------------------------------------------------------------------------------------


class Swallows(Honest):
    """Goes on after a cancellation as if nothing had been."""

    async def put(self, batch: Batch) -> Outcome:
        try:
            return await super().put(batch)
        except asyncio.CancelledError:
            return Outcome.all(Status.FAILED, len(batch), "cancelled")


class TurnsItIntoAnError(Honest):
    async def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        try:
            return await super().contains(keys)
        except asyncio.CancelledError:
            raise ConnectionError("interrupted") from None


class Blocks(Honest):
    async def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        blocking_call()
        return await super().contains(keys)


class BlocksWhileOpening(Honest):
    async def open(self, context: TierContext) -> None:
        blocking_call()
        await super().open(context)


class LeaksATask(Honest):
    async def open(self, context: TierContext) -> None:
        await super().open(context)
        self.task = asyncio.ensure_future(asyncio.sleep(60))


class LeaksAThread(Honest):
    ended = threading.Event()

    async def open(self, context: TierContext) -> None:
        await super().open(context)
        threading.Thread(target=self.ended.wait, args=(60,), daemon=True).start()


class LeaksAFile(Honest):
    opened: list[int] = []

    async def open(self, context: TierContext) -> None:
        await super().open(context)
        self.opened.append(os.open("/dev/null", os.O_RDONLY))


class LeaksWhenItsOpeningIsCutShort(Honest):
    async def open(self, context: TierContext) -> None:
        self.task = asyncio.ensure_future(asyncio.sleep(60))
        await super().open(context)

    async def aclose(self) -> None:
        self.task.cancel()


class LetsOthersRead(Honest):
    """Keeps what it has in a file, too, with the mode that comes by default."""

    async def put(self, batch: Batch) -> Outcome:
        folder = Path(self.config.place)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / "chunks").write_bytes(bytes(batch.views[0]))
        return await super().put(batch)


class BreaksWhenCutShort(Honest):
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


class HasNoRoomForTwo(Honest):
    """Uses one buffer for all."""

    buffer = b"", b""

    async def put(self, batch: Batch) -> Outcome:
        for key, view, trailer in zip(batch.keys, batch.views, batch.trailers, strict=True):
            self.buffer = bytes(view), trailer
            await asyncio.sleep(0)
            self.store[key] = self.buffer
        return Outcome.all(Status.OK, len(batch))


CAUGHT: list[tuple[type[Honest], str, str]] = [
    (LeavesAPutBehindThatStores, "a_put_that_is_cut_short_leaves_whole_chunks_or_none", "wrong bytes"),
    (LeavesAPutBehindThatStores, "calls_may_be_cut_short_at_any_moment", "wrong bytes"),
    (
        LeavesAGetBehind,
        "a_get_that_is_cut_short_never_writes_into_the_slots_next_content",
        "after it had ended",
    ),
    (LeavesAGetBehind, "calls_may_be_cut_short_at_any_moment", "after it had ended"),
    (LeavesAGetBehind, "closing_under_load_leaves_whole_chunks_or_none", "after it had|wrong bytes"),
    (KeepsViews, "the_slots_of_a_put_may_hold_something_else_when_it_has_ended", "of the slot's next owner"),
    (FlushesWhenClosing, "the_slots_of_a_put_may_hold_something_else_when_it_has_ended", "next owner"),
    (WritesLater, "the_slots_of_a_get_may_hold_something_else_when_it_has_ended", "after it had ended"),
    (ChangesSlots, "a_put_leaves_its_slots_as_they_are", "changed the bytes of a slot"),
    (WritesBesideTheSlot, "what_is_put_is_got", "not in its batch"),
    (StoresTornValues, "a_put_that_is_cut_short_leaves_whole_chunks_or_none", "wrong bytes"),
    (StoresTornValues, "puts_gets_and_discards_of_one_key_at_once_never_show_other_bytes", "wrong bytes"),
    (LosesTrailers, "what_is_put_is_got", "not the trailer"),
    (ShortensKeys, "keys_of_every_length_are_told_apart", "wrong bytes"),
    (MixesUpABatch, "what_is_put_is_got", "wrong bytes"),
    (TrimsZeros, "bytes_of_every_pattern_come_back", "zeros has come back otherwise"),
    (CountsWrong, "a_batch_that_is_partly_there", "of 6 chunks answered with 3 statuses"),
    (SaysNoMore, "what_was_never_put_is_absent", "KeyError"),
    (SaysYes, "what_was_never_put_is_absent", "says yes to what was never put"),
    (SaysYes, "contains_and_known_agree_with_what_a_get_finds", "a get finds"),
    (SaysNo, "a_batch_that_is_partly_there", "contains.. answered"),
    (KnowsWrong, "contains_and_known_agree_with_what_a_get_finds", "known.. says PRESENT"),
    (SaysNothingOfReasons, "what_is_put_is_got", "5 reasons for 0 chunks"),
    (LosesChunks, "what_is_put_is_got", "ABSENT"),
    (IgnoresDiscard, "discarded_chunks_are_gone_and_others_stay", "were discarded: OK"),
    (RaisesAtUnknownKeys, "discarded_chunks_are_gone_and_others_stay", "KeyError"),
    (IgnoresReset, "a_reset_hides_everything", "after a reset: OK"),
    (ForgetsAReset, "a_reset_holds_after_opening_again", "opening again: OK"),
    (SharesWhatFollowsAReset, "a_reset_holds_after_opening_again", "given to one who opened later"),
    (ResetsWhatIsStoredOnly, "a_put_under_way_at_a_reset_does_not_appear_after_it", "appeared after it"),
    (ResetsOthers, "a_reset_of_one_cache_leaves_another_as_it_is", "ABSENT"),
    (IgnoresTheIdentity, "chunks_of_another_cache_are_not_given", "another identity: OK"),
    (DropsWhenClosing, "chunks_are_there_after_closing_and_opening_again", "ABSENT"),
    (Swallows, "who_cancels_a_call_learns_of_it", "swallowed the cancellation"),
    (TurnsItIntoAnError, "who_cancels_a_call_learns_of_it", "ConnectionError.* in place of"),
    (Blocks, "no_call_holds_up_the_event_loop", "contains.. holds up the event loop"),
    (BlocksWhileOpening, "no_call_holds_up_the_event_loop", "open.. holds up the event loop"),
    (LeaksATask, "nothing_is_left_running_or_open_after_closing", "left: .*Task"),
    (LeaksAThread, "nothing_is_left_running_or_open_after_closing", "left: .*Thread"),
    (LeaksAFile, "nothing_is_left_running_or_open_after_closing", "2 more files are open"),
    (LetsOthersRead, "nobody_else_may_read_what_it_keeps_in_files", "others may read.*chunks 666"),
    (LeaksWhenItsOpeningIsCutShort, "an_opening_that_is_cut_short_leaves_nothing_running", "left: .*Task"),
    (BreaksWhenCutShort, "a_question_that_is_cut_short_harms_nothing", "has not ended|TimeoutError"),
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


def kit(bad: type[Honest]) -> TierConformance:
    class Kit(TierConformance):
        tier = bad
        is_persistent = True
        is_shared = True
        settle_s = 0.05
        patience_s = 5.0 if bad is BreaksWhenCutShort else 60.0  # that one hangs; others are slow at most

        def sequences(self) -> hypothesis.settings:
            return hypothesis.settings(
                super().sequences(),
                max_examples=20 if bad is Honest else ENOUGH,
                phases=[hypothesis.Phase.generate],
                derandomize=True,
                database=None,
            )

        def settings(self, place: Path) -> Mapping[str, object]:
            return {"type": "shop", "place": str(place)}

    return Kit()


async def run(tier: type[Honest], test: str, place: Path) -> None:
    """Run one test of the kit, in each way where it has several."""
    function: Callable[..., Coroutine[Any, Any, None]] = getattr(kit(tier), f"test_{test}")
    parameters = [mark.args[1] for mark in getattr(function, "pytestmark", ()) if mark.name == "parametrize"]
    for number, parameter in enumerate(parameters[0] if parameters else [None]):
        here = place / str(number)
        await (function(here) if parameter is None else function(here, parameter))


@pytest.fixture(autouse=True)
def _empty_shops():
    Honest.stores.clear()
    LeaksAThread.ended.clear()
    yield
    LeaksAThread.ended.set()
    for file in LeaksAFile.opened:
        os.close(file)
    LeaksAFile.opened.clear()


@pytest.mark.parametrize(("tier", "test", "words"), CAUGHT, ids=lambda value: getattr(value, "__name__", ""))
async def test_a_bad_tier_is_caught_by_the_test_that_names_what_is_wrong(tier, test, words, tmp_path):
    with pytest.raises(BaseException) as caught:
        await run(tier, test, tmp_path)
    errors = getattr(caught.value, "exceptions", (caught.value,))
    assert any(re.search(words, f"{type(error).__name__}: {error}") for error in errors), errors


@pytest.mark.parametrize("test", sorted({test for _, test, _ in CAUGHT}))
async def test_a_good_tier_passes_the_tests_that_catch_bad_ones(test, tmp_path):
    await run(Honest, test, tmp_path)


@pytest.mark.parametrize("tier", BY_SEQUENCE, ids=lambda value: value.__name__)
def test_a_bad_tier_is_caught_by_some_sequence_of_calls(tier, tmp_path):
    with pytest.raises(AssertionError):
        kit(tier).test_any_sequence_of_calls_agrees_with_a_dict(tmp_path / "place")


def test_a_good_tier_agrees_with_a_dict(tmp_path):
    kit(Honest).test_any_sequence_of_calls_agrees_with_a_dict(tmp_path / "place")
