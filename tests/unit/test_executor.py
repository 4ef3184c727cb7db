"""Each command yields exactly one event, whatever the tiers do."""

from __future__ import annotations

import asyncio
import logging
import random
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis.strategies import floats
from pydantic import ByteSize

from kvtier import HeapMemory
from kvtier._core.kv_events import MOST_REMOVED
from kvtier._core.messages import Answer, Event, GetEnded, Put, PutEnded, Removed, TierDown, TierUp, Touch
from kvtier._execution import executor as _executor
from kvtier._execution.executor import Executor, ExecutorThread, NamedTier, time_left
from kvtier.errors import TierError
from kvtier.keys import MAX_KEY_BYTES, OffloadKey
from kvtier.tiers import TRAILER_BYTES, Batch, Knowledge, Outcome, Status, TierContext, Usage, _supervisor
from kvtier.tiers import _runner as runners
from kvtier.tiers.fs import FsConfig, FsTier
from kvtier_testing.dummy import DummyConfig, DummyTier
from tests.unit.isolation.conftest import (
    CHUNK_BYTES,
    CLOSE_S,
    IDENTITY,
    PATIENCE_S,
    SLOTS,
    Harness,
    content,
    key,
    keys,
)
from tests.unit.tiers.world import AnyTier, Scripted, World, ends_of, raises, world

MISSING, LOCATED, COPIED = Answer.MISSING, Answer.LOCATED, Answer.COPIED


def dummy(**settings: object) -> DummyTier:
    return DummyTier(DummyConfig.model_validate(settings))


class Gated(DummyTier):
    """Holds puts and gets until the test releases them, and records them."""

    def __init__(self, **settings: object) -> None:
        super().__init__(DummyConfig.model_validate(settings))
        self.puts_open = anyio.Event()
        self.gets_open = anyio.Event()
        self.begun: list[str] = []
        self.running = {"put": 0, "get": 0}
        self._changed = anyio.Event()

    def open_all(self) -> None:
        self.puts_open.set()
        self.gets_open.set()

    async def put(self, batch: Batch) -> Outcome:
        resets = self.begun.count("reset")
        outcome = await self._through("put", self.puts_open, partial(super().put, batch))
        if resets == self.begun.count("reset"):
            return outcome
        await super().discard(batch.keys)  # it started in an earlier epoch
        return Outcome.all(Status.REFUSED, len(batch), "reset")

    async def get(self, batch: Batch) -> Outcome:
        return await self._through("get", self.gets_open, partial(super().get, batch))

    async def reset(self) -> None:
        self._note("reset")
        await super().reset()

    async def until(self, holds: Callable[[], object]) -> None:
        with anyio.fail_after(PATIENCE_S):
            while not holds():
                await self._changed.wait()

    def _note(self, what: str) -> None:
        self.begun.append(what)
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def _through(self, verb: str, gate: anyio.Event, act: Callable[[], Awaitable[Outcome]]) -> Outcome:
        self.running[verb] += 1
        self._note(verb)
        try:
            await gate.wait()
            return await act()
        finally:
            self.running[verb] -= 1


# --- fetching ------------------------------------------------------------------------------------


@pytest.fixture(params=["complete_index", "asked", "fs"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> AnyTier:
    if request.param == "fs":
        return FsTier(FsConfig(root_dir=tmp_path / "root", n_threads=2, min_free_bytes=0, max_bytes=2**50))
    return dummy(complete_index=request.param == "complete_index")


@pytest.mark.parametrize(
    ("present", "slots", "answers"),
    [
        ([], 4, [MISSING] * 4),
        ([0, 1, 2, 3], 4, [COPIED] * 4),
        ([0, 1, 2, 3], 2, [COPIED, COPIED, LOCATED, LOCATED]),
        ([0, 1, 2, 3], 0, [LOCATED] * 4),
        ([0, 1, 3], 4, [COPIED, COPIED, MISSING, LOCATED]),
        ([0, 1, 3], 1, [COPIED, LOCATED, MISSING, LOCATED]),
        ([1, 2, 3], 4, [MISSING, LOCATED, LOCATED, LOCATED]),
    ],
)
async def test_fetch_brings_leading_run(
    tier: AnyTier, present: list[int], slots: int, answers: list[Answer]
) -> None:
    async with world(tier) as it:
        if present:
            await it.hold(present)
        it.clear(range(SLOTS))
        event = await it.ended(it.fetch(range(4), range(10, 10 + slots)))
        assert list(event.answers) == answers
        assert event.reasons == {}
        for number, answer in enumerate(answers):
            assert it.bytes_in(10 + number) == (content(number) if answer is COPIED else bytes(CHUNK_BYTES))


# --- touches -------------------------------------------------------------------------------------


async def test_uses_are_batched() -> None:
    opened = anyio.Event()
    tier = Scripted(touch=[opened.wait])
    async with world(tier) as it:
        for number in (1, 2, 3):
            it.executor.submit([Touch(0, keys([number, 9]))])
            await anyio.wait_all_tasks_blocked()
        assert tier.batches == [keys([1, 9])]
        opened.set()
        await anyio.wait_all_tasks_blocked()
        assert tier.batches == [keys([1, 9]), keys([2, 9, 3])]
        it.executor.submit([Touch(0, keys([4]))])
        await anyio.wait_all_tasks_blocked()
        assert tier.batches[2:] == [keys([4])]


# --- concurrency ---------------------------------------------------------------------------------


async def test_gets_do_not_wait_for_puts() -> None:
    tier = Gated(max_concurrency=2)
    async with world(tier) as it:
        tier.puts_open.set()
        await it.hold([1])
        tier.puts_open, tier.gets_open = anyio.Event(), tier.puts_open
        puts = [it.put([10 + number]) for number in range(12)]
        assert list((await it.ended(it.fetch([1], [50]))).answers) == [COPIED]
        assert not any(it.of(put) for put in puts)
        tier.puts_open.set()
        for put in puts:
            assert list((await it.ended(put)).kept) == [True]


# --- resets --------------------------------------------------------------------------------------


class SlowMemory(HeapMemory):
    """Slots that block readers until the gate opens, so that sealing them takes time."""

    def __init__(self) -> None:
        super().__init__(SLOTS, CHUNK_BYTES)
        self.opened = threading.Event()
        self.opened.set()
        self.asked = threading.Event()

    def view(self, slot: int) -> memoryview:
        self.asked.set()
        assert self.opened.wait(20)
        return super().view(slot)


async def test_reset_before_put_is_seen() -> None:
    """The tier would keep the chunk in its new epoch: bytes of old weights under a new key."""
    memory = SlowMemory()
    tier = Gated()
    tier.open_all()
    async with world(tier, memory=memory) as it:
        memory.view(1)[:] = content(1)
        memory.opened.clear()
        memory.asked.clear()
        put = it.submit(Put, 0, keys([1]), [1])
        await anyio.to_thread.run_sync(memory.asked.wait, 20)
        it.reset()
        await tier.until(lambda: tier.begun == ["reset"])
        await it.executor.settled()
        memory.opened.set()
        ended = await it.ended(put)
        assert (list(ended.kept), ended.reasons) == ([False], {"reset": 1})
        assert tier.known(keys([1])) == [Knowledge.ABSENT]


# --- tiers that must be reopened -----------------------------------------------------------------


class Losing(Gated):
    """Reports the loss of its opened resources. Chunks outlive the loss, as on a disk."""

    context: TierContext

    async def open(self, context: TierContext) -> None:
        self.context = context
        self._note("open")
        await super().open(context)

    async def aclose(self) -> None:
        self._note("close")

    async def until_opened(self, times: int) -> None:
        await self.until(lambda: self.begun.count("open") == times)


async def test_lost_tier_reopens_once_idle() -> None:
    tier = Losing()
    async with world(tier) as it:
        putting = it.put([1])
        await tier.until(lambda: "put" in tier.begun)
        await anyio.to_thread.run_sync(tier.context.lost, "the share was unmounted")
        await it.until(lambda: it.downs)
        assert "the share was unmounted" in it.downs[0].reason
        assert (await it.ended(it.fetch([1], [10]))).reasons == {"down": 1}
        assert tier.begun == ["open", "put"]
        tier.open_all()
        assert list((await it.ended(putting)).kept) == [True]
        await tier.until_opened(2)
        assert tier.begun == ["open", "put", "close", "open"]
        await it.until(lambda: [kind for _, kind in it.conditions()] == [TierUp, TierDown, TierUp])
        assert list((await it.ended(it.fetch([1], [11]))).answers) == [COPIED]
    assert it.bytes_in(11) == content(1)


class Unspeakable(Exception):
    """An exception whose text is unavailable."""

    def __str__(self) -> str:
        raise Panic("str")


@pytest.mark.parametrize("why", [Unspeakable(), "redis://me:hunter22@host has gone"], ids=["none", "secret"])
async def test_any_text_of_a_loss_reopens(why: Any) -> None:
    tier = Losing()
    tier.open_all()
    async with world(tier) as it:
        await tier.until_opened(1)
        tier.context.lost(why)
        await tier.until_opened(2)
        assert "hunter22" not in it.downs[0].reason


async def test_loss_while_opening_reopens() -> None:
    class LosesAtOnce(Losing):
        async def open(self, context: TierContext) -> None:
            await super().open(context)
            if len(self.begun) == 1:
                context.lost("the share was unmounted")
                await anyio.wait_all_tasks_blocked()

    tier = LosesAtOnce()
    tier.open_all()
    async with world(tier) as it:
        await tier.until_opened(2)
        await it.until(lambda: [kind for _, kind in it.conditions()] == [TierUp, TierDown, TierUp])
    assert tier.begun == ["open", "close", "open", "close"]


async def test_tier_lost_at_each_opening_is_reopened_with_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    class LosesAlways(Losing):
        async def open(self, context: TierContext) -> None:
            await super().open(context)
            context.lost("the share was unmounted")

    monkeypatch.setattr(_supervisor, "_FIRST_PAUSE_S", 1000.0)
    tier = LosesAlways()
    tier.open_all()
    async with world(tier) as it:
        await it.until(lambda: [kind for _, kind in it.conditions()] == [TierUp, TierDown] * 2)
        await anyio.wait_all_tasks_blocked()
        assert tier.begun == ["open", "close", "open"]


async def test_down_precedes_close() -> None:
    sent: list[Event] = []
    at_close: list[Event] = []

    class Sending(World):
        """Sends events when the loop's turn ends, as the tier process does."""

        def _post(self, event: Event) -> None:
            super()._post(event)
            asyncio.get_running_loop().call_soon(sent.append, event)

    class Noting(Losing):
        async def aclose(self) -> None:
            at_close[:] = at_close or sent
            await super().aclose()

    tier = Noting()
    tier.open_all()
    it = Sending(tier)
    async with it.executor:
        await it.hold([1])
        tier.context.lost("the share was unmounted")
        await tier.until_opened(2)
    assert isinstance(at_close[-1], TierDown)


async def test_reopened_tier_is_reset() -> None:
    """Reopening joins a cache that other engines use, and they may not have reset it."""
    tier = Losing()
    tier.open_all()
    async with world(tier) as it:
        it.reset()
        await it.executor.settled()
        for times in (2, 3):
            tier.context.lost("the share was unmounted")
            await tier.until_opened(times)
            await it.until(lambda times=times: len(tier.begun) == 3 * times - 1)  # type: ignore[misc]
    assert tier.begun == ["open", "reset", *["close", "open", "reset"] * 2, "close"]


@pytest.mark.parametrize("step", ["open", "aclose"])
async def test_shutdown_fails_no_step(step: str, caplog: pytest.LogCaptureFixture) -> None:
    begun = anyio.Event()

    class Slow(Losing):
        async def _reach(self, reached: str) -> None:
            if reached == step:
                begun.set()
                await anyio.sleep_forever()

        async def open(self, context: TierContext) -> None:
            await self._reach("open")
            await super().open(context)

        async def aclose(self) -> None:
            if not begun.is_set():
                await self._reach("aclose")

    tier = Slow()
    tier.open_all()
    async with world(tier) as it:
        if step == "aclose":
            await it.hold([1])
            tier.context.lost("the share was unmounted")
        with anyio.fail_after(PATIENCE_S):
            await begun.wait()
    lines = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert [line for line in lines if "the share was unmounted" not in line] == []


# --- faults --------------------------------------------------------------------------------------


class SlowReset(DummyTier):
    """A tier whose reset takes a while, and which reports whether the reset finished."""

    def __init__(self, reset_s: float) -> None:
        super().__init__(DummyConfig())
        self.was_reset = False
        self._reset_s = reset_s

    async def reset(self) -> None:
        await anyio.sleep(self._reset_s)
        self.was_reset = True

    async def aclose(self) -> None:
        """Keep the chunks; a dummy would reset them."""


class Panic(BaseException):
    """Rust extensions raise it when they panic; it is not an ``Exception``."""


FAULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "an error": (raises(OSError("disk")), "error"),
    "a time-out": (raises(TimeoutError()), "timeout"),
    "a lost connection": (raises(ConnectionResetError()), "connection"),
    "a cancellation that nobody asked for": (raises(asyncio.CancelledError()), "error"),
    "an exit": (raises(SystemExit(3)), "error"),
    "a panic": (raises(Panic("index out of bounds")), "error"),
    "an error without words": (raises(Unspeakable()), "error"),
    "nothing of use": (lambda: "odd", "error"),
    "too few": (lambda: Outcome((Status.OK,)), "error"),
    "too many": (lambda: Outcome((Status.OK,) * 9), "error"),
    "truths": (lambda: Outcome((False,) * 3), "error"),  # type: ignore[arg-type]
    "odd statuses": (lambda: Outcome([Status.OK, Status.OK, "OK"]), "error"),  # type: ignore[list-item]
    "no reasons": (lambda: Outcome((Status.OK,) * 3, None), "error"),  # type: ignore[arg-type]
    "odd reasons": (lambda: Outcome((Status.OK,) * 3, {"x": "many"}), "error"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_failed_transfer_answers_once(fault: str) -> None:
    act, reason = FAULTS[fault]
    async with world(Scripted(put=act), Scripted(get=act), dummy()) as it:
        ended = await it.ended(it.put([1, 2, 3]))
        assert (list(ended.kept), ended.reasons) == ([False] * 3, {reason: 3})
        await it.hold([1, 2, 3], tier=1)
        event = await it.ended(it.fetch([1, 2, 3], [10, 11, 12], tier=1))
        assert (list(event.answers), event.reasons) == ([MISSING] * 3, {reason: 3})
        await it.hold([4], tier=2)  # the others continue


async def test_put_that_answers_absent_has_failed() -> None:
    async with world(Scripted(put=lambda: Outcome.all(Status.ABSENT, 3))) as it:
        assert (await it.ended(it.put([1, 2, 3]))).reasons == {"error": 3}


class Reversing(DummyTier):
    """Changes an argument, if the argument is mutable."""

    def __init__(self, verb: str) -> None:
        super().__init__(DummyConfig(complete_index=verb == "known"))
        self._verb = verb

    def _reverse(self, verb: str, values: Any) -> None:
        if verb == self._verb:
            values.reverse()

    def known(self, keys: Sequence[OffloadKey]) -> Sequence[Knowledge]:
        self._reverse("known", keys)
        return super().known(keys)

    async def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        self._reverse("contains", keys)
        return await super().contains(keys)

    async def get(self, batch: Batch) -> Outcome:
        self._reverse("get", batch.slots)
        if self._verb == "assign":
            batch.slots = batch.slots[::-1]
        return await super().get(batch)


@pytest.mark.parametrize("verb", ["known", "contains", "get", "assign"])
async def test_tier_cannot_move_chunks_between_slots(verb: str) -> None:
    async with world(Reversing(verb)) as it:
        await it.hold([1, 2])
        event = await it.ended(it.fetch([1, 2], [11, 10]))
        found = dict(zip([11, 10], [content(1), content(2)], strict=True))
        copied = [slot for slot, answer in zip(found, event.answers, strict=True) if answer is Answer.COPIED]
        assert [it.bytes_in(slot) for slot in copied] == [found[slot] for slot in copied]
        assert list(event.answers) == [MISSING] * 2


@pytest.mark.parametrize("fault", [None, OSError("net"), ConnectionResetError("again")])
async def test_put_cannot_change_slots(fault: Exception | None) -> None:
    class Encrypting(DummyTier):
        async def put(self, batch: Batch) -> Outcome:
            for view in batch.views:
                view[:] = bytes(len(view))
            if fault is not None:
                raise fault
            return await super().put(batch)

    async with world(Encrypting(DummyConfig())) as it:
        assert list((await it.ended(it.put([1, 2]))).kept) == [False] * 2
        assert [it.bytes_in(number) for number in (1, 2)] == [content(1), content(2)]


@pytest.mark.parametrize("verb", ["known", "contains"])
@pytest.mark.parametrize(
    "act",
    [
        raises(OSError("net")),
        raises(asyncio.CancelledError()),
        raises(Panic("index out of bounds")),
        lambda: [True],
        list,
        lambda: 7,
    ],
)
async def test_failed_question_answers_once(verb: str, act: Callable[[], Any]) -> None:
    async with world(Scripted(**{verb: act}), dummy()) as it:
        event = await it.ended(it.fetch([1, 2, 3], [10, 11, 12]))
        assert (list(event.answers), event.reasons) == ([MISSING] * 3, {"error": 3})
        await it.hold([4], tier=1)


@pytest.mark.parametrize(
    "error", [TierError("no directory"), OSError("refused"), asyncio.CancelledError(), Panic("no arena")]
)
async def test_unopenable_tier_is_down(error: BaseException) -> None:
    closed: list[str] = []
    tier = Scripted(open=raises(error), aclose=lambda: closed.append("closed"))
    async with world(tier, dummy()) as it:
        ids = [it.put([1]), it.put([2])]
        with anyio.fail_after(PATIENCE_S):
            await it.executor.settled()
        for id_ in ids:
            assert (await it.ended(id_)).reasons == {"down": 1}
        assert (await it.ended(it.fetch([1], [10]))).reasons == {"down": 1}
        await it.hold([4], tier=1)
        (down,) = it.downs
        assert down.tier == 0
        assert str(error) in down.reason
    assert closed == []  # it was never opened, so there is nothing to close


@pytest.mark.parametrize(
    "error", [OSError("no"), SystemExit(1), asyncio.CancelledError(), Panic("no"), Unspeakable()]
)
async def test_failed_close_allows_open(error: BaseException) -> None:
    closed: list[str] = []
    first, second = Scripted(aclose=raises(error)), Scripted(aclose=lambda: closed.append("second"))
    async with world(first, second) as it:
        await it.hold([1])
    assert closed == ["second"]


async def test_unclosable_tier_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    class Clinging(DummyTier):
        async def aclose(self) -> None:
            await anyio.sleep_forever()

    closed: list[str] = []
    with anyio.fail_after(PATIENCE_S):
        async with world(
            Clinging(DummyConfig()), Scripted(aclose=lambda: closed.append("x")), close_s=0.05
        ) as it:
            await it.hold([1])
    assert closed == ["x"]
    assert "did not close within 0.05 s; abandoned" in caplog.text


# --- integrity -----------------------------------------------------------------------------------


Forge = Callable[[Batch, int, tuple[bytes, bytes]], object]


class Forger(DummyTier):
    """Returns the chunks in ``forged`` after ``forge`` has changed them; its third argument is the stored
    chunk 1."""

    def __init__(self, forge: Forge, forged: Sequence[int]) -> None:
        super().__init__(DummyConfig())
        self._forge = forge
        self._forged = set(keys(forged))

    async def get(self, batch: Batch) -> Outcome:
        outcome = await super().get(batch)
        for index, one in enumerate(batch.keys):
            if one in self._forged:
                self._forge(batch, index, self._chunks[key(1)])
        return outcome


def _other_trailer(batch: Batch, index: int, other: tuple[bytes, bytes]) -> None:
    batch.trailers[index] = other[1]


def _no_trailer(batch: Batch, index: int, _: object) -> None:
    batch.trailers[index] = b""


def _wrong_byte(batch: Batch, index: int, _: object) -> None:
    batch.views[index][CHUNK_BYTES - 1] ^= 1


def _other_chunk(batch: Batch, index: int, other: tuple[bytes, bytes]) -> None:
    batch.views[index][:], batch.trailers[index] = other


@pytest.mark.parametrize(
    ("forge", "reason"),
    [
        (_wrong_byte, "checksum"),
        (_other_trailer, "foreign"),
        (_other_chunk, "foreign"),
        (_no_trailer, "torn"),
    ],
)
async def test_damaged_chunk_is_discarded(forge: Forge, reason: str) -> None:
    tier = Forger(forge, [2])
    async with world(tier) as it:
        await it.hold([1, 2, 3])
        event = await it.ended(it.fetch([1, 2, 3], [10, 11, 12]))
        assert (list(event.answers), event.reasons) == ([COPIED, MISSING, COPIED], {reason: 1})
        assert (it.bytes_in(10), it.bytes_in(12)) == (content(1), content(3))
        assert tier.known(keys([1, 2, 3])) == [Knowledge.PRESENT, Knowledge.ABSENT, Knowledge.PRESENT]


class ReadsBadly(DummyTier):
    """Stores sound chunks, and flips one bit of each chunk on the way back."""

    bad_rereads = False

    async def get(self, batch: Batch) -> Outcome:
        outcome = await super().get(batch)
        for view in batch.views:
            view[random.randrange(CHUNK_BYTES)] ^= 1 << random.randrange(8)
        return outcome

    async def reread(self, batch: Batch) -> Outcome:
        return await (self.get(batch) if self.bad_rereads else super().get(batch))


async def test_sound_reread_is_a_hit(caplog: pytest.LogCaptureFixture) -> None:
    async with world(ReadsBadly(DummyConfig())) as it:
        await it.hold([1, 2])
        event = await it.ended(it.fetch([1, 2], [10, 11]))
        assert (list(event.answers), event.reasons) == ([COPIED, COPIED], {})
        assert (it.bytes_in(10), it.bytes_in(11)) == (content(1), content(2))
    assert "sound when read again, so others keep it; check this host" in caplog.text


class DiscardedByOther(ReadsBadly):
    """Another engine has detected the damage too, and discards the chunk first."""

    async def reread(self, batch: Batch) -> Outcome:
        await self.discard(batch.keys)
        return await super().reread(batch)


async def test_chunk_discarded_elsewhere_returns(caplog: pytest.LogCaptureFixture) -> None:
    tier = DiscardedByOther(DummyConfig())
    async with world(tier) as it:
        await it.hold([1])
        event = await it.ended(it.fetch([1], [10]))
        assert (list(event.answers), event.reasons) == ([MISSING], {"checksum": 1})
        await it.hold([1])
        tier.get = super(ReadsBadly, tier).get  # type: ignore[method-assign]
        assert list((await it.ended(it.fetch([1], [11]))).answers) == [COPIED]
        assert it.bytes_in(11) == content(1)
    assert "discarded meanwhile by another engine" in caplog.text
    assert "check this host" not in caplog.text


async def test_bad_reader_discards_nothing() -> None:
    tier = ReadsBadly(DummyConfig())
    tier.bad_rereads = True
    async with world(tier) as it:
        await it.hold(range(20))
        event = await it.ended(it.fetch(range(20)))
        assert (set(event.answers), event.reasons) == ({MISSING}, {"checksum": 20})
        assert set(tier.known(keys(range(20)))) == {Knowledge.PRESENT}
        for located in (False, True):
            event = await it.ended(it.fetch(range(20), located=located))
            assert (set(event.answers), event.reasons) == ({MISSING}, {})


async def test_discards_are_rationed() -> None:
    tier = Forger(_wrong_byte, range(20))
    async with world(tier) as it:
        await it.hold(range(20))
        event = await it.ended(it.fetch(range(20)))
        assert event.reasons == {"checksum": 20}
        assert tier.known(keys(range(20))).count(Knowledge.ABSENT) == 16


# --- activity --------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError("busy"), SystemExit(1), Panic("poisoned"), Unspeakable()])
async def test_failed_usage_is_asked_again(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "_USAGE_EVERY_S", 0.01)
    answers = iter([Usage(1, 9), error, "odd", Usage(2, 9)])
    last: Any = None

    def usage() -> Any:
        nonlocal last
        last = next(answers, last)
        if isinstance(last, BaseException):
            raise last
        return last

    seen: list[Usage | None] = []
    async with world(Scripted(usage=usage)) as it:
        activity = it.executor.activity[0]
        with anyio.fail_after(PATIENCE_S):
            while activity.usage != Usage(2, 9):
                seen.append(activity.usage)
                await anyio.sleep(0.001)
    assert seen[-1] is None  # an earlier result is no longer reported


class Telling(DummyTier):
    """Exposes its context to the test."""

    def __init__(self, context: list[TierContext], **settings: Any) -> None:
        super().__init__(DummyConfig(**settings))
        self._shown = context

    async def open(self, context: TierContext) -> None:
        self._shown.append(context)
        await super().open(context)


async def test_removals_are_batched() -> None:
    context: list[TierContext] = []

    def tell() -> None:
        for number in range(10, 300):
            context[0].removed([key(number)])

    room = 2 * (CHUNK_BYTES + TRAILER_BYTES)
    async with world(dummy(), Telling(context, capacity_bytes=ByteSize(room))) as it:
        await it.hold([1, 2, 3, 4], tier=1)
        await it.until(lambda: removed_of(it.events) == keys([1, 2]))
        await anyio.to_thread.run_sync(tell)
        await it.until(lambda: removed_of(it.events) == keys([1, 2, *range(10, 300)]))
        told = [event for event in it.events if isinstance(event, Removed)]
        assert {event.tier for event in told} == {1}
    context[0].removed([key(5)])  # after the end the call has no listener and no effect


async def test_odd_removals_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    context: list[TierContext] = []
    tier = Telling(context)
    odd: list[Any] = [[object()], key(1), [b""], [bytes(MAX_KEY_BYTES + 1)], [bytearray(b"key")], ["key"]]
    async with world(tier) as it:
        await it.hold([1])
        for removed in odd:
            context[0].removed(removed)
        context[0].removed([key(2)])
        await it.until(lambda: removed_of(it.events))
        assert removed_of(it.events) == [key(2)]
    assert "given to removed() are no offload keys" in caplog.text


async def test_vast_removal_concerns_the_whole_tier() -> None:
    context: list[TierContext] = []
    tier = Telling(context)
    async with world(tier) as it:
        await it.hold([1])
        context[0].removed(keys(range(MOST_REMOVED + 1)))
        await it.until(lambda: any(isinstance(event, Removed) for event in it.events))
        assert removed_of(it.events) == []


def removed_of(events: Iterable[Event]) -> list[OffloadKey]:
    return [key for event in events if isinstance(event, Removed) for key in event.keys]


# --- the end -------------------------------------------------------------------------------------


async def test_in_flight_cancelled_once() -> None:
    tier = Gated(max_concurrency=2)
    async with world(tier) as it:
        ids = [it.put([number, number + 1]) for number in range(0, 20, 2)]
        ids += [it.fetch([60 + number], [30 + number], located=True) for number in range(10)]
        await tier.until(lambda: tier.running == {"put": 1, "get": 2})
        assert ends_of(it.events) == []
    assert sorted(event.id for event in ends_of(it.events)) == ids
    for event in it.events:
        if isinstance(event, PutEnded):
            assert (list(event.kept), event.reasons) == ([False, False], {"cancelled": 2})
        elif isinstance(event, GetEnded):
            assert (list(event.answers), event.reasons) == ([MISSING], {"cancelled": 1})


# --- in a thread ---------------------------------------------------------------------------------


def executor_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvtier-executor"]


MakeHarness = Callable[..., Harness]


@pytest.fixture
def launch() -> Iterator[MakeHarness]:
    """Make executors that run in another thread or in a process."""
    made: list[Harness] = []

    def make(*tiers: AnyTier, where: str = "thread") -> Harness:
        made.append(Harness(*tiers, where=where))
        made[-1].process.start()
        return made[-1]

    yield make
    for one in made:
        assert one.process.close(0, PATIENCE_S)
    assert executor_threads() == []


@pytest.fixture(params=["thread", "process"])
def beside(request: pytest.FixtureRequest) -> str:
    """The executor's place: a thread or a process."""
    return str(request.param)


def test_early_commands_run() -> None:
    it = Harness(dummy(), where="thread")
    early = it.put([1])
    it.process.start()
    assert [it.kept(early), it.kept(it.put([2]))] == [[True], [True]]
    it.close()


def test_close_lets_puts_end(launch: MakeHarness, beside: str) -> None:
    it = launch(dummy(put_latency_s=0.1), where=beside)
    ids = [it.put([number]) for number in range(5)]
    assert it.process.close(PATIENCE_S, PATIENCE_S)  # at once: it has not started
    assert executor_threads() == []
    assert [it.kept(id_) for id_ in ids] == [[True]] * 5


def test_close_lets_reset_end(launch: MakeHarness) -> None:
    """A tier that outlives the process would pass chunks from before the reset to the next process."""
    tier = SlowReset(0.1)
    it = launch(tier)
    it.reset(1)
    assert it.process.close(PATIENCE_S, PATIENCE_S)
    assert tier.was_reset


def test_close_cancels_late_calls(launch: MakeHarness, beside: str) -> None:
    it = launch(dummy(hang_rate=1, deadline_s=600), where=beside)
    put, fetch = it.put([1]), it.fetch([1], [10])
    it.until(lambda: it.process.activity[0].puts.running, "the put")
    assert it.process.close(0.05, CLOSE_S)
    assert it.end_of(put).reasons == {"cancelled": 1}
    found = it.end_of(fetch)
    assert isinstance(found, GetEnded)
    assert list(found.answers) == [MISSING]


def test_close_is_idempotent(launch: MakeHarness, beside: str) -> None:
    it = launch(dummy(), where=beside)
    assert it.process.close(1, PATIENCE_S)
    assert it.process.close(1, PATIENCE_S)
    assert Harness(dummy(), where=beside).process.close(1, PATIENCE_S)


def test_ended_executor_fails_commands(launch: MakeHarness, beside: str) -> None:
    it = launch(dummy(), where=beside)
    assert it.process.close(1, PATIENCE_S)
    put, fetch = it.put([1, 2]), it.fetch([1], [10])
    it.reset(1)
    it.take()
    ends = [(event.id, dict(event.reasons)) for event in ends_of(it.received)]
    assert ends == [(put, {"down": 2}), (fetch, {"down": 1})]
    assert {event.tier for event in it.received if isinstance(event, TierDown)} == {0}


def test_dying_thread_answers_all() -> None:
    class Dies(Executor):
        def submit(self, commands: Any) -> None:
            super().submit(commands)
            if any(command.id == 2 for command in commands):
                raise RuntimeError("a bug")

    memory = HeapMemory(SLOTS, CHUNK_BYTES)
    thread = ExecutorThread(
        partial(Dies, [NamedTier("slow", lambda: dummy(put_latency_s=60))], IDENTITY, memory)
    )
    thread.start()
    (running,) = executor_threads()
    for id_ in range(1, 4):
        thread.submit([Put(id_, 0, keys([id_]), [id_])])
    running.join(20)
    thread.submit([Put(4, 0, keys([4]), [4])])
    puts = [event for event in thread.events if isinstance(event, PutEnded)]
    assert sorted(event.id for event in puts) == [1, 2, 3, 4]
    assert not any(any(event.kept) for event in puts)
    assert any(isinstance(event, TierDown) for event in thread.events)
    assert thread.close(1, PATIENCE_S)


def test_failed_start_raises() -> None:
    def make(_post: object) -> Executor:
        raise TierError("no such directory")

    thread = ExecutorThread(make)
    with pytest.raises(TierError, match="no such directory"):
        thread.start()
    assert thread.close(1, PATIENCE_S)
    assert executor_threads() == []


HANGING = """
import threading, time
import anyio
from functools import partial
from kvtier._core.messages import Put
from kvtier._execution.executor import Executor, ExecutorThread, NamedTier
from kvtier._identity import Identity
from kvtier.keys import pack_key
from kvtier._memory.region import HeapMemory
from kvtier_testing.dummy import DummyConfig, DummyTier

begun = threading.Event()

class Deaf(DummyTier):
    async def put(self, batch):
        print("put", flush=True)
        begun.set()
        with anyio.CancelScope(shield=True):
            await anyio.sleep_forever()

tier = NamedTier("deaf", lambda: Deaf(DummyConfig()))
thread = ExecutorThread(partial(Executor, [tier], Identity.make("m", {}), HeapMemory(4, 4096)))
thread.start()
thread.submit([Put(1, 0, [pack_key(b"k")], [1])])
begun.wait()
begin = time.monotonic()
names = [type(event).__name__ for event in thread.events]
print(thread.close(0.1), time.monotonic() - begin < 40, *names, flush=True)
"""


def test_hung_tier_delays_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", HANGING], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["put", "False", "True", "TierUp"], "")


@given(drain_s=floats(0, 100), passed_s=floats(0, 100))
def test_earlier_shutdown_sets_end(drain_s: float, passed_s: float) -> None:
    left_s, close_s = time_left(drain_s, passed_s)
    assert left_s == max(0.0, drain_s - passed_s)
    assert 0.5 <= close_s <= _executor.CLOSE_S
    if close_s > 0.5:
        assert passed_s + left_s + close_s <= drain_s + _executor.CLOSE_S + 1e-9
