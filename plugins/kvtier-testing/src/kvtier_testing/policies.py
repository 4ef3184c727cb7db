"""The contract of an eviction policy as tests: subclass ``PolicyConformance`` and run it with pytest.

class TestSecondChance(PolicyConformance):
    policy = SecondChance

"""

from __future__ import annotations

import math
import time
import tracemalloc
from typing import ClassVar

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtier._plugins import POLICIES, installed, load
from kvtier.keys import OffloadKey, pack_key
from kvtier.policies import EvictionPolicy, Run
from kvtier_testing.limits import LimitedSuite

_VERBS = ("resize", "add", "add_run", "pin", "evict", "clear")
_FEW, _MANY = 4_000, 64_000
_MOST_TIMES_AS_LONG = 8  # a call that visits all candidates takes about 16 times as long
_ATTEMPTS = 10
_NUMBERS = st.lists(st.integers(0, 23), min_size=1, max_size=12, unique=True)
_HOPELESS = 2  # more attempts are made if even the best one took twice the limit


def keys(first: int, count: int) -> list[OffloadKey]:
    """Return offload keys, distinct for distinct numbers."""
    return [pack_key(number.to_bytes(8, "big")) for number in range(first, first + count)]


class PolicyConformance(LimitedSuite):
    """Tests of the contract of ``EvictionPolicy``. A subclass sets ``policy``.

    Attributes:
        policy: the class under test. It is called without arguments, followed by ``resize``.
        capacity: number of slots in most tests.
        remembered_bytes: memory that the policy may use per slot, for its history of evicted chunks.
        patience_s: longest time for a single call, in seconds.
        limit_s: longest time for a test, in seconds.
    """

    policy: ClassVar[type[EvictionPolicy]]
    capacity: ClassVar[int] = 64
    remembered_bytes: ClassVar[int] = 1000

    def make(self, capacity: int | None = None) -> EvictionPolicy:
        """Make a policy as kvtier does. Its calls are watched."""
        policy = self.policy()
        self.calls.watch(policy, _VERBS, EvictionPolicy)
        policy.resize(capacity or self.capacity)
        return policy

    def sequences(self) -> hypothesis.settings:
        """Return the number and length of call sequences that are compared with a model."""
        return hypothesis.settings(
            max_examples=50,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[hypothesis.HealthCheck.too_slow],
        )

    def test_an_entry_point_names_it(self) -> None:
        end = f":{self.policy.__name__}"
        names = [entry.name for entry in installed(POLICIES) if entry.value.endswith(end)]
        found = [load(POLICIES, name, EvictionPolicy, "eviction_policy") for name in names]
        assert self.policy in found, f"no entry point in the group kvtier.policies names {self.policy!r}"

    @pytest.mark.parametrize("used", [False, True])
    def test_of_keys_added_together_the_last_goes_first(self, used: bool) -> None:
        policy = self.make()
        prompt = keys(0, 12)
        policy.add(prompt, used=used)
        evicted = [key for _ in range(6) for key in _evict(policy, 2)]
        _expect(
            evicted == prompt[::-1],
            f"evict() chose the keys {[prompt.index(key) for key in evicted if key in prompt]} of a "
            "prompt that was added with add(): the last goes first, because a prompt without its "
            "front serves nobody",
        )

    def test_a_run_loses_its_tail_first_in_whatever_order_it_came(self) -> None:
        policy, prompt = self.make(), keys(0, 12)
        if type(policy).add_run is EvictionPolicy.add_run:
            pytest.skip("the policy does not override add_run()")
        run, later = (Run(time, prompt.index) for time in (12, 16))
        policy.add_run(run, prompt[8:], used=False)
        policy.add_run(run, prompt[:4], used=False)
        policy.add_run(later, prompt[4:8], used=False)
        policy.pin(prompt[4:8])
        policy.add_run(run, prompt[4:8], used=False)
        evicted = [key for _ in range(6) for key in _evict(policy, 2)]
        _expect(
            evicted == prompt[::-1],
            f"evict() chose the places {[prompt.index(key) for key in evicted]} of a run whose keys were "
            "added with add_run(): the last place goes first, in whatever order they were added",
        )

    def test_a_call_takes_no_longer_with_more_candidates(self) -> None:
        few = min(self._seconds_of_calls(_FEW) for _ in range(_ATTEMPTS))
        many, most = math.inf, _MOST_TIMES_AS_LONG * few
        for attempt in range(_ATTEMPTS):  # Other processes may evict CPU caches, so the best attempt counts.
            many = min(many, self._seconds_of_calls(_MANY))
            if many < most or (attempt >= _HOPELESS and many > 2 * most):
                break
        assert many < most, (
            f"with {_MANY} candidates add(), pin() and evict() take {many / few:.0f} times as long "
            f"as with {_FEW}: their cost must not depend on the number of candidates"
        )

    def test_what_it_remembers_is_bounded(self) -> None:
        policy = self.make(256)
        self._pass_through(policy, 0, 1_000)
        policy.add(keys(30_000, 1), used=False)
        policy.pin(keys(30_000, 1))  # permanently: a chunk dropped while pinned is never added again
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            self._pass_through(policy, 1_000, 20_000)
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert after - before < 256 * self.remembered_bytes, (
            f"after 20,000 keys were added with add() and evicted with evict(), beside a pinned one, "
            f"{after - before} more bytes are held: a policy's memory of evicted keys must be bounded by "
            "its capacity"
        )

    def test_any_sequence_of_calls_agrees_with_a_model(self) -> None:
        run_state_machine_as_test(lambda: PolicyMachine(self), settings=self.sequences())  # type: ignore[arg-type]

    def _seconds_of_calls(self, candidates: int) -> float:
        policy = self.make(candidates)
        policy.add(keys(0, candidates), used=False)
        batches = [keys(candidates + number * 8, 8) for number in range(16)]
        started = time.thread_time()
        for batch in batches:
            policy.add(batch, used=False)
            policy.pin(batch[:4])
            policy.add(batch[:4], used=True)
            len(policy)
            policy.evict(8)
        return time.thread_time() - started

    def _pass_through(self, policy: EvictionPolicy, first: int, count: int) -> None:
        for number in range(first, first + count, 8):
            policy.add(keys(number, 8), used=False)
            policy.pin(keys(number, 2))
            policy.add(keys(number, 2), used=True)
            policy.evict(max(0, len(policy) - policy.capacity))


class PolicyMachine(RuleBasedStateMachine):
    """The model: the candidates and the pinned keys. The policy chooses the keys to evict."""

    def __init__(self, given: PolicyConformance) -> None:
        super().__init__()
        self.policy = given.make(8)
        self.candidates: set[OffloadKey] = set()
        self.pinned: set[OffloadKey] = set()
        self.world = keys(0, 24)
        self.uses = 0
        self.runs = [Run(place=self.world.index) for _ in range(3)]

    @rule(numbers=_NUMBERS, used=st.booleans())
    def add(self, numbers: list[int], used: bool) -> None:
        """Add new keys, evicted ones and pinned ones."""
        added = self._note_added(numbers)
        self.policy.add(added, used=used)

    @rule(numbers=_NUMBERS.map(sorted), used=st.booleans(), at=st.integers(0, 2), is_used_now=st.booleans())
    def add_run(self, numbers: list[int], used: bool, at: int, is_used_now: bool) -> None:
        """Add keys as kvtier does: as part of a run, which may be an earlier one."""
        added, run = self._note_added(numbers), self.runs[at]
        if is_used_now:
            self.uses += len(added)
            run.time = self.uses
        self.policy.add_run(run, added, used=used)

    def _note_added(self, numbers: list[int]) -> list[OffloadKey]:
        added = [self.world[number] for number in numbers if self.world[number] not in self.candidates]
        self.candidates |= set(added)
        self.pinned -= set(added)
        return added

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        """Pin some candidates."""
        if self.candidates:
            chosen = data.draw(
                st.lists(st.sampled_from(sorted(self.candidates)), min_size=1, max_size=5, unique=True)
            )
            self.policy.pin(chosen)
            self.candidates -= set(chosen)
            self.pinned |= set(chosen)

    @rule(count=st.sampled_from([0, 1, 1, 2, 3, 30]))
    def evict(self, count: int) -> None:
        """Evict some."""
        before = len(self.candidates)
        evicted = _evict(self.policy, count)
        _expect(not self.pinned & set(evicted), "evict() chose a pinned key, whose bytes are being read")
        _expect(set(evicted) <= self.candidates, "evict() chose a key that is no candidate")
        _expect(
            len(evicted) == min(count, before),
            f"evict({count}) of {before} candidates returned {len(evicted)} keys",
        )
        self.candidates -= set(evicted)

    @precondition(lambda self: len(self.pinned) > 2)
    @rule()
    def clear(self) -> None:
        """Forget everything."""
        self.policy.clear()
        self.candidates.clear()
        self.pinned.clear()

    @rule(capacity=st.integers(1, 30))
    def resize(self, capacity: int) -> None:
        """Change the capacity."""
        self.policy.resize(capacity)

    @invariant()
    def it_knows_its_candidates(self) -> None:
        """Compare the candidates."""
        count = len(self.candidates)
        _expect(
            len(self.policy) == count,
            f"__len__() is {len(self.policy)} after these calls; there are {count} candidates",
        )
        found = {key for key in self.world if key in self.policy}
        _expect(
            found == self.candidates,
            f"__contains__() says yes to {len(found - self.candidates)} keys that are no candidates and "
            f"no to {len(self.candidates - found)} that are",
        )


def _expect(condition: bool, message: str) -> None:
    """Fail with ``message`` unless the condition holds."""
    if not condition:
        raise AssertionError(message)


def _evict(policy: EvictionPolicy, count: int) -> list[OffloadKey]:
    """Evict, and check that the result is a list without duplicates."""
    evicted = policy.evict(count)
    _expect(isinstance(evicted, list), f"evict() returned a {type(evicted).__name__}; it returns a list")
    _expect(len(set(evicted)) == len(evicted), "evict() returned a key twice")
    return evicted


__all__ = ["PolicyConformance", "PolicyMachine"]
