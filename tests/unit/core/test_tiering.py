"""Stores, cascades, loads, resets, and what is told about them."""

from __future__ import annotations

import pytest

from kvtier._core.admission import Limits
from kvtier._core.announcements import Change
from kvtier._core.messages import (
    Answer,
    Fetch,
    Fetched,
    PutEnded,
    Reset,
    SlotsReady,
    TierDown,
    Touch,
)
from kvtier._core.requests import Request
from kvtier._core.states import Lookup
from kvtier._core.tiering import Tiering
from kvtier.errors import StateError
from kvtier.policies._lru import LRU
from kvtier_testing import invariants
from tests.unit.core.world import (
    keys,
    make,
    puts,
    reserve,
    store,
    there,
)

# --- stores --------------------------------------------------------------------------------------


def test_a_store_is_pending_until_it_is_committed() -> None:
    core, request, prompt = make(8, 0), Request(), keys("a", 2)
    reservation = reserve(core, prompt)
    assert reservation.slots == [0, 1]
    assert [core.lookup(key, request) for key in prompt] == [Lookup.PENDING] * 2
    core.commit(reservation, 0.0)
    assert [core.lookup(key, request) for key in prompt] == [Lookup.HIT] * 2


def test_without_tiers_a_wait_for_a_store_ends_by_its_deadline() -> None:
    core, request, prompt = make(8, 0), Request(), keys("a", 1)
    reserve(core, prompt)
    for now_s in (0.0, 4.9, 5.0):
        assert core.lookup(prompt[0], request) is Lookup.PENDING
        core.settle(now_s)
    assert core.lookup(prompt[0], request) is Lookup.MISS
    assert core.take_counts() == {("expired",): 1, ("miss", "deadline"): 1}


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_a_store_ends_once(end: str) -> None:
    core = make(8, 0)
    reservation = reserve(core, keys("a", 1))
    core.commit(reservation, 0.0)
    with pytest.raises(StateError, match="Reservation was ended before"):
        core.commit(reservation, 0.0) if end == "commit" else core.abort(reservation)


def test_only_new_keys_are_reserved_and_each_once() -> None:
    core = make(8, 0)
    store(core, keys("a", 2))
    filling = reserve(core, keys("b", 1))
    reservation = reserve(core, [*keys("a", 3), *keys("b", 2), *keys("a", 3)])
    assert reservation.keys == [keys("a", 3)[2], keys("b", 2)[1]]
    assert len(filling.keys) == 1
    empty = reserve(core, keys("a", 3))
    assert empty.keys == []
    core.abort(empty)


def test_where_room_is_short_a_prefix_is_stored_and_where_there_is_none_nothing() -> None:
    core, prompt = make(4, 0), keys("a", 6)
    reservation = reserve(core, prompt)
    assert reservation.keys == prompt[:4]
    assert core.reserve(keys("b", 3)) is None
    assert core.take_counts()["store_refused", "no_slot"] == 2 + 3


def test_room_that_is_short_because_memory_still_comes_has_a_reason_of_its_own() -> None:
    core = Tiering(LRU(), [], Limits(landing_reserve=0.0))
    assert core.reserve(keys("a", 3)) is None
    core.on_event(SlotsReady(range(2), is_last=False), 0.0)
    reserve(core, keys("a", 3))
    assert core.take_counts()["store_refused", "starting"] == 3 + 1
    core.on_event(SlotsReady(range(0)), 0.0)
    core.on_event(SlotsReady(range(2, 3), is_last=False), 0.0)  # two threads told of their ends at once
    reserve(core, keys("b", 2))
    counts = core.take_counts()
    assert counts["store_refused", "no_slot"] == 1
    assert ("store_refused", "starting") not in counts


def test_a_full_tier_evicts_the_oldest_tail_first_and_says_so() -> None:
    core = make(4, 0)
    store(core, keys("old", 4))
    core.take_changes()
    reservation = reserve(core, keys("new", 2))
    assert reservation.evicted == [keys("old", 4)[3], keys("old", 4)[2]]
    assert core.take_changes() == [Change(tuple(reservation.evicted), None, removed=True)]
    assert core.take_counts()["evicted",] == 2


def test_a_chunk_is_stored_once_it_was_offered_often_enough() -> None:
    core, prompt = make(8, 0, store_threshold=2, max_tracker_size=4), keys("a", 3)
    assert reserve(core, prompt[:2]).keys == []
    reservation = reserve(core, prompt)
    assert reservation.keys == prompt[:2]
    assert core.take_counts()["store_refused", "store_threshold"] == 3
    reserve(core, keys("b", 4))  # the tracker forgets the oldest
    assert reserve(core, prompt[2:]).keys == []


def test_the_threshold_admits_a_prefix_only() -> None:
    core, prompt = make(8, 0, store_threshold=2), keys("a", 3)
    reserve(core, prompt[1:])
    assert reserve(core, prompt).keys == []
    assert reserve(core, prompt).keys == prompt


# --- loads ---------------------------------------------------------------------------------------


def test_a_load_pins_and_its_end_makes_recent() -> None:
    core = make(4, 0)
    store(core, keys("a", 2))
    store(core, keys("b", 2))
    pinned = core.acquire(keys("a", 2))
    assert reserve(core, keys("c", 4)).evicted == keys("b", 2)[::-1]
    core.release(pinned)
    assert there(core, keys("a", 2)) == keys("a", 2)
    with pytest.raises(StateError, match="Pinned was ended before"):
        core.release(pinned)


def test_what_is_not_ready_cannot_be_acquired_and_then_nothing_is() -> None:
    core = make(8, 0)
    store(core, keys("a", 1))
    reserve(core, keys("b", 1))
    for bad in (keys("b", 1), keys("c", 1)):
        with pytest.raises(StateError, match=f"chunk {bad[0].hex()} is not READY"):
            core.acquire(keys("a", 1) + bad)
    invariants.check(core)
    assert core.table.visible[keys("a", 1)[0]].pins == 0


# --- the cascade ---------------------------------------------------------------------------------


def test_a_stored_chunk_goes_to_every_tier_and_is_pinned_until_all_have_it() -> None:
    core, prompt = make(2, 2, put_backlog=1.0), keys("a", 2)
    first, second = puts(core, prompt)
    assert [first.tier, second.tier] == [0, 1]
    assert list(first.keys) == list(second.keys) == prompt
    assert core.reserve(keys("b", 1)) is None
    core.on_event(PutEnded(first.id, [True, True]), 0.0)
    assert core.reserve(keys("b", 1)) is None
    core.on_event(PutEnded(second.id, [True, False], {"enospc": 1}), 0.0)
    assert reserve(core, keys("b", 1)).evicted == [prompt[1]]
    counts = core.take_counts()
    assert (counts["put", "t0"], counts["put", "t1"]) == (2, 1)
    assert counts["put_failed", "t1", "enospc"] == 1


def test_what_exceeds_the_backlog_of_a_tier_is_dropped_for_it_and_counted() -> None:
    core = make(8, 2, put_backlog=0.5)
    first, second = puts(core, keys("a", 3))
    core.on_event(PutEnded(second.id, [True] * 3), 0.0)
    again = puts(core, keys("b", 3))
    assert [(put.tier, len(put.keys)) for put in again] == [(0, 1), (1, 2)], "all of it, or its share"
    counts = core.take_counts()
    assert counts["put_dropped", "t0", "backlog"] == 2
    assert counts["put_dropped", "t1", "backlog"] == 1
    core.on_event(PutEnded(first.id, [True] * 3), 0.0)
    assert [gate.backlog for gate in core.shared.tiers] == [1, 2]


def test_an_overdue_put_keeps_its_slots_until_it_ends() -> None:
    core = make(2, 1, put_backlog=1.0)
    (put,) = puts(core, keys("a", 2))
    core.settle(3.0)
    assert core.take_counts()["overdue", "t0", "put"] == 1
    assert core.reserve(keys("b", 1)) is None
    core.on_event(PutEnded(put.id, [True, True]), 9.0)
    assert reserve(core, keys("b", 1)).keys == keys("b", 1)
    assert core.shared.tiers[0].overdue == 0


# --- reset ---------------------------------------------------------------------------------------


def test_reset_hides_everything_and_tells_the_tiers() -> None:
    core = make(8, 2, put_backlog=1.0)
    store(core, keys("a", 2))
    core.reset()
    assert core.take_commands() == [Reset(0, 1), Reset(1, 1)]
    assert there(core, keys("a", 2)) == []
    assert len(core.table.free) == 8
    assert core.epoch == 1


def test_a_fetch_of_before_a_reset_teaches_nothing() -> None:
    core, old, new, prompt = make(8, 1, put_backlog=1.0), Request(), Request(), keys("a", 2)
    core.lookup(prompt[0], old)
    core.settle(0.0)
    (fetch,) = core.take_commands()
    core.reset()
    core.take_commands()
    assert core.lookup(prompt[0], new) is Lookup.RETRY
    assert core.lookup(prompt[1], old) is Lookup.RETRY
    core.settle(0.0)
    again = core.take_commands()
    assert [list(command.keys) for command in again if isinstance(command, Fetch)] == [prompt[:1], prompt[1:]]
    assert isinstance(fetch, Fetch)
    core.on_event(Fetched(fetch.id, [Answer.LOCATED]), 0.0)
    assert core.take_commands() == []


def test_a_deadline_outlives_a_reset() -> None:
    core, request, prompt = make(8, 1, put_backlog=1.0), Request(), keys("a", 1)
    core.lookup(prompt[0], request)
    core.settle(0.0)
    core.reset()
    core.settle(5.0)
    assert core.lookup(prompt[0], request) is Lookup.MISS


# --- what is told --------------------------------------------------------------------------------


# --- touches ---------------------------------------------------------------------------------------


def test_tiers_learn_once_a_round_what_was_loaded_without_them() -> None:
    core, prompt = make(8, 2, put_backlog=1.0), keys("a", 3)
    store(core, prompt)
    for _ in range(2):
        core.release(core.acquire(prompt[:2]))
    assert core.take_commands() == [], "not before the round is over"
    core.settle(0.0)
    assert core.take_commands() == [Touch(0, prompt[:2]), Touch(1, prompt[:2])]
    core.settle(0.0)
    assert core.take_commands() == []


def test_a_tier_that_takes_no_work_and_what_was_reset_are_not_touched() -> None:
    core, prompt = make(8, 2, put_backlog=1.0), keys("a", 1)
    store(core, prompt)
    core.on_event(TierDown(0, "test"), 0.0)
    core.release(core.acquire(prompt))
    core.settle(0.0)
    assert core.take_commands() == [Touch(1, prompt)]
    core.release(core.acquire(prompt))
    core.reset()
    core.settle(0.0)
    assert core.take_commands() == [Reset(0, 1), Reset(1, 1)]
