"""Copies that failed: what is dropped, what stays, and what a request is told afterwards."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.core.admission import Limits, TierGate
from kvtier.core.announcements import Change
from kvtier.core.messages import Answer, Fetch, Fetched, Put, PutEnded, SlotsReady
from kvtier.core.policies.arc import ARC
from kvtier.core.requests import Request
from kvtier.core.states import Lookup
from kvtier.core.tiering import Tiering
from kvtier.core.transfers import Pinned
from kvtier.keys import OffloadKey, pack_key
from kvtier_testing import invariants

KEYS = [pack_key(f"k{index}".encode()) for index in range(4)]


def make(tiers: int = 0) -> Tiering:
    gates = [TierGate(f"t{index}") for index in range(tiers)]
    core = Tiering(
        ARC(), gates, Limits(promotion_budget=1.0, landing_reserve=0.0, put_backlog=1.0), track_changes=True
    )
    core.on_event(SlotsReady(range(8)), 0.0)
    return core


def store(core: Tiering, keys: Sequence[OffloadKey]) -> None:
    reservation = core.reserve(keys)
    assert reservation is not None
    core.commit(reservation, 0.0)


def load(core: Tiering, request: Request, keys: Sequence[OffloadKey] = KEYS) -> Pinned:
    assert ask(core, request, keys) == [Lookup.HIT] * len(keys)
    pinned = core.acquire(keys, request)
    core.settle(0.0)
    return pinned


def ask(core: Tiering, request: Request, keys: Sequence[OffloadKey] = KEYS) -> list[Lookup]:
    return [core.lookup(key, request) for key in keys]


def test_chunks_of_a_failed_store_are_never_seen() -> None:
    core = make(tiers=1)
    reservation = core.reserve(KEYS)
    assert reservation is not None
    core.fail_store(reservation)
    invariants.check(core)
    assert core.take_commands() == []
    assert core.take_changes() == []
    assert len(core.table.free) == 8
    assert core.take_counts() == {("dropped", "store"): 4}


def test_chunks_of_a_failed_load_are_dropped_and_announced() -> None:
    core = make()
    store(core, KEYS)
    pinned = load(core, Request("a"), KEYS[:3])
    core.take_changes()
    core.fail_load(pinned)
    invariants.check(core)
    assert core.take_changes() == [Change(tuple(KEYS[:3]), None, True)]
    assert ask(core, Request("b")) == [Lookup.MISS] * 3 + [Lookup.HIT]
    assert len(core.table.free) == 7
    assert core.take_counts()["dropped", "load"] == 3


def test_a_request_whose_load_failed_is_told_miss_for_ever_and_others_are_not() -> None:
    core = make(tiers=1)
    store(core, KEYS)
    request = Request("a")
    core.fail_load(load(core, request), request)
    store(core, KEYS)
    for _ in range(3):
        assert ask(core, request) == [Lookup.MISS] * 4
        assert ask(core, Request("b")) == [Lookup.HIT] * 4
        core.settle(0.0)
        invariants.check(core)
    core.restart(request)  # preempted
    assert ask(core, request) == [Lookup.MISS] * 4
    assert core.take_counts()["miss", "load_failed"] == 16
    core.close(request)
    invariants.check(core)


def test_a_request_that_is_asked_about_in_the_round_in_which_its_load_fails() -> None:
    core = make(tiers=1)
    store(core, KEYS)
    request = Request("a")
    pinned = load(core, request)
    other = [*KEYS, pack_key(b"elsewhere")]
    assert ask(core, request, other)[-1] is Lookup.RETRY
    core.fail_load(pinned, request)
    assert ask(core, request, other) == [Lookup.MISS] * 5
    core.settle(0.0)
    invariants.check(core)
    assert not any(isinstance(command, Fetch) for command in core.take_commands())


def test_a_slot_is_given_on_only_when_the_last_who_reads_it_has_ended() -> None:
    core = make(tiers=1)
    store(core, KEYS)
    (put,) = core.take_commands()
    assert isinstance(put, Put)
    first, second = load(core, Request("a")), load(core, Request("b"))
    core.fail_load(first)
    core.fail_load(second)
    invariants.check(core)
    assert len(core.table.free) == 4
    core.on_event(PutEnded(put.id, [True] * 4), 0.0)
    invariants.check(core)
    assert len(core.table.free) == 8


def test_dropped_chunks_come_back_from_a_tier_for_other_requests() -> None:
    core = make(tiers=1)
    store(core, KEYS)
    (put,) = core.take_commands()
    assert isinstance(put, Put)
    core.on_event(PutEnded(put.id, [True] * 4), 0.0)
    core.fail_load(load(core, Request("a")))
    core.take_commands()
    other = Request("b")
    assert ask(core, other) == [Lookup.RETRY] * 4
    core.settle(0.0)
    (fetch,) = [command for command in core.take_commands() if isinstance(command, Fetch)]
    core.on_event(Fetched(fetch.id, [Answer.LANDED] * len(fetch.keys)), 0.0)
    assert ask(core, other) == [Lookup.HIT] * 4
    invariants.check(core)


def test_a_load_that_fails_after_a_reset_drops_nothing_that_came_since() -> None:
    core = make()
    store(core, KEYS)
    pinned = load(core, Request("a"))
    core.reset()
    store(core, KEYS)
    core.fail_load(pinned)
    invariants.check(core)
    assert ask(core, Request("b")) == [Lookup.HIT] * 4
    assert core.take_counts()["dropped", "load"] == 0
