"""Copies that failed: what is dropped, what stays, and what a request is told afterwards."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier._core.announcements import Change
from kvtier._core.requests import Request
from kvtier._core.tiering import Tiering
from kvtier._core.transfers import Pinned
from kvtier.keys import OffloadKey, pack_key
from kvtier.policies._arc import ARC
from kvtier_testing import invariants
from tests.unit.core.world import (
    HIT,
    LANDED,
    MISS,
    RETRY,
    answer,
    ask_all,
    fetches,
    keys,
    make,
    put_ends,
    puts,
    reserve,
    store,
)

KEYS = keys("k", 4)


def load(core: Tiering, request: Request, keys: Sequence[OffloadKey] = KEYS) -> Pinned:
    assert ask_all(core, request, keys) == [HIT] * len(keys)
    pinned = core.acquire(keys, request)
    core.settle(0.0)
    return pinned


def test_chunks_of_a_failed_store_are_never_seen() -> None:
    core = make(8, policy=ARC(), budget=1.0, put_backlog=1.0)
    core.fail_store(reserve(core, KEYS))
    invariants.check(core)
    assert core.take_commands() == []
    assert core.take_changes() == []
    assert len(core.table.free) == 8
    assert core.take_counts() == {("dropped", "store"): 4}


def test_chunks_of_a_failed_load_are_dropped_and_announced() -> None:
    core = make(8, 0, ARC())
    store(core, KEYS)
    pinned = load(core, Request("a"), KEYS[:3])
    core.take_changes()
    core.fail_load(pinned)
    invariants.check(core)
    assert core.take_changes() == [Change(tuple(KEYS[:3]), None, True)]
    assert ask_all(core, Request("b"), KEYS) == [MISS] * 3 + [HIT]
    assert len(core.table.free) == 7
    assert core.take_counts()["dropped", "load"] == 3


def test_a_request_whose_load_failed_is_told_miss_for_ever_and_others_are_not() -> None:
    core = make(8, policy=ARC(), budget=1.0, put_backlog=1.0)
    store(core, KEYS)
    request = Request("a")
    core.fail_load(load(core, request), request)
    store(core, KEYS)
    for _ in range(3):
        assert ask_all(core, request, KEYS) == [MISS] * 4
        assert ask_all(core, Request("b"), KEYS) == [HIT] * 4
        core.settle(0.0)
        invariants.check(core)
    core.restart(request)  # preempted
    assert ask_all(core, request, KEYS) == [MISS] * 4
    assert core.take_counts()["miss", "load_failed"] == 16
    core.close(request)
    invariants.check(core)


def test_a_request_that_is_asked_about_in_the_round_in_which_its_load_fails() -> None:
    core = make(8, policy=ARC(), budget=1.0, put_backlog=1.0)
    store(core, KEYS)
    request = Request("a")
    pinned = load(core, request)
    other = [*KEYS, pack_key(b"elsewhere")]
    assert ask_all(core, request, other)[-1] is RETRY
    core.fail_load(pinned, request)
    assert ask_all(core, request, other) == [MISS] * 5
    core.settle(0.0)
    invariants.check(core)
    assert fetches(core) == []


def test_a_slot_is_given_on_only_when_the_last_who_reads_it_has_ended() -> None:
    core = make(8, policy=ARC(), budget=1.0, put_backlog=1.0)
    (command,) = puts(core, KEYS)
    first, second = load(core, Request("a")), load(core, Request("b"))
    core.fail_load(first)
    core.fail_load(second)
    invariants.check(core)
    assert len(core.table.free) == 4
    put_ends(core, command)
    assert len(core.table.free) == 8


def test_dropped_chunks_come_back_from_a_tier_for_other_requests() -> None:
    core = make(8, policy=ARC(), budget=1.0, put_backlog=1.0)
    store(core, KEYS)
    core.fail_load(load(core, Request("a")))
    core.take_commands()
    other = Request("b")
    assert ask_all(core, other, KEYS) == [RETRY] * 4
    core.settle(0.0)
    (fetch,) = fetches(core)
    answer(core, fetch, [LANDED] * len(fetch.keys))
    assert ask_all(core, other, KEYS) == [HIT] * 4
    invariants.check(core)


def test_a_load_that_fails_after_a_reset_drops_nothing_that_came_since() -> None:
    core = make(8, 0, ARC())
    store(core, KEYS)
    pinned = load(core, Request("a"))
    core.reset()
    store(core, KEYS)
    core.fail_load(pinned)
    invariants.check(core)
    assert ask_all(core, Request("b"), KEYS) == [HIT] * 4
    assert core.take_counts()["dropped", "load"] == 0
