"""A policy is a plug-in: whatever it chooses or raises, the core's slots and the engine come to no harm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest

from kvtier._core.messages import SlotsReady
from kvtier._core.requests import Request
from kvtier._core.tiering import Tiering
from kvtier.keys import OffloadKey
from kvtier.policies import LRU, Run
from kvtier_testing import invariants
from tests.unit.core.world import COPIED, answer, keys, reserve, step, store
from tests.unit.core.world import make as core_of


class Wild(LRU):
    """A policy that does what ``act`` returns in place of choosing, and raises where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.act: Callable[[list[OffloadKey], int], Any] | None = None
        self.raises_in = ""

    def evict(self, count: int) -> list[OffloadKey]:
        self._raise_in("evict")
        return super().evict(count) if self.act is None else self.act(super().evict(count), count)

    def add_run(self, run: Run, keys: Sequence[OffloadKey], *, used: bool) -> None:
        self._raise_in("add")
        super().add_run(run, keys, used=used)

    def pin(self, keys: Sequence[OffloadKey]) -> None:
        self._raise_in("pin")
        super().pin(keys)

    def clear(self) -> None:
        self._raise_in("clear")
        super().clear()

    def resize(self, capacity: int) -> None:
        self._raise_in("resize")
        super().resize(capacity)

    def __len__(self) -> int:
        self._raise_in("len")
        return super().__len__()

    def _raise_in(self, what: str) -> None:
        if self.raises_in == what:
            raise RuntimeError(what)


HELD = keys("held", 2)

CHOICES: dict[str, tuple[Callable[[list[OffloadKey], int], Any], str]] = {
    "a pinned chunk": (lambda chosen, count: [HELD[0]], "not_a_candidate"),
    "a pinned chunk among good ones": (lambda chosen, count: [*chosen[1:], HELD[0]], "not_a_candidate"),
    "a chunk that is not there": (lambda chosen, count: keys("nowhere", count), "not_a_candidate"),
    "the same chunk twice": (lambda chosen, count: [chosen[0]] * count, "not_a_candidate"),
    "more than it was asked for": (lambda chosen, count: [*chosen, *HELD, *chosen], "too_many"),
    "nothing": (lambda chosen, count: [], "withheld"),
    "None": (lambda chosen, count: None, "raised"),
    "what is no key": (lambda chosen, count: [[]] * count, "raised"),
}


def make() -> tuple[Tiering, Wild]:
    """Eight slots, all READY, two of them pinned by a load."""
    policy = Wild()
    core = core_of(8, 0, policy)
    store(core, HELD)
    store(core, keys("old", 6))
    core.acquire(HELD)
    core.settle(0.0)
    return core, policy


@pytest.mark.parametrize("choice", CHOICES)
def test_wrong_policy_is_replaced(choice: str) -> None:
    core, policy = make()
    policy.act, reason = CHOICES[choice]
    reservation = reserve(core, keys("new", 3))
    assert len(reservation.keys) == len(reservation.evicted) == len(set(reservation.evicted)) == 3
    assert set(reservation.evicted) <= set(keys("old", 6))
    assert all(key in core.table.visible for key in HELD)
    core.commit(reservation, 0.0)
    core.settle(0.0)
    invariants.check(core)
    counts = core.take_counts()
    assert counts["policy_replaced", reason] == 1
    assert counts["evicted",] == 3
    (notice,) = core.take_notices()
    assert notice.subject == "eviction policy Wild"
    assert type(core.table.orders[1]) is LRU


@pytest.mark.parametrize("where", ["evict", "add", "pin", "clear", "resize", "len"])
def test_raising_policy_is_replaced(where: str) -> None:
    core, policy = make()
    policy.raises_in = where
    core.on_event(SlotsReady(range(8, 9)), 0.0)
    core.commit(reserve(core, keys("new", 4)), 0.0)
    assert core.table.evictable == 7
    core.release(core.acquire(keys("new", 1)))
    core.settle(0.0)
    invariants.check(core)
    core.reset()
    invariants.check(core)
    core.settle(0.0)
    assert core.take_counts()["policy_replaced", "raised"] == 1
    assert type(core.table.orders[1]) is LRU


def test_replacement_knows_promoted_chunks() -> None:
    policy = Wild()
    core, request = core_of(8, 1, policy), Request()
    (get,) = step(core, request, keys("old", 3))
    core.close(request)
    policy.raises_in = "add"
    answer(core, get, [COPIED] * 3)  # checks that each chunk is a candidate
    assert core.table.evictable == 3


class Forgetful(LRU):
    """A policy that counts its candidates once."""

    counts = 0

    def __len__(self) -> int:
        self.counts += 1
        if self.counts > 1:
            raise RuntimeError("len")
        return super().__len__()


def test_second_count_may_raise() -> None:
    core = core_of(8, 0, Forgetful())
    store(core, keys("old", 3))
    assert core.table.evictable == 3
    invariants.check(core)


def test_replacement_evicts_tail_first() -> None:
    core, policy = make()
    policy.act = CHOICES["nothing"][0]
    assert list(reserve(core, keys("new", 2)).evicted) == keys("old", 6)[:3:-1]


@pytest.mark.parametrize("seed", range(20))
def test_random_policies_are_safe(seed: int) -> None:
    chance = Random(seed)
    core, policy = make()
    policy.act = lambda chosen, count: chance.choice([act for act, _ in CHOICES.values()])(chosen, count)
    policy.raises_in = chance.choice(["", "add", "pin"])
    for number in range(30):
        reservation = core.reserve(keys(f"n{number}-", chance.randrange(1, 7)))
        invariants.check(core)
        if reservation is not None:
            core.commit(reservation, 0.0)
        if chance.random() < 0.1:
            core.reset()
        core.settle(0.0)
        invariants.check(core)


class Clinging(LRU):
    """A policy that keeps a chunk which it has chosen, and chooses it again."""

    calls = 0

    def evict(self, count: int) -> list[OffloadKey]:
        self.calls += 1
        if self.calls > 100:
            raise RuntimeError("the core asks for ever")
        return [key for key in HELD if key in self][:count]


def test_spared_chunk_is_not_chosen_for_ever() -> None:
    core, request = core_of(2, 0, Clinging()), Request()
    stored = core.reserve(HELD, request)
    assert stored is not None
    core.commit(stored, 0.0)
    assert core.reserve(keys("next", 1), request) is None, "its other chunks are of the same prompt"
    core.settle(0.0)
    invariants.check(core)
    assert core.take_counts()["policy_replaced", "not_a_candidate"] == 1
