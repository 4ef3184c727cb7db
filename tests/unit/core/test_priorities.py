"""Priorities that clients give, under any policy; chunks that leave when their request has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest

from kvtier._core.messages import Put, SlotsReady
from kvtier._core.priorities import SPARE_ENTRIES
from kvtier._core.requests import Request, Terms
from kvtier._core.tiering import Tiering
from kvtier.keys import OffloadKey
from kvtier.policies import ARC, LHD, LRU, Auto, EvictionPolicy
from kvtier_testing import invariants
from tests.unit.core import world
from tests.unit.core.world import HIT, keys

A, B, C = keys("a", 4), keys("b", 4), keys("c", 4)

any_policy = pytest.mark.parametrize("policy", [LRU, ARC, LHD, Auto])


def make(policy: EvictionPolicy | None = None, slots: int = 16, tiers: int = 0, pin_budget: float = 0.25):
    core = world.make(slots, tiers, policy, pin_budget=pin_budget)
    invariants.watch_evictions(core)
    return core


def store(
    core: Tiering, chunks: Sequence[OffloadKey], priority: int = 1, request: Request | None = None
) -> None:
    """Store chunks for a request; the puts end at once."""
    for put in begin(core, chunks, request or Request(priority=priority)):
        world.put_ends(core, put)
    core.settle(0.0)


def begin(core: Tiering, chunks: Sequence[OffloadKey], request: Request) -> list[Put]:
    """Store chunks for a request; return the puts."""
    reservation = core.reserve(chunks, request)
    assert reservation is not None
    core.commit(reservation, 0.0)
    return [command for command in world.taken(core) if isinstance(command, Put)]


def load(core: Tiering, chunks: Sequence[OffloadKey], request: Request) -> None:
    """Load chunks that are there."""
    assert world.ask(core, request, chunks) == [HIT] * len(chunks)
    core.release(core.acquire(chunks, request))
    core.settle(0.0)


def promote(core: Tiering, chunks: Sequence[OffloadKey], request: Request) -> None:
    """Promote chunks that a tier has."""
    gets = world.step(core, request, chunks)
    while gets:
        core.on_event(world.answered(gets.pop()), 0.0)
        gets += world.fetches(core)


def flood(core: Tiering, priority: int = 1, prompts: int = 8) -> None:
    """Store many prompts one after the other."""
    for index in range(prompts):
        store(core, keys(f"flood{index}/", 4), priority)


def there(core: Tiering, chunks: Sequence[OffloadKey]) -> list[OffloadKey]:
    """Return which chunks are in the primary tier, without using them."""
    invariants.check(core)
    return [key for key in chunks if key in core.table.visible]


def keep(core: Tiering, chunks: Sequence[OffloadKey]) -> None:
    """Have a client that keeps chunks load them."""
    request = Request()
    core.claims.start_request(request, Terms("session", kept_s=9.0))
    core.release(core.acquire(chunks, request))


def releasing() -> Request:
    return Request(priority=0, releases=True)


# --- priorities ----------------------------------------------------------------------------------


def test_no_priority_costs_nothing() -> None:
    core = make(tiers=1)
    store(core, A)
    load(core, A, Request())
    assert not core.table.users
    assert core.table.evictable == len(core.table.orders[1]) == 4


@any_policy
def test_low_flood_evicts_no_others(policy: type[EvictionPolicy]) -> None:
    core = make(policy())
    for chunks in (A, B, C):
        store(core, chunks)
    flood(core, priority=0)
    assert there(core, A + B + C) == A + B + C


@any_policy
def test_high_survives_flood(policy: type[EvictionPolicy]) -> None:
    core = make(policy())
    store(core, A, 2)
    store(core, B)
    flood(core)
    assert there(core, A) == A
    assert there(core, B) == []


def test_priority_ends_with_its_time() -> None:
    core = make()
    short, longer = Request(priority=2, priority_s=5.0), Request(priority=2, priority_s=9.0)
    store(core, A, request=short)
    core.close(short, 0.0)
    core.settle(4.9)
    assert core.table.priority(A[0]) == 2
    load(core, A[:2], longer)
    core.close(longer, 4.9)
    core.settle(5.0)
    assert [core.table.priority(key) for key in A] == [2, 2, 1, 1]
    core.settle(13.9)
    assert not core.table.users


def test_ended_priorities_are_bounded() -> None:
    core = make()
    for number in range(1000):
        request = Request(priority=2, priority_s=1e6)
        store(core, keys(f"{number}/", 1), request=request)
        core.close(request, 0.0)
    assert len(core.priorities.ending) <= 2 * 16 + SPARE_ENTRIES + 1


def test_highest_leaves_last() -> None:
    core = make(pin_budget=0.5)
    store(core, A, 3)
    store(core, B, 2)
    store(core, C, 2)
    flood(core)
    assert there(core, A + B + C) == A + C, "within the budget"
    store(core, B, 3)
    flood(core)
    assert there(core, A + B + C) == A + B


def test_least_recent_loses_priority() -> None:
    core = make(pin_budget=0.5)
    store(core, A, 3)
    store(core, B, 3)
    load(core, A, Request())
    store(core, C, 3)
    flood(core)
    assert there(core, A + B + C) == A + C
    assert core.take_counts()["keep_refused", "budget"] == 4


def test_over_budget_becomes_default() -> None:
    core = make()
    store(core, A)
    store(core, B, 3)
    store(core, C, 3)
    store(core, keys("d", 4))
    store(core, keys("e", 4))
    assert there(core, A + B + C) == B + C, "the oldest of the default priority has left"


def test_kept_chunks_share_budget() -> None:
    core = make(pin_budget=0.5)
    store(core, A, 3)
    store(core, B, 3)
    store(core, C)
    keep(core, C)
    core.settle(0.0)
    flood(core)
    assert there(core, A + B + C) == B + C


def test_high_leaves_if_others_in_use() -> None:
    core = make(slots=8, pin_budget=1.0)
    store(core, A, 3)
    store(core, B)
    core.acquire(B)
    store(core, keys("d", 2))
    assert there(core, A) == A[:2], "the tail first"


def test_highest_user_decides() -> None:
    core = make()
    store(core, A, 0)
    store(core, B)
    load(core, A, Request())
    load(core, B, Request(priority=0))
    assert not core.table.users
    load(core, B, Request(priority=2))
    load(core, B, Request(priority=0))
    flood(core)
    assert there(core, A + B) == B


def test_promoted_has_request_priority() -> None:
    core = make(tiers=1)
    for chunks in (A, B):
        store(core, chunks)
    flood(core)
    low, high = Request(priority=0), Request(priority=3)
    for request, chunks in ((low, A), (high, B)):
        promote(core, chunks, request)
        load(core, chunks, request)
    store(core, C)
    assert there(core, A + B) == B
    flood(core)
    assert there(core, A + B) == B


def test_more_slots_more_budget() -> None:
    core = make()
    core.on_event(SlotsReady(range(16, 32)), 0.0)
    store(core, A, 2)
    store(core, B, 2)
    flood(core)
    assert there(core, A + B) == A + B


def test_reset_forgets_priorities() -> None:
    core = make()
    store(core, A, 0)
    store(core, B, 3)
    reservation = world.reserve(core, C)
    core.reset()
    core.abort(reservation)
    assert not core.table.users
    assert core.table.evictable == 0
    store(core, A)
    flood(core, priority=0)
    assert there(core, A) == A


class Greedy(LRU):
    """Evicts what it does not know."""

    choice: Sequence[OffloadKey] = ()

    def evict(self, count: int) -> list[OffloadKey]:
        return [*self.choice] or super().evict(count)


def test_priorities_outlive_policy() -> None:
    policy = Greedy()
    core = make(policy)
    store(core, A, 3)
    store(core, B)
    store(core, C)
    policy.choice = A[:1]
    flood(core)
    assert core.take_counts()["policy_replaced", "not_a_candidate"] == 1
    assert there(core, A + B + C) == A


# --- release -------------------------------------------------------------------------------------


def test_chunks_leave_after_end_and_put() -> None:
    core, request = make(tiers=1), releasing()
    (put,) = begin(core, A, request)
    core.close(request)
    core.settle(0.0)
    assert there(core, A) == A, "the put has not ended"
    core.shared.kv_events.take_events()
    world.put_ends(core, put, [True, True, True, False])
    core.settle(0.0)
    assert there(core, A) == A[3:], "no tier has taken that"
    assert core.take_counts()["released",] == 3
    assert [event.keys for event in core.shared.kv_events.take_events() if event.removed] == [tuple(A[:3])]
    for chunks in (B, C, keys("d", 4), keys("e", 4)):
        store(core, chunks)
    assert there(core, A + B) == B, "and it is evicted first"


def test_chunks_stay_with_request() -> None:
    core, request = make(tiers=1), releasing()
    store(core, A, request=request)
    assert there(core, A) == A
    load(core, A, request)
    core.close(request)
    core.settle(0.0)
    assert there(core, A) == []
    assert not core.table.users


def test_promoted_chunks_leave_too() -> None:
    core, request = make(tiers=1), releasing()
    store(core, A)
    flood(core)
    promote(core, A, request)
    assert world.ask(core, request, A) == [HIT] * 4
    pinned = core.acquire(A, request)
    core.close(request)
    core.settle(0.0)
    assert there(core, A) == A, "the load has not ended"
    core.release(pinned)
    core.settle(0.0)
    assert there(core, A) == []


def test_failed_last_put_lets_leave() -> None:
    core, request = make(tiers=2), releasing()
    first, second = begin(core, A, request)
    core.close(request)
    world.put_ends(core, first)
    core.settle(0.0)
    assert there(core, A) == A
    world.put_ends(core, second, [False] * 4)
    core.settle(0.0)
    assert there(core, A) == []


@pytest.mark.parametrize("make_other", [Request, partial(Request, priority=0), releasing])
def test_shared_use_stays(make_other: Callable[[], Request]) -> None:
    core, request, other = make(tiers=1), releasing(), make_other()
    puts = begin(core, A, request)
    load(core, A[:2], other)
    core.close(request)
    for put in puts:
        world.put_ends(core, put)
    core.close(other)
    core.settle(0.0)
    assert there(core, A) == A[:2]


@pytest.mark.parametrize("is_held", [False, True])
def test_reported_hit_stays(is_held: bool) -> None:
    core, request, other = make(tiers=1), releasing(), Request()
    store(core, A, request=request)
    (get,) = world.step(core, Request(), B[:1])
    core.close(request)
    assert world.ask(core, other, A) == [HIT] * 4
    if is_held:
        world.answer(core, get, [world.MISSING])
    core.settle(0.0)
    assert there(core, A) == A
    load(core, A, other)


def test_kept_stays() -> None:
    core, request = make(tiers=1), releasing()
    store(core, A, request=request)
    keep(core, A)
    core.settle(0.0)
    core.close(request)
    core.settle(0.0)
    assert there(core, A) == A


def test_earlier_chunks_stay() -> None:
    core, request = make(tiers=1), releasing()
    store(core, A[:2])
    store(core, A, request=request)
    core.close(request)
    core.settle(0.0)
    assert there(core, A) == A[:2]


def test_reset_cancels_releases() -> None:
    core, request = make(slots=64, tiers=2), releasing()
    puts = begin(core, A, request)
    core.reset()
    first, second = begin(core, A, request)
    core.close(request)
    world.put_ends(core, puts[0])
    world.put_ends(core, first, [False] * 4)
    world.put_ends(core, second, [False, False, True, True])
    world.put_ends(core, puts[1])
    core.settle(0.0)
    assert there(core, A) == A[:2], "the tiers have forgotten that"
