"""Deadlines, second attempts, and tiers that fail to open or to reset and recover, in virtual time."""

from __future__ import annotations

import asyncio
import logging
import selectors
from collections.abc import Sequence
from functools import partial
from typing import Any

import anyio
import pytest

from kvtier._core.messages import Answer, Get, TierDown, TierUp, Touch, TransferHealth
from kvtier._execution.executor import NamedTier
from kvtier.errors import TierError
from kvtier.keys import OffloadKey
from kvtier.tiers import Outcome, Status, require_answers, until_done
from kvtier_testing.dummy import DummyConfig
from tests.unit.isolation.conftest import content, key
from tests.unit.tiers import world as worlds
from tests.unit.tiers.world import Act, Scripted, now_s, raises

world = partial(worlds.world, chance=lambda: 0.5)


class JumpingSelector(selectors.DefaultSelector):
    """Does not wait for timers: the clock jumps to them."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is not None and timeout > 0:
            self.now_s += timeout
        return super().select(timeout if timeout is None else 0)


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop that skips waiting time. No code of these tests runs in a thread."""

    def __init__(self) -> None:
        self._jumping = JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"loop_factory": JumpingLoop}


def takes(seconds: float, result: Any = None) -> Act:
    async def wait() -> Any:
        await anyio.sleep(seconds)
        return result

    return wait


hangs = takes(1e9)


def returns(*statuses: Status, **reasons: int) -> Act:
    return lambda: Outcome(statuses, reasons)


# --- deadlines -------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["put", "get", "contains"])
async def test_hung_call_is_cut_off(verb: str) -> None:
    tier = Scripted(DummyConfig(deadline_s=3.0, complete_index=False), **{verb: [hangs]})
    async with world(tier) as it:
        event = await it.ended(it.put([1]) if verb == "put" else it.fetch([1], located=verb == "get"))
        assert now_s() == pytest.approx(3.0, abs=0.02)
        assert (event.health, event.reasons) == (TransferHealth.LATE, {"timeout": 1})
        assert (await it.ended(it.put([1]))).kept == [True]
        assert (await it.ended(it.fetch([1]))).answers == [Answer.COPIED]


async def test_slots_wait_for_unstoppable() -> None:
    async def stubborn() -> Outcome:
        return await until_done(asyncio.ensure_future(takes(10.0, Outcome((Status.OK,)))()))

    tier = Scripted(DummyConfig(deadline_s=2.0), put=[stubborn])
    async with world(tier) as it:
        event = await it.ended(it.put([1]))
        assert now_s() == pytest.approx(10.0, abs=0.02)
        assert (event.kept, event.health) == ([False], TransferHealth.LATE)


async def test_queued_call_never_begins() -> None:
    tier = Scripted(DummyConfig(deadline_s=2.0, max_concurrency=2), put=[hangs] * 9)
    async with world(tier) as it:
        first, second = it.put([1]), it.put([2])
        late = await it.ended(second)
        assert (late.health, late.reasons) == (TransferHealth.NONE, {"late": 1})
        assert (await it.ended(first)).health is TransferHealth.LATE
        assert len(tier.of("put")) == 1
        assert now_s() == pytest.approx(2.0, abs=0.02)


async def test_slow_open_delays_nothing() -> None:
    tier = Scripted(DummyConfig(deadline_s=2.0), open=[takes(10.0)])
    async with world(tier) as it:
        assert (await it.ended(it.put([1]))).reasons == {"late": 1}
        assert now_s() == pytest.approx(2.0, abs=0.02)
        assert it.conditions() == [(2.0, TierDown)]
        with anyio.fail_after(0.001):
            await it.executor.settled()
        assert (await it.ended(it.put([1]))).reasons == {"down": 1}
        await anyio.sleep(9.0)
        assert it.conditions()[1:] == [(10.0, TierUp)]
        assert (await it.ended(it.put([1]))).kept == [True]
        assert tier.of("open") == [0.0], "it was not opened twice"


async def test_hung_touch_spares_others() -> None:
    tier = Scripted(DummyConfig(deadline_s=2.0), touch=[hangs])
    async with world(tier) as it:
        it.executor.submit([Touch(0, [key(1)])])
        await anyio.sleep(5.0)
        it.executor.submit([Touch(0, [key(2)])])
        await anyio.sleep(5.0)
        assert tier.of("touch") == [0.0, 5.0]


async def test_early_reset_touches_nothing() -> None:
    tier = Scripted(DummyConfig(deadline_s=2.0), open=[takes(1.0)])
    async with world(tier) as it:
        it.executor.submit([Touch(0, [key(1)])])
        await anyio.sleep(0.5)
        it.reset()
        await anyio.sleep(1.0)
        it.executor.submit([Touch(0, [key(2)])])
        await anyio.sleep(0.1)
        assert tier.of("open") == [0.0]
        assert tier.of("touch") == [1.5]
        assert tier.batches == [[key(1), key(2)]]


async def test_location_hint_reaches_tier() -> None:
    asked: list[tuple[Sequence[OffloadKey], Sequence[str]]] = []

    class Asking(Scripted):
        async def contains_at(self, keys: Sequence[OffloadKey], addresses: Sequence[str]) -> Any:
            asked.append((keys, addresses))
            return await super().contains_at(keys, addresses)

    tier = Asking(contains=[raises(ConnectionResetError()), None])
    async with world(tier) as it:
        end = await it.ended(it.submit(Get, 0, [key(1)], [], False, ("10.0.0.1:18570",)))
        assert (list(end.answers), end.retry) == ([Answer.MISSING], "helped")
    assert asked == 2 * [((key(1),), ("10.0.0.1:18570",))], "in the second attempt, too"
    assert len(tier.of("contains")) == 2


# --- second attempts -------------------------------------------------------------------------------

TRANSIENT: dict[str, Act] = {
    "a lost connection": raises(ConnectionResetError()),
    "a time-out of the backend": raises(TimeoutError()),
    "said so": returns(Status.FAILED, Status.FAILED, connection=2),
    "a word of its own": returns(Status.FAILED, Status.FAILED, busy=2),
}


@pytest.mark.parametrize("fault", TRANSIENT)
@pytest.mark.parametrize("verb", ["put", "get"])
async def test_passing_failure_is_retried(verb: str, fault: str) -> None:
    tier = Scripted(**{verb: [TRANSIENT[fault]]})
    async with world(tier) as it:
        if verb == "put":
            event = await it.ended(it.put([1, 2]))
            assert event.kept == [True, True]
        else:
            await it.ended(it.put([1, 2]))
            tier.calls.clear()
            event = await it.ended(it.fetch([1, 2]))
            assert event.answers == [Answer.COPIED] * 2
            assert bytes(it.memory.view(31)) == content(1)
        assert (event.retry, event.health, event.reasons) == ("helped", TransferHealth.GOOD, {})
        first_s, second_s = tier.of(verb)
        assert 0.025 <= second_s - first_s <= 0.075


async def test_lost_connection_repeats_lookup() -> None:
    tier = Scripted(contains=[raises(ConnectionResetError())])
    async with world(tier) as it:
        await it.ended(it.put([1]))
        event = await it.ended(it.fetch([1]))
        assert (event.answers, event.retry) == ([Answer.COPIED], "helped")
    tier = Scripted(contains=[raises(ConnectionResetError())] * 2)
    async with world(tier) as it:
        event = await it.ended(it.fetch([1]))
        assert (event.retry, event.health, event.reasons) == ("failed", TransferHealth.BAD, {"connection": 1})


def answers_none(reason: str) -> Act:
    return lambda: require_answers({reason: 1}, 1)


@pytest.mark.parametrize("reason", ["timeout", "busy", "sad"])
async def test_unanswered_lookup_has_reason(reason: str) -> None:
    tier = Scripted(contains=[answers_none(reason)])
    async with world(tier) as it:
        event = await it.ended(it.fetch([1]))
        if reason == "sad":  # nothing to wait for
            assert (event.retry, event.health, event.reasons) == ("", TransferHealth.BAD, {"sad": 1})
        else:
            assert (event.retry, event.health, event.reasons) == ("helped", TransferHealth.GOOD, {})
    async with world(Scripted(contains=[answers_none("undeclared")])) as it:
        assert (await it.ended(it.fetch([1]))).reasons == {"error": 1}


async def test_lookup_time_is_separate() -> None:
    async def fails() -> None:
        await anyio.sleep(1.0)
        raise ConnectionResetError

    tier = Scripted(contains=[fails, takes(2.0, [True])], get=[takes(0.5, Outcome((Status.OK,)))])
    async with world(tier) as it:
        event = await it.ended(it.fetch([1]))
    assert (event.lookup_s, event.seconds) == (pytest.approx(3.0), pytest.approx(0.5))


def test_half_answer_is_accepted() -> None:
    require_answers({}, 0)
    require_answers({"busy": 1, "sad": 1}, 4)
    with pytest.raises(TierError, match="3 of 5 lookups failed: sad"):
        require_answers({"busy": 1, "sad": 2}, 5)


@pytest.mark.parametrize(
    "act",
    [
        raises(OSError("disk")),
        raises(TierError("no")),
        returns(Status.FAILED, Status.FAILED, sad=2),
        returns(Status.REFUSED, Status.REFUSED, full=2),
        returns(Status.FAILED, Status.FAILED, busy=1, sad=1),
    ],
)
async def test_hopeless_is_not_retried(act: Act) -> None:
    tier = Scripted(put=[act])
    async with world(tier) as it:
        event = await it.ended(it.put([1, 2]))
        assert (event.kept, event.retry) == ([False, False], "")
        assert len(tier.of("put")) == 1


async def test_only_failed_chunks_retry() -> None:
    outcome = returns(Status.OK, Status.FAILED, Status.REFUSED, Status.FAILED, busy=2, full=1)
    tier = Scripted(put=[outcome])
    async with world(tier) as it:
        event = await it.ended(it.put([1, 2, 3, 4]))
        assert tier.batches == [[key(1), key(2), key(3), key(4)], [key(2), key(4)]]
        assert event.kept == [True, True, False, True]
        assert event.reasons == {"full": 1}


async def test_no_time_no_retry() -> None:
    tier = Scripted(
        DummyConfig(deadline_s=2.0, complete_index=False),
        get=[takes(1.2, Outcome((Status.FAILED,), {"connection": 1}))],
    )
    async with world(tier) as it:
        event = await it.ended(it.fetch([1], located=True))
        assert (event.retry, event.seconds) == ("no_time", pytest.approx(1.2))
        assert len(tier.of("get")) == 1


async def test_outage_has_few_retries() -> None:
    tier = Scripted(put=[raises(ConnectionResetError())] * 1000)
    async with world(tier) as it:
        events = [await it.ended(it.put([1])) for _ in range(200)]
        assert 200 + 20 <= len(tier.of("put")) <= 200 + 21
        assert {event.retry for event in events} == {"failed", "no_budget"}


# --- a tier's health from its transfers ------------------------------------------------------------


@pytest.mark.parametrize(
    ("act", "health"),
    [
        (returns(Status.OK, Status.OK, Status.FAILED, sad=1), TransferHealth.GOOD),
        (returns(Status.OK, Status.FAILED, Status.FAILED, sad=2), TransferHealth.BAD),
        (returns(Status.REFUSED, Status.REFUSED, Status.REFUSED, full=3), TransferHealth.GOOD),
        (returns(Status.ABSENT, Status.ABSENT, Status.ABSENT), TransferHealth.GOOD),
        (returns(Status.CORRUPT, Status.OK, Status.OK, checksum=1), TransferHealth.GOOD),
        (returns(Status.CORRUPT, Status.CORRUPT, Status.CORRUPT, checksum=3), TransferHealth.BAD),
        (raises(OSError("disk")), TransferHealth.BAD),
    ],
)
async def test_majority_decides_outcome(act: Act, health: TransferHealth) -> None:
    async with world(Scripted(get=[act])) as it:
        assert (await it.ended(it.fetch([1, 2, 3], located=True))).health is health


async def test_index_answers_say_nothing() -> None:
    async with world(Scripted(DummyConfig(complete_index=True))) as it:
        assert (await it.ended(it.fetch([1]))).health is TransferHealth.NONE
    async with world(Scripted(DummyConfig(complete_index=False))) as it:
        assert (await it.ended(it.fetch([1]))).health is TransferHealth.GOOD


# --- a tier that does not open, or does not reset --------------------------------------------------


async def test_failed_open_is_retried() -> None:
    tier = Scripted(open=[raises(ConnectionRefusedError())] * 4)
    async with world(tier) as it:
        await anyio.sleep(5.0)
        assert (await it.ended(it.put([1]))).reasons == {"down": 1}
        await anyio.sleep(20.0)
        assert tier.of("open") == pytest.approx([0.0, 1.0, 3.0, 7.0, 15.0])
        assert it.conditions() == [(0.0, TierDown), (pytest.approx(15.0), TierUp)]
        assert (await it.ended(it.put([1]))).kept == [True]
    assert len(tier.of("aclose")) == 1


async def test_each_open_has_own_object() -> None:
    first = Scripted(open=[raises(ConnectionRefusedError())])
    made = [first, Scripted(open=[raises(ConnectionRefusedError())]), Scripted()]
    async with world(NamedTier("tier", lambda: made.pop(0))) as it:
        await anyio.sleep(10.0)
        assert made == []
        assert len(first.of("open")) == 1
        assert (await it.ended(it.put([1]))).kept == [True]


async def test_endless_open_is_retried() -> None:
    tier = Scripted(open=[hangs])
    async with world(tier) as it:
        await anyio.sleep(70.0)
        assert tier.of("open") == pytest.approx([0.0, 61.0])
        assert it.conditions() == [(5.0, TierDown), (pytest.approx(61.0), TierUp)]


async def test_missed_reset_precedes_use() -> None:
    tier = Scripted(open=[raises(ConnectionRefusedError())] * 2, reset=[raises(OSError("no"))])
    async with world(tier) as it:
        await anyio.sleep(0.5)
        it.reset(1)
        it.reset(2)
        with anyio.fail_after(0.001):
            await it.executor.settled()
            await it.executor.drained()
        await anyio.sleep(20.0)
        verbs = [verb for verb, _ in tier.calls]
        assert verbs == [*["open"] * 3, "reset", "aclose", "open", "reset"], "one reset is enough for both"
        assert [kind for _, kind in it.conditions()] == [TierDown, TierUp]
        assert it.conditions()[1][0] >= tier.of("reset")[-1]
        assert (await it.ended(it.put([1]))).kept == [True]


async def test_failed_reset_opens_new_object() -> None:
    """Only a new object finds another primary, or reads new credentials."""
    first = Scripted(reset=[raises(OSError("a replica"))] * 1000)
    made = [first, Scripted(reset=[raises(OSError("a replica"))]), Scripted()]
    async with world(NamedTier("tier", lambda: made.pop(0))) as it:
        await it.ended(it.put([1]))
        it.reset()
        await anyio.sleep(20.0)
        assert made == []
        assert len(first.of("reset")) == len(first.of("aclose")) == 1
        assert [kind for _, kind in it.conditions()] == [TierUp, TierDown, TierUp]
        assert (await it.ended(it.put([2]))).kept == [True]


async def test_endless_reset_delays_nothing() -> None:
    tier = Scripted(DummyConfig(deadline_s=2.0), reset=[takes(30.0)])
    async with world(tier) as it:
        await it.ended(it.put([1]))
        it.reset()
        before_s = now_s()
        await it.executor.settled()
        assert now_s() - before_s == pytest.approx(2.0, abs=0.02)
        assert (await it.ended(it.fetch([1]))).reasons == {"down": 1}
        await anyio.sleep(30.0)
        assert [kind for _, kind in it.conditions()] == [TierUp, TierDown, TierUp]
        assert tier.of("reset") == [pytest.approx(before_s)], "it was let go on"


async def test_outage_spares_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        tier = Scripted(put=[raises(OSError("disk"))] * 1000)
        async with world(tier) as it:
            for _ in range(200):
                await it.ended(it.put([1]))
                await anyio.sleep(0.5)
    lines = [record.message for record in caplog.records]
    assert 2 <= len(lines) <= 4
    assert "times since the line before" in lines[-1]


async def test_own_reasons_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    refused = Outcome((Status.REFUSED,) * 2, {"sad": 2})
    async with world(Scripted(put=[takes(0.0, refused)] * 3, get=[takes(0.0, refused)])) as it:
        for _ in range(3):
            await it.ended(it.put([1, 2]))
        await it.ended(it.fetch([1, 2], located=True))
    assert [record.message for record in caplog.records] == [
        "tier tier0: put of 2 chunks failed: never (sad)",
        "tier tier0: get of 2 chunks failed: never (sad)",
    ]
