"""Breakers and back-pressure: tiers that fail, are late, are slow, or recover."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier._core.messages import (
    Answer,
    Command,
    Get,
    GetEnded,
    Put,
    PutEnded,
    TierDown,
    TierUp,
    TransferHealth,
)
from kvtier._core.requests import Request
from kvtier._core.states import BreakerState
from kvtier._core.tiers.tier_status import TierStatus
from kvtier.keys import OffloadKey
from tests.unit.core import world
from tests.unit.core.world import BAD, GOOD, LATE, keys, taken


class World:
    """A core and its clock, whose stores have their own keys."""

    def __init__(self, tiers: int = 1, slots: int = 256, put_backlog: float = 1.0) -> None:
        self.statuses = [TierStatus(f"t{index}", deadline_s=4.0) for index in range(tiers)]
        self.core = world.make(slots, self.statuses, budget=0.25, put_backlog=put_backlog)
        self.now_s = 0.0
        self.stores = 0

    def store(self, count: int = 1) -> list[Put]:
        """Store new chunks; return the puts that follow."""
        self.stores += 1
        return world.puts(self.core, keys(f"store{self.stores}", count), self.now_s)

    def take(self) -> list[Command]:
        return taken(self.core)

    def end(self, put: Put, health: TransferHealth, seconds: float = 0.1, retry: str = "") -> None:
        kept = [health is GOOD] * len(put.keys)
        self.core.on_event(PutEnded(put.id, kept, {}, seconds, health, retry), self.now_s)

    def puts_end(self, *healths: TransferHealth) -> None:
        """Make as many puts, one after the other, and end them."""
        for health in healths:
            (put,) = self.store()
            self.end(put, health)

    def ask(self, wanted: Sequence[OffloadKey], request: Request | None = None) -> list[Get]:
        return world.step(self.core, request or Request(), wanted, self.now_s)

    def get_ended(
        self, fetch: Get, health: TransferHealth, answer: Answer, seconds: float = 0.1, lookup_s: float = 0.0
    ) -> None:
        copied = answer if len(fetch.slots) == len(fetch.keys) else Answer.LOCATED
        event = GetEnded(fetch.id, [copied] * len(fetch.keys), {}, seconds, health, lookup_s=lookup_s)
        self.core.on_event(event, self.now_s)

    def gets_fail(self) -> None:
        """Ask the first tier until it is asked no more."""
        while self.statuses[0].gets.is_closed:
            self.stores += 1
            fetch, *_ = self.ask(keys(f"lost{self.stores}"))
            self.get_ended(fetch, BAD, Answer.MISSING)
            self.take()

    def notices(self) -> list[str]:
        return [f"{notice.subject}: {notice.text}" for notice in self.core.take_notices()]


def test_failing_puts_close_puts() -> None:
    it = World()
    it.puts_end(*[BAD] * 5)
    assert it.statuses[0].puts.state is BreakerState.OPEN
    assert it.store(3) == []
    assert len(it.ask(keys("x"))) == 1, "gets go on"
    it.now_s = 1.0
    (probe,) = it.store(3)
    assert len(probe.keys) == 1, "it may hang: the probe pins one slot"
    assert it.store(2) == []
    it.end(probe, GOOD)
    assert [len(put.keys) for put in it.store(4)] == [4]
    counts = it.core.take_counts()
    assert counts["put_dropped", "t0", "breaker_open"] == 3 + 2 + 2
    assert counts["breaker_opened", "t0", "put", "failures"] == 1
    assert counts["breaker_closed", "t0", "put"] == 1


def test_failing_gets_close_gets() -> None:
    it = World(tiers=2)
    for number in range(5):
        fetch, *_ = it.ask(keys(f"a{number}"))
        it.get_ended(fetch, BAD, Answer.MISSING)
        (second,) = (command for command in it.take() if isinstance(command, Get))
        it.get_ended(second, GOOD, Answer.MISSING)
    assert it.statuses[0].gets.state is BreakerState.OPEN
    assert [fetch.tier for fetch in it.ask(keys("b"))] == [1], "the next tier is asked at once"
    assert [put.tier for put in it.store()] == [0, 1], "puts go on"
    it.now_s = 1.0
    probe, *_ = it.ask(keys("c"))
    assert probe.tier == 0
    it.get_ended(probe, GOOD, Answer.COPIED)
    assert [fetch.tier for fetch in it.ask(keys("d"))] == [0]
    counts = it.core.take_counts()
    assert counts["skipped", "t0", "breaker_open"] == 1
    assert counts["breaker_opened", "t0", "get", "failures"] == 1
    assert counts["breaker_closed", "t0", "get"] == 1


def test_located_chunks_move_on() -> None:
    it = World(tiers=2, slots=64)
    for put in it.store(64):
        it.end(put, GOOD)
    request, wanted = Request(), keys("a", 2)
    (fetch,) = it.ask(wanted, request)
    it.gets_fail()
    it.core.take_counts()
    it.core.on_event(GetEnded(fetch.id, [Answer.LOCATED] * 2), 0.0)
    found = [command for command in it.take() if isinstance(command, Get)]
    assert [(one.tier, list(one.keys), one.located) for one in found] == [(1, wanted, False)]
    assert it.core.take_counts()["skipped", "t0", "breaker_open"] == 2


def test_nearly_late_lookups_open() -> None:
    it = World()
    for number in range(5):
        (fetch,) = it.ask(keys(f"a{number}"))
        it.get_ended(fetch, GOOD, Answer.MISSING, seconds=0.0, lookup_s=3.6)
    gets = it.statuses[0].gets
    assert (gets.state, it.statuses[0].is_healthy) == (BreakerState.OPEN, False)
    it.now_s = 2.0
    (probe,) = it.ask(keys("b"))
    it.get_ended(probe, GOOD, Answer.MISSING, seconds=0.0, lookup_s=3.6)
    assert gets.state is BreakerState.OPEN
    it.now_s = 10.0
    (probe,) = it.ask(keys("c"))
    it.get_ended(probe, GOOD, Answer.MISSING, seconds=0.0, lookup_s=0.1)
    assert it.statuses[0].works, "in time it answered, that nothing is there"
    assert it.core.take_counts()["get_seconds", "t0"] == 0.0, "it has copied nothing"


def test_nearly_late_gets_fail() -> None:
    it = World()
    for number in range(5):
        (fetch,) = it.ask(keys(f"a{number}"))
        it.get_ended(fetch, GOOD, Answer.COPIED, seconds=3.1)
    assert it.statuses[0].gets.state is BreakerState.OPEN
    it = World()
    for number in range(50):
        (fetch,) = it.ask(keys(f"a{number}"))
        it.get_ended(fetch, GOOD, Answer.COPIED, seconds=1.9, lookup_s=1.0)
        (put,) = it.store()
        it.end(put, GOOD, seconds=3.9)
    assert it.statuses[0].works


def test_reported_lateness_counts() -> None:
    """An engine that sleeps settles nothing; the tier's own clock has cut the put off."""
    it = World()
    (put,) = it.store()
    it.end(put, LATE)
    assert it.statuses[0].puts.state is BreakerState.OPEN
    counts = it.core.take_counts()
    assert counts["breaker_opened", "t0", "put", "overdue"] == 1
    assert counts["overdue", "t0", "put"] == 1


def test_health_follows_real_calls() -> None:
    it = World()
    (status,) = it.statuses
    assert status.is_healthy is None
    it.puts_end(GOOD)
    assert status.is_healthy is True
    (fetch,) = it.ask(keys("a"))
    it.get_ended(fetch, BAD, Answer.MISSING)
    assert status.is_healthy is False
    (fetch,) = it.ask(keys("b"))
    it.get_ended(fetch, TransferHealth.NONE, Answer.MISSING)
    assert status.is_healthy is False, "the index alone says nothing"
    (fetch,) = it.ask(keys("c"))
    it.get_ended(fetch, GOOD, Answer.COPIED)
    assert status.is_healthy is True
    it.core.on_event(TierDown(0, "gone"), 0.0)
    assert status.is_healthy is False


def test_changes_are_told_once() -> None:
    it = World()
    it.puts_end(*[BAD] * 5)
    assert it.notices() == ["tier t0: the breaker of its puts opens: several in a row have failed"]
    it.now_s = 1.0
    it.puts_end(BAD)
    assert it.notices() == []
    it.now_s = 10.0
    it.puts_end(GOOD)
    assert it.notices() == ["tier t0: the breaker of its puts closes: a probe succeeded"]


def test_log_says_that_a_tier_is_up_again() -> None:
    """Also after the tier process has ended, when no supervisor knows that the tier was down."""
    it = World()
    it.core.on_event(TierUp(0, 0), 0.0)
    assert it.notices() == []
    it.core.on_event(TierDown(0, "the tier process ended"), 0.0)
    for _ in range(2):
        it.core.on_event(TierUp(0, 0), 0.0)
    assert it.notices() == ["tier t0: it is up again"]


# --- back-pressure ---------------------------------------------------------------------------------


def test_hopeless_puts_are_dropped() -> None:
    it = World()
    (put,) = it.store(10)
    it.end(put, GOOD, seconds=1.0)  # 0.1 s a chunk: in half a deadline 20 of them
    (put,) = it.store(30)
    assert len(put.keys) == 20
    assert list(put.keys) == keys("store2", 30)[:20], "the front of the prompt is put"
    assert it.core.take_counts()["put_dropped", "t0", "back_pressure"] == 10
    assert [len(more.keys) for _ in range(5) for more in it.store(20)] == [20, 20, 20], "four at once"
