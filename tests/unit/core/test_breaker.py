"""When a breaker opens, when it lets a probe through, and when it closes."""

from __future__ import annotations

import pytest

from kvtier._core.messages import TransferHealth
from kvtier._core.states import BreakerState
from kvtier._core.tiers.breaker import Breaker

GOOD, BAD, LATE, NONE = TransferHealth.GOOD, TransferHealth.BAD, TransferHealth.LATE, TransferHealth.NONE
CLOSED, HALF_OPEN, OPEN = BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN


class Driven(Breaker):
    """A breaker whose transfers end as soon as they have begun."""

    __slots__ = ("last",)

    def __init__(self, failures: int = 5, pause_s: float = 1.0) -> None:
        super().__init__(failures, pause_s)
        self.last = 0

    def ends(self, *healths: TransferHealth, now_s: float = 0.0) -> list[str | None]:
        changes = []
        for health in healths:
            assert self.refusal(now_s) is None
            self.last += 1
            self.note_start(self.last)
            changes.append(self.note_end(self.last, health, now_s, in_time=True))
        return changes


def opened(pause_s: float = 1.0) -> Driven:
    breaker = Driven(pause_s=pause_s)
    assert breaker.ends(*[BAD] * 5)[-1] == "failures"
    return breaker


def test_opens_after_failures_in_a_row() -> None:
    breaker = Driven()
    assert breaker.ends(BAD, BAD, BAD, BAD) == [None] * 4
    assert breaker.state is CLOSED
    assert breaker.ends(BAD) == ["failures"]
    assert (breaker.state, breaker.refusal(0.5)) == (OPEN, "breaker_open")


def test_opens_at_failure_share() -> None:
    breaker = Driven(failures=10)
    assert breaker.ends(*[BAD] * 9, GOOD) == [None] * 10, "the last of them has not failed"
    assert breaker.ends(BAD) == ["failure_rate"]
    breaker = Driven()
    assert breaker.ends(*[GOOD, GOOD, BAD] * 20) == [None] * 60


def test_overdue_call_opens() -> None:
    breaker = Breaker()
    breaker.note_start(1)
    assert breaker.note_late(1, 3.0) == "overdue"
    assert breaker.refusal(1000.0) == "unresponsive"
    assert breaker.note_end(1, GOOD, 1000.0, in_time=False) is None
    assert (breaker.state, breaker.refusal(1000.0)) == (OPEN, None)


def test_successful_probe_closes() -> None:
    breaker = opened(pause_s=2.0)
    assert breaker.refusal(1.9) == "breaker_open"
    assert breaker.refusal(2.0) is None
    breaker.note_start(77)
    assert (breaker.state, breaker.refusal(2.0)) == (HALF_OPEN, "breaker_open")
    assert breaker.note_end(77, GOOD, 2.1, in_time=True) == "closed"
    assert (breaker.state, breaker.refusal(2.1)) == (CLOSED, None)
    assert breaker.ends(BAD, BAD, BAD, BAD, now_s=9.0) == [None] * 4, "old failures are forgotten"


def test_pauses_grow_to_the_longest() -> None:
    breaker = opened()
    now_s, pauses = 0.0, []
    for _ in range(8):
        pause_s = next(step / 4 for step in range(1000) if breaker.refusal(now_s + step / 4) is None)
        now_s += pause_s
        pauses.append(pause_s)
        assert breaker.ends(BAD, now_s=now_s) == ["probe"]
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]


def test_early_relapse_keeps_pause() -> None:
    breaker = opened()
    assert breaker.ends(GOOD, now_s=1.0) == ["closed"]
    assert breaker.ends(*[BAD] * 5, now_s=4.0)[-1] == "failures"
    assert breaker.refusal(5.9) == "breaker_open"
    assert breaker.refusal(6.0) is None


def test_quiet_time_resets_pause() -> None:
    breaker = opened()
    assert breaker.ends(BAD, now_s=1.0) == ["probe"]
    assert breaker.ends(GOOD, now_s=3.0) == ["closed"]
    assert breaker.ends(*[BAD] * 5, now_s=100.0)[-1] == "failures"
    assert breaker.refusal(101.0) is None


def test_empty_probe_is_repeated() -> None:
    breaker = opened()
    assert breaker.ends(NONE, now_s=1.0) == [None]
    assert (breaker.state, breaker.refusal(1.0)) == (OPEN, None)
    assert breaker.ends(GOOD, now_s=1.0) == ["closed"]


@pytest.mark.parametrize("health", [GOOD, BAD])
def test_earlier_calls_do_not_count(health: TransferHealth) -> None:
    breaker = Driven()
    breaker.note_start(100)
    breaker.note_start(101)
    breaker.ends(*[BAD] * 5)
    assert breaker.note_end(100, health, 0.1, in_time=True) is None
    breaker.note_start(200)
    assert breaker.note_end(101, health, 1.0, in_time=True) is None
    assert breaker.state is HALF_OPEN
