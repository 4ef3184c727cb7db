"""Stores, cascades, loads, resets, and their events."""

from __future__ import annotations

import pytest

from kvtier._core.kv_events import EventQueue, KVEvent, KVEventLog
from kvtier._core.limits import Limits
from kvtier._core.messages import ProcessEnded, PutEnded, Removed, SlotsReady, TierDown, TierUp, Touch
from kvtier._core.requests import Request
from kvtier._core.states import RequestEvent
from kvtier._core.tiering import Tiering
from kvtier.errors import StateError
from kvtier.policies import LRU
from kvtier_testing import invariants
from tests.unit.core.world import (
    COPIED,
    LOCATED,
    MISSING,
    answer,
    ask_all,
    keys,
    make,
    put_ends,
    puts,
    reserve,
    step,
    store,
)

# --- stores --------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_store_ends_once(end: str) -> None:
    core = make(8, 0)
    reservation = reserve(core, keys("a", 1))
    core.commit(reservation, 0.0)
    with pytest.raises(StateError, match="Reservation has already ended"):
        core.commit(reservation, 0.0) if end == "commit" else core.abort(reservation)


def test_coming_memory_has_a_reason() -> None:
    core = Tiering(LRU(), [], Limits(promotion_reserve=0.0))
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


def test_store_threshold_counts_offers() -> None:
    core, prompt = make(8, 0, store_threshold=2, max_tracker_size=4), keys("a", 3)
    assert reserve(core, prompt[:2]).keys == []
    reservation = reserve(core, prompt)
    assert reservation.keys == prompt[:2]
    assert core.take_counts()["store_refused", "store_threshold"] == 3
    reserve(core, keys("b", 4))  # the tracker forgets the oldest
    assert reserve(core, prompt[2:]).keys == []


def test_prompt_longer_than_tracker() -> None:
    core, prompt = make(16, 0, store_threshold=2, max_tracker_size=4), keys("a", 10)
    stored = 0
    for _ in range(6):
        reservation = reserve(core, prompt)
        core.commit(reservation, 0.0)
        stored += len(reservation.keys)
    assert stored == 10


def test_repeated_offer_counts_once() -> None:
    core, prompt = make(4, 0, store_threshold=2), keys("a", 4)
    reserve(core, prompt[:2])
    reserve(core, keys("b", 4))
    pinned = reserve(core, keys("b", 4))
    assert [core.reserve(prompt) for _ in range(3)] == [None] * 3
    core.abort(pinned)
    assert reserve(core, prompt).keys == prompt[:2]


# --- loads ---------------------------------------------------------------------------------------


def test_unready_chunk_fails_acquire() -> None:
    core = make(8, 0)
    store(core, keys("a", 1))
    reserve(core, keys("b", 1))
    for bad in (keys("b", 1), keys("c", 1)):
        with pytest.raises(StateError, match=f"chunk {bad[0].hex()} is not READY"):
            core.acquire(keys("a", 1) + bad)
    invariants.check(core)
    assert core.table.visible[keys("a", 1)[0]].pins == 0


# --- the cascade ---------------------------------------------------------------------------------


def test_pinned_until_all_tiers_have_it() -> None:
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


# --- reset ---------------------------------------------------------------------------------------


# --- touches ---------------------------------------------------------------------------------------


def test_other_loads_told_each_round() -> None:
    core, prompt = make(8, 2, put_backlog=1.0), keys("a", 3)
    store(core, prompt)
    for _ in range(2):
        core.release(core.acquire(prompt[:2]))
    assert core.take_commands() == [], "not before the round is over"
    core.settle(0.0)
    assert core.take_commands() == [Touch(0, prompt[:2]), Touch(1, prompt[:2])]
    core.settle(0.0)
    assert core.take_commands() == []


# --- announcements -------------------------------------------------------------------------------


def test_excess_removals_withdraw_tier() -> None:
    core, prompt, queue = make(16, 2), keys("a", 4), EventQueue()
    queue.most_removed = 2
    store(core, prompt)
    under_way = puts(core, keys("b", 2))
    core.shared.kv_events.take_events()
    for key in keys("c", 100):
        queue.append(Removed(0, [key]))
    assert len(queue) == 3
    while queue:
        core.on_event(queue.popleft(), 0.0)
    for put in under_way:
        put_ends(core, put)
    assert core.shared.kv_events.take_events() == [
        KVEvent(tuple(prompt), 0, removed=True),
        KVEvent(tuple(keys("b", 2)), 1, removed=False),
    ]
    queue.append(Removed(0, prompt[:1]))
    assert [event.keys for event in queue if isinstance(event, Removed)] == [prompt[:1]]


def test_events_of_flapping_tiers_do_not_pile_up() -> None:
    core, prompt, queue = make(8, 2), keys("a", 2), EventQueue()
    for put in puts(core, prompt):
        queue.append(TierDown(put.tier, "gone"))
        queue.append(PutEnded(put.id, [True] * 2))
    for epoch in range(100):
        queue.append(ProcessEnded("exited"))
        queue.append(TierDown(0, "gone"))
        queue.append(TierUp(0, epoch))
    assert len(queue) == 6, "an end of each put; of tiers the newest state, after the last time down"
    core.shared.kv_events.take_events()
    while queue:
        core.on_event(queue.popleft(), 0.0)
    first, second = core.shared.tiers
    assert (first.down, first.epoch, second.down) == (None, 99, "gone")
    assert core.take_counts()["process_ended", "exited"] == 100
    assert core.shared.kv_events.take_events() == [
        KVEvent(tuple(prompt), 0, removed=False),
        KVEvent(tuple(prompt), 0, removed=True),
    ]


def test_fetch_announces_found_and_lost() -> None:
    core, prompt = make(), keys("a", 3)
    (command,) = step(core, Request(), prompt)
    (again,) = answer(core, command, [COPIED, LOCATED, MISSING])  # for the located chunk
    assert core.shared.kv_events.take_events() == [
        KVEvent((prompt[0],), None, removed=False, found=True),
        KVEvent(tuple(prompt[:2]), 0, removed=False, found=True),
    ]
    answer(core, again, [MISSING])
    assert KVEvent((prompt[1],), 0, removed=True) in core.shared.kv_events.take_events()


def test_no_listener_no_announcement() -> None:
    announcements = KVEventLog(1, 3, enabled=False)
    announcements.stored(keys("a", 2), 0)
    assert announcements.take_events() == []


def test_request_id_forges_no_line():
    request = Request("a\nERROR forged")
    request.move(RequestEvent.ENDED)
    with pytest.raises(StateError, match=r"request 'a\\nERROR forged' is CLOSED"):
        request.move(RequestEvent.ENDED)


def test_preempted_stores_after_lookup() -> None:
    core, request = make(4), Request("a")
    core.restart(request)
    assert request.no_store is None, "it never had blocks"
    request.is_placed = True
    core.restart(request)
    assert request.no_store == "preempted"
    ask_all(core, request, keys("k", 1))
    assert request.no_store is None
    core.restart(request)  # by a reset before this round
    assert request.no_store is None
