"""When a breaker opens, when it lets a probe through, and when it closes."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier._core.breaker import Breaker, BreakerRules
from kvtier._core.messages import TransferHealth
from kvtier._core.states import BreakerState

GOOD, BAD, LATE, NONE = TransferHealth.GOOD, TransferHealth.BAD, TransferHealth.LATE, TransferHealth.NONE
CLOSED, HALF_OPEN, OPEN = BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN


class Driven(Breaker):
    """A breaker whose transfers end as soon as they have begun."""

    __slots__ = ("last",)

    def __init__(self, rules: BreakerRules | None = None) -> None:
        super().__init__(rules)
        self.last = 0

    def ends(self, *healths: TransferHealth, now_s: float = 0.0) -> list[str | None]:
        changes = []
        for health in healths:
            assert self.refusal(now_s) is None
            self.last += 1
            self.begin(self.last)
            changes.append(self.end(self.last, health, now_s, in_time=True))
        return changes


def opened(now_s: float = 0.0, rules: BreakerRules | None = None) -> Driven:
    breaker = Driven(rules)
    assert breaker.ends(*[BAD] * 5, now_s=now_s)[-1] == "failures"
    return breaker


def test_it_opens_when_so_many_in_a_row_have_failed() -> None:
    breaker = Driven()
    assert breaker.ends(BAD, BAD, BAD, BAD) == [None] * 4
    assert breaker.state is CLOSED
    assert breaker.ends(BAD) == ["failures"]
    assert (breaker.state, breaker.refusal(0.5)) == (OPEN, "breaker_open")


def test_it_opens_at_a_share_of_failures_once_enough_is_known() -> None:
    breaker = Driven(BreakerRules(window=8, share=0.5))
    assert breaker.ends(BAD, BAD, BAD, GOOD) == [None] * 4, "the last of them has not failed"
    assert breaker.ends(BAD) == ["failure_rate"]
    breaker = Driven(BreakerRules(window=8, share=0.5))
    assert breaker.ends(*[GOOD, GOOD, BAD] * 20) == [None] * 60


def test_it_opens_at_once_when_one_is_overdue_and_gets_no_probe_while_that_has_not_ended() -> None:
    breaker = Breaker()
    breaker.begin(1)
    assert breaker.late(1, 3.0) == "overdue"
    assert breaker.refusal(1000.0) == "unresponsive"
    assert breaker.end(1, GOOD, 1000.0, in_time=False) is None
    assert (breaker.state, breaker.refusal(1000.0)) == (OPEN, None)


def test_after_a_pause_one_probe_is_let_through_and_closes_it() -> None:
    breaker = opened(rules=BreakerRules(pause_s=2.0))
    assert breaker.refusal(1.9) == "breaker_open"
    assert breaker.refusal(2.0) is None
    breaker.begin(77)
    assert (breaker.state, breaker.refusal(2.0)) == (HALF_OPEN, "breaker_open")
    assert breaker.end(77, GOOD, 2.1, in_time=True) == "closed"
    assert (breaker.state, breaker.refusal(2.1)) == (CLOSED, None)
    assert breaker.ends(BAD, BAD, BAD, BAD, now_s=9.0) == [None] * 4, "old failures are forgotten"


def test_pauses_grow_while_probes_fail_and_not_beyond_the_longest() -> None:
    breaker = opened(rules=BreakerRules(pause_s=1.0, longest_pause_s=6.0))
    now_s, pauses = 0.0, []
    for _ in range(5):
        pause_s = next(step / 4 for step in range(1000) if breaker.refusal(now_s + step / 4) is None)
        now_s += pause_s
        pauses.append(pause_s)
        assert breaker.ends(BAD, now_s=now_s) == ["probe"]
    assert pauses == [1.0, 2.0, 4.0, 6.0, 6.0]


def test_a_relapse_soon_after_a_recovery_goes_on_with_longer_pauses() -> None:
    breaker = opened()
    assert breaker.ends(GOOD, now_s=1.0) == ["closed"]
    assert breaker.ends(*[BAD] * 5, now_s=4.0)[-1] == "failures"
    assert breaker.refusal(5.9) == "breaker_open"
    assert breaker.refusal(6.0) is None


def test_after_a_quiet_time_pauses_begin_anew() -> None:
    breaker = opened()
    assert breaker.ends(BAD, now_s=1.0) == ["probe"]
    assert breaker.ends(GOOD, now_s=3.0) == ["closed"]
    assert breaker.ends(*[BAD] * 5, now_s=100.0)[-1] == "failures"
    assert breaker.refusal(101.0) is None


@dataclass
class Begun:
    id: int
    begun_s: float
    is_late: bool = False


class BreakerMachine(RuleBasedStateMachine):
    """Transfers begin when they may, and end in any way, in any order, at any time."""

    @initialize(failures=st.integers(1, 4), window=st.integers(2, 8), chance=st.floats(0, 0.99))
    def start(self, failures: int, window: int, chance: float) -> None:
        rules = BreakerRules(failures=failures, window=window, pause_s=1.0, longest_pause_s=8.0)
        self.breaker = Breaker(rules, lambda: chance)
        self.now_s = 0.0
        self.under_way: list[Begun] = []
        self.last = 0
        self.opened_s: float | None = None

    @rule(step_s=st.sampled_from([0.0, 0.1, 1.0, 10.0]))
    def time_passes(self, step_s: float) -> None:
        self.now_s += step_s

    @precondition(lambda self: self.breaker.refusal(self.now_s) is None)
    @rule()
    def begin(self) -> None:
        is_probe = self.breaker.state is OPEN
        self.last += 1
        self.under_way.append(Begun(self.last, self.now_s))
        self.breaker.begin(self.last)
        if is_probe:
            assert self.opened_s is not None
            assert self.now_s >= self.opened_s + 0.75, "not before the pause is over"
            assert self.breaker.refusal(self.now_s), "one at a time"

    @precondition(lambda self: any(not one.is_late for one in self.under_way))
    @rule(pick=st.integers(0, 99))
    def deadline(self, pick: int) -> None:
        running = [one for one in self.under_way if not one.is_late]
        one = running[pick % len(running)]
        one.is_late = True
        self._note(self.breaker.late(one.id, self.now_s))
        assert self.breaker.refusal(self.now_s + 1e6) == "unresponsive"

    @precondition(lambda self: self.under_way)
    @rule(pick=st.integers(0, 99), health=st.sampled_from(TransferHealth))
    def end(self, pick: int, health: TransferHealth) -> None:
        one = self.under_way.pop(pick % len(self.under_way))
        before = self.breaker.state
        change = self.breaker.end(one.id, health, self.now_s, in_time=not one.is_late)
        if change == "closed":
            assert before is HALF_OPEN
            assert health is GOOD, "only a probe that was answered closes it"
        self._note(change)

    def _note(self, change: str | None) -> None:
        if change not in (None, "closed"):
            self.opened_s = self.now_s

    @invariant()
    def is_half_open_only_for_a_probe_under_way(self) -> None:
        if hasattr(self, "breaker"):
            running = {one.id for one in self.under_way if not one.is_late}
            assert (self.breaker.probe in running) is (self.breaker.state is HALF_OPEN)
            assert self.breaker.overdue == sum(one.is_late for one in self.under_way)

    def teardown(self) -> None:
        """Whatever has happened: once the tier answers again it is used again, within the longest pause."""
        if not hasattr(self, "breaker"):
            return
        for one in self.under_way:
            self.breaker.end(one.id, NONE, self.now_s, in_time=not one.is_late)
        self.now_s += 1.25 * 8.0
        assert self.breaker.refusal(self.now_s) is None
        self.breaker.begin(-1)
        self.breaker.end(-1, GOOD, self.now_s, in_time=True)
        assert self.breaker.is_closed


TestAnySequence = BreakerMachine.TestCase
