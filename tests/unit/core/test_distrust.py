"""A tier that an audit has found a damaged chunk of is not used any more: what follows in the core."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvtier.core.admission import Limits, TierGate
from kvtier.core.messages import (
    Answer,
    Fetch,
    Fetched,
    Put,
    PutEnded,
    Reset,
    SlotsReady,
    TierUp,
    TransferHealth,
)
from kvtier.core.policies.arc import ARC
from kvtier.core.requests import Request
from kvtier.core.states import Lookup
from kvtier.core.tiering import Tiering
from kvtier.keys import OffloadKey, pack_key
from kvtier_testing import invariants

KEYS = [pack_key(f"k{index}".encode()) for index in range(4)]
OTHERS = [pack_key(f"o{index}".encode()) for index in range(2)]


def make() -> Tiering:
    gates = [TierGate("near"), TierGate("far")]
    core = Tiering(
        ARC(), gates, Limits(promotion_budget=1.0, landing_reserve=0.0, put_backlog=1.0), track_changes=True
    )
    core.on_event(SlotsReady(range(8)), 0.0)
    return core


def ask(core: Tiering, request: Request, keys: Sequence[OffloadKey]) -> list[Lookup]:
    return [core.lookup(key, request) for key in keys]


def store(core: Tiering, keys: Sequence[OffloadKey]) -> None:
    reservation = core.reserve(keys)
    assert reservation is not None
    core.commit(reservation, 0.0)
    for command in core.take_commands():
        assert isinstance(command, Put)
        core.on_event(PutEnded(command.id, [True] * len(keys), health=TransferHealth.GOOD), 0.0)


def fetch(core: Tiering, request: Request, keys: Sequence[OffloadKey], tier: int) -> Fetch:
    """Have a request ask until the given tier is asked for its keys."""
    ask(core, request, keys)
    core.settle(0.0)
    for _ in range(tier):
        (command,) = core.take_commands()
        assert isinstance(command, Fetch)
        core.on_event(Fetched(command.id, [Answer.MISSING] * len(keys), health=TransferHealth.GOOD), 0.0)
    (command,) = core.take_commands()
    assert isinstance(command, Fetch)
    assert command.tier == tier
    return command


def bring(core: Tiering, request: Request, keys: Sequence[OffloadKey], tier: int = 0) -> None:
    command = fetch(core, request, keys, tier)
    core.on_event(Fetched(command.id, [Answer.LANDED] * len(keys), health=TransferHealth.GOOD), 0.0)
    core.take_commands()  # puts into the tiers before it


def outcome(core: Tiering, request: Request, keys: Sequence[OffloadKey]) -> list[Lookup]:
    """Ask until nothing is pending, with tiers that have nothing."""
    for _ in range(10):
        answers = ask(core, request, keys)
        core.settle(0.0)
        for command in core.take_commands():
            assert isinstance(command, Fetch)
            core.on_event(
                Fetched(command.id, [Answer.MISSING] * len(command.keys), health=TransferHealth.GOOD), 0.0
            )
        if Lookup.RETRY not in answers:
            return answers
    raise AssertionError("no end")


def test_what_a_tier_gave_is_dropped_and_what_others_gave_stays() -> None:
    core, request = make(), Request()
    store(core, OTHERS)
    bring(core, request, KEYS[:2], tier=1)
    bring(core, Request(), KEYS[2:], tier=0)
    core.take_changes()
    assert core.distrust(1, "somewhere") == "far"
    invariants.check(core)

    assert outcome(core, request, KEYS[:2]) == [Lookup.MISS] * 2
    assert ask(core, Request(), [*OTHERS, *KEYS[2:]]) == [Lookup.HIT] * 4
    assert not core.is_distrusted
    changes = [change for change in core.take_changes() if change.removed]
    assert [set(change.keys) for change in changes if change.tier is None] == [set(KEYS[:2])]
    assert {key for change in changes if change.tier == 1 for key in change.keys} >= {*OTHERS, *KEYS[:2]}


def test_what_was_loaded_from_it_before_stays_until_it_is_evicted() -> None:
    core, request = make(), Request()
    bring(core, request, KEYS, tier=0)
    assert ask(core, request, KEYS) == [Lookup.HIT] * 4
    core.release(core.acquire(KEYS, request))
    core.distrust(0, "somewhere")
    assert ask(core, Request(), KEYS) == [Lookup.HIT] * 4


def test_it_gets_no_work_any_more_and_says_why_even_when_it_comes_up() -> None:
    core = make()
    core.distrust(0, "somewhere")
    core.on_event(TierUp(0), 0.0)
    store(core, OTHERS)
    outcome(core, Request(), KEYS)
    core.settle(1000.0)

    counts = core.take_counts()
    assert counts["put_dropped", "near", "audit"] == 2
    assert counts["skipped", "near", "audit"] >= 4
    assert counts["audit_failed", "near"] == 1
    assert ("put", "near") not in counts
    assert counts["put", "far"] == 2
    assert core.shared.tiers[0].is_healthy is False
    (notice,) = core.take_notices()
    assert (notice.subject, notice.is_good) == ("tier near", False)
    assert "somewhere" in notice.text


def test_it_is_reset_all_the_same() -> None:
    core = make()
    core.distrust(0, "somewhere")
    core.reset()
    assert core.take_commands() == [Reset(0, 1), Reset(1, 1)]


def test_what_it_is_about_to_bring_does_not_land() -> None:
    core, request = make(), Request()
    command = fetch(core, request, KEYS, 0)
    core.distrust(0, "somewhere")
    core.on_event(Fetched(command.id, [Answer.LANDED] * 4, health=TransferHealth.GOOD), 0.0)
    invariants.check(core)
    (other,) = core.take_commands()
    assert isinstance(other, Fetch)
    assert other.tier == 1  # the next one is asked


def test_where_the_primary_tier_is_damaged_nothing_is_there_and_nothing_comes() -> None:
    core, waiting, served = make(), Request(), Request()
    store(core, OTHERS)
    bring(core, served, KEYS[:1], tier=0)
    assert outcome(core, served, KEYS[:1]) == [Lookup.HIT]
    command = fetch(core, waiting, KEYS[2:], 0)
    under_way = core.reserve([pack_key(b"stored meanwhile")])
    loaded = core.acquire(OTHERS)
    assert under_way is not None
    assert core.distrust(None, "somewhere") == "cpu"

    core.on_event(Fetched(command.id, [Answer.LANDED] * 2, health=TransferHealth.GOOD), 0.0)
    core.commit(under_way, 0.0)
    core.release(loaded)
    invariants.check(core)
    assert core.is_distrusted
    assert outcome(core, waiting, KEYS[2:]) == [Lookup.MISS] * 2
    assert outcome(core, Request(), [*under_way.keys, *OTHERS]) == [Lookup.MISS] * 3
    assert core.reserve(KEYS) is None
    assert len(core.table.free) == 8
    assert core.take_counts()["store_refused", "audit"] == 4


def test_damage_that_is_found_before_a_put_ends_all_when_the_round_is_over() -> None:
    core, request = make(), Request()
    reservation = core.reserve(KEYS)
    assert reservation is not None
    core.commit(reservation, 0.0)
    puts = core.take_commands()
    assert ask(core, request, KEYS) == [Lookup.HIT] * 4
    for put in puts:
        assert isinstance(put, Put)
        core.on_event(PutEnded(put.id, [False] * 4, {"audit": 4}), 0.0)
    core.release(core.acquire(KEYS, request))  # a HIT holds to the end of its round
    core.settle(0.0)

    invariants.check(core)
    assert core.is_distrusted
    counts = core.take_counts()
    assert counts["audit_failed", "cpu"] == 1
    assert counts["put_failed", "near", "audit"] == 4


@pytest.mark.parametrize("tier", [0, None])
def test_it_may_be_told_more_than_once(tier: int | None) -> None:
    core = make()
    core.distrust(tier, "here")
    core.distrust(tier, "there")
    core.distrust(1, "there")
    invariants.check(core)
