"""The core disables a tier after an audit finds a damaged chunk of it."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier._core.messages import Get, Reset, TierUp
from kvtier._core.requests import Request
from kvtier._core.states import Lookup
from kvtier._core.tiering import Tiering
from kvtier._core.tiers.tier_status import TierStatus
from kvtier.keys import OffloadKey
from kvtier.policies import ARC
from kvtier_testing import invariants
from tests.unit.core.world import (
    COPIED,
    GOOD,
    HIT,
    MISS,
    MISSING,
    RETRY,
    answer,
    ask_all,
    fetches,
    keys,
    reserve,
    step,
    store,
)
from tests.unit.core.world import make as core_of

KEYS, OTHERS = keys("k", 4), keys("o", 2)


def make() -> Tiering:
    statuses = [TierStatus("near"), TierStatus("far")]
    return core_of(8, statuses, ARC(), budget=1.0, put_backlog=1.0)


def fetch(core: Tiering, request: Request, keys: Sequence[OffloadKey], tier: int) -> Get:
    """Have a request ask until the given tier is asked for its keys."""
    begun = step(core, request, keys)
    for _ in range(tier):
        begun = answer(core, begun[0], [MISSING] * len(keys), health=GOOD)
    (command,) = begun
    assert command.tier == tier
    return command


def promote(core: Tiering, request: Request, keys: Sequence[OffloadKey], tier: int = 0) -> None:
    answer(core, fetch(core, request, keys, tier), [COPIED] * len(keys), health=GOOD)


def outcome(core: Tiering, request: Request, keys: Sequence[OffloadKey]) -> list[Lookup]:
    """Ask until nothing is pending, with tiers that have nothing."""
    for _ in range(10):
        answers = ask_all(core, request, keys)
        core.settle(0.0)
        begun = fetches(core)
        while begun:
            command = begun.pop()
            begun += answer(core, command, [MISSING] * len(command.keys), health=GOOD)
        if RETRY not in answers:
            return answers
    raise AssertionError("no end")


def test_only_failed_tiers_chunks_drop() -> None:
    core, request = make(), Request()
    store(core, OTHERS)
    promote(core, request, KEYS[:2], tier=1)
    promote(core, Request(), KEYS[2:], tier=0)
    core.shared.kv_events.take_events()
    core.disable_after_audit(1, "somewhere")
    invariants.check(core)

    assert outcome(core, request, KEYS[:2]) == [MISS] * 2
    assert ask_all(core, Request(), [*OTHERS, *KEYS[2:]]) == [HIT] * 4
    assert core.refusal is None
    changes = [change for change in core.shared.kv_events.take_events() if change.removed]
    assert [set(change.keys) for change in changes if change.tier is None] == [set(KEYS[:2])]
    assert {key for change in changes if change.tier == 1 for key in change.keys} >= {*OTHERS, *KEYS[:2]}


def test_failed_tier_says_why() -> None:
    core = make()
    core.disable_after_audit(0, "somewhere")
    core.on_event(TierUp(0, 0), 0.0)
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
    assert notice.subject == "tier near"
    assert "somewhere" in notice.text


def test_failed_tier_is_reset() -> None:
    core = make()
    core.disable_after_audit(0, "somewhere")
    core.reset()
    assert core.take_commands() == [Reset(0, 1), Reset(1, 1)]


def test_failed_tiers_arrivals_are_lost() -> None:
    core, request = make(), Request()
    command = fetch(core, request, KEYS, 0)
    core.disable_after_audit(0, "somewhere")
    (other,) = answer(core, command, [COPIED] * 4, health=GOOD)
    assert other.tier == 1  # the next one is asked


def test_damaged_primary_tier_refuses() -> None:
    core, waiting, served = make(), Request(), Request()
    store(core, OTHERS)
    promote(core, served, KEYS[:1], tier=0)
    assert outcome(core, served, KEYS[:1]) == [HIT]
    command = fetch(core, waiting, KEYS[2:], 0)
    under_way = reserve(core, keys("stored meanwhile"))
    loaded = core.acquire(OTHERS)
    core.disable_after_audit(None, "somewhere")

    answer(core, command, [COPIED] * 2, health=GOOD)
    core.commit(under_way, 0.0)
    core.release(loaded)
    invariants.check(core)
    assert core.refusal == "audit"
    assert outcome(core, waiting, KEYS[2:]) == [MISS] * 2
    assert outcome(core, Request(), [*under_way.keys, *OTHERS]) == [MISS] * 3
    assert core.reserve(KEYS) is None
    assert len(core.table.free) == 8
    assert core.take_counts()["store_refused", "audit"] == 4
