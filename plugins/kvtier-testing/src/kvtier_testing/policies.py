"""The contract of an eviction policy as tests: subclass ``PolicyConformance`` and run it with pytest.

class TestSecondChance(PolicyConformance):
    policy = SecondChance

"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Sequence
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

from kvtier.core.policies.base import EvictionPolicy
from kvtier.keys import OffloadKey, pack_key
from kvtier.plugins import POLICIES, installed, load

_FEW, _MANY = 4_000, 64_000
_MOST_TIMES_AS_LONG = 8  # where a call walked over all candidates it would be some 16 times
_ATTEMPTS = 3


def keys(first: int, count: int) -> list[OffloadKey]:
    """Make offload keys; other numbers, other keys."""
    return [pack_key(number.to_bytes(8, "big")) for number in range(first, first + count)]


class PolicyConformance:
    """What every ``EvictionPolicy`` must do. A subclass gives ``policy``.

    Attributes:
        policy: the class that is tested. kvtier calls it without arguments, and then ``resize``.
        capacity: chunks that the primary tier of most tests has room for.
        remembered_bytes: bytes that it may hold for each chunk of its capacity, for what it remembers of
            chunks that are gone.
    """

    policy: ClassVar[type[EvictionPolicy]]
    capacity: ClassVar[int] = 64
    remembered_bytes: ClassVar[int] = 1000

    def make(self, capacity: int | None = None) -> EvictionPolicy:
        """Make a policy as kvtier does."""
        policy = self.policy()
        policy.resize(capacity or self.capacity)
        return policy

    def sequences(self) -> hypothesis.settings:
        """Say how many sequences of calls are compared with a model, and how long they are."""
        return hypothesis.settings(
            max_examples=50,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[hypothesis.HealthCheck.too_slow],
        )

    def test_an_entry_point_names_it(self) -> None:
        names = [
            info.name for info in installed(POLICIES) if info.target.endswith(f":{self.policy.__name__}")
        ]
        found = [load(POLICIES, name, EvictionPolicy, "eviction_policy") for name in names]
        assert self.policy in found, f"no entry point in the group kvtier.policies names {self.policy!r}"

    def test_without_candidates_nothing_is_evicted(self) -> None:
        policy = self.make()
        assert (len(policy), policy.evict(3)) == (0, [])
        policy.add([], used=False)
        policy.pin([])
        assert (len(policy), policy.evict(0)) == (0, [])
        policy.add(keys(0, 2), used=False)
        assert policy.evict(0) == []
        assert len(policy) == 2

    def test_as_many_are_evicted_as_are_asked_for_or_are_there(self) -> None:
        policy = self.make()
        policy.add(keys(0, 10), used=False)
        first = policy.evict(4)
        assert len(first) == len(set(first)) == 4
        assert len(policy) == 6
        assert sorted(first + policy.evict(100)) == keys(0, 10)
        assert len(policy) == 0

    @pytest.mark.parametrize("used", [False, True])
    def test_of_keys_added_together_the_last_goes_first(self, used: bool) -> None:
        policy = self.make()
        prompt = keys(0, 12)
        policy.add(prompt, used=used)
        evicted = [key for _ in range(6) for key in policy.evict(2)]
        assert evicted == prompt[::-1], "a prompt whose front is gone serves nobody: the tail goes first"

    def test_pinned_keys_are_not_evicted_until_they_are_added_again(self) -> None:
        policy = self.make()
        held, others = keys(0, 4), keys(4, 4)
        policy.add(held + others, used=False)
        policy.pin(held)
        assert len(policy) == len(others)
        assert not any(key in policy for key in held)
        assert sorted(policy.evict(100)) == others
        policy.add(held, used=True)
        assert sorted(policy.evict(100)) == held

    def test_what_was_evicted_may_come_back_and_be_evicted_again(self) -> None:
        policy = self.make(4)
        for number in range(40):
            policy.add(keys(number % 6, 1), used=number % 3 == 0)
            assert keys(number % 6, 1)[0] in policy
            evicted = policy.evict(1) if number % 2 else policy.evict(100)
            assert len(set(evicted)) == len(evicted) > 0
            policy.evict(100)

    def test_clear_forgets_candidates_and_pinned_ones(self) -> None:
        policy = self.make()
        policy.add(keys(0, 8), used=False)
        policy.pin(keys(0, 2))
        policy.clear()
        assert (len(policy), policy.evict(5)) == (0, [])
        policy.add(keys(0, 8), used=False)  # the pins of before are of no account
        assert sorted(policy.evict(8)) == keys(0, 8)

    def test_it_may_have_more_candidates_than_its_capacity_and_learn_another_one(self) -> None:
        policy = self.make(2)
        policy.add(keys(0, 10), used=False)
        policy.resize(20)
        policy.add(keys(10, 10), used=True)
        policy.resize(1)
        assert sorted(policy.evict(100)) == keys(0, 20)

    def test_a_call_takes_no_longer_with_more_candidates(self) -> None:
        few, many = (min(self._seconds_of_calls(count) for _ in range(_ATTEMPTS)) for count in (_FEW, _MANY))
        assert many < _MOST_TIMES_AS_LONG * few, (
            f"with {_MANY} candidates the same calls take {many / few:.0f} times as long as with {_FEW}"
        )

    def test_what_it_remembers_is_bounded(self) -> None:
        policy = self.make(256)
        self._pass_through(policy, 0, 1_000)
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            self._pass_through(policy, 1_000, 20_000)
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert after - before < 256 * self.remembered_bytes, (
            f"20,000 chunks that came and went have left {after - before} bytes: what is remembered of "
            "evicted chunks has to be bounded by the capacity"
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
    """The truth: which keys are candidates and which are pinned. Who is evicted is the policy's choice.

    Args:
        given: what the policy's author has given.
    """

    def __init__(self, given: PolicyConformance) -> None:
        super().__init__()
        self.policy = given.make(8)
        self.candidates: set[OffloadKey] = set()
        self.pinned: set[OffloadKey] = set()
        self.world = keys(0, 24)

    @rule(numbers=st.lists(st.integers(0, 23), min_size=1, max_size=12, unique=True), used=st.booleans())
    def add(self, numbers: list[int], used: bool) -> None:
        """Add new keys, evicted ones and pinned ones."""
        added = [self.world[number] for number in numbers if self.world[number] not in self.candidates]
        self.policy.add(added, used=used)
        self.candidates |= set(added)
        self.pinned -= set(added)

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
        evicted = self.policy.evict(count)
        assert isinstance(evicted, list), f"evict() answered a {type(evicted).__name__}"
        self._check_victims(evicted)
        assert len(evicted) == min(count, before), f"evict({count}) of {before} answered {len(evicted)}"
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
        """Say that there is more room, or less."""
        self.policy.resize(capacity)

    @invariant()
    def it_knows_its_candidates(self) -> None:
        """Compare."""
        assert len(self.policy) == len(self.candidates)
        assert {key for key in self.world if key in self.policy} == self.candidates

    def _check_victims(self, evicted: Sequence[OffloadKey]) -> None:
        assert len(set(evicted)) == len(evicted), "evict() named a key twice"
        assert not self.pinned & set(evicted), "evict() chose a pinned key: its bytes are being read"
        assert set(evicted) <= self.candidates, "evict() chose a key that is no candidate"


__all__ = ["PolicyConformance", "PolicyMachine"]
