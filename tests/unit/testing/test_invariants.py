"""Each invariant can fail. Only here is the core's state damaged on purpose."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier._core.admission import Limits, TierGate
from kvtier._core.chunks import Chunk
from kvtier._core.messages import Fetch, PutEnded, SlotsReady
from kvtier._core.requests import Request
from kvtier._core.states import BreakerState, ChunkState, RequestState
from kvtier._core.tiering import Tiering
from kvtier.keys import pack_key
from kvtier.policies._lru import LRU
from kvtier_testing import invariants

READY, PUT, FETCHED, OTHER = map(pack_key, (b"ready", b"put", b"fetched", b"other"))


@pytest.fixture
def core() -> Tiering:
    """One chunk that is READY, one that is being put, one that is being fetched, one slot that is free."""
    core = Tiering(LRU(), [TierGate("t0")], Limits(promotion_budget=1.0, landing_reserve=0.0))
    core.on_event(SlotsReady(range(4)), 0.0)
    for key in (READY, PUT):
        reservation = core.reserve([key])
        assert reservation is not None
        core.commit(reservation, 0.0)
    core.on_event(PutEnded(core.take_commands()[0].id, [True]), 0.0)  # type: ignore[union-attr]
    core.lookup(FETCHED, Request())
    core.settle(0.0)
    (fetch,) = core.take_commands()
    assert isinstance(fetch, Fetch)
    assert len(fetch.slots) == 1
    invariants.check(core)
    return core


def pins_of_filling_lost(core: Tiering) -> None:
    next(chunk for chunk in core.table if chunk.state is ChunkState.FILLING).pins = 0
    for transfer in core.shared.transfers.values():
        if not transfer.is_put:
            transfer.chunks.clear()


@pytest.mark.parametrize(
    ("message", "damage"),
    [
        ("a slot is free once", lambda core: core.table.free.append(core.table.free[0])),
        ("visible under one key", lambda core: core.table.visible.update({OTHER: core.table.visible[PUT]})),
        ("has the pins of its users, 1", lambda core: setattr(core.table.visible[PUT], "pins", 0)),
        ("free and held slots are all slots", lambda core: core.table.free.append(Chunk(99))),
        ("is free or in use", lambda core: core.table.free.clear()),
        ("may be seen", lambda core: setattr(core.table.visible[PUT], "state", ChunkState.DOOMED)),
        ("is READY and can be found", lambda core: core.table.visible.pop(PUT)),
        ("waits for an end", pins_of_filling_lost),
        ("is known to the policy as it is", lambda core: core.table.policy.pin([READY])),
        ("is known to the policy as it is", lambda core: core.table.policy.add([PUT], used=False)),
        ("found by their own keys", lambda core: setattr(core.table.visible[PUT], "key", FETCHED)),
        ("knows no more than there is", lambda core: core.table.policy.add([OTHER], used=False)),
        ("what lands is pinned", lambda core: core.promotions.landing.add(core.table.visible[READY])),
        (
            "nothing is held for a closed request",
            lambda core: setattr(next(iter(core.promotions.holders)), "state", RequestState.CLOSED),
        ),
        ("the backlog of t0", lambda core: setattr(core.shared.tiers[0], "backlog", 7)),
        ("the overdue puts of t0", lambda core: setattr(core.shared.tiers[0].puts, "overdue", 1)),
        (
            "the breaker of the gets of t0",
            lambda core: setattr(core.shared.tiers[0].gets, "state", BreakerState.HALF_OPEN),
        ),
    ],
)
def test_damage_is_seen(core: Tiering, message: str, damage: Callable[[Tiering], object]) -> None:
    damage(core)
    with pytest.raises(AssertionError, match=f"invariant: .*{message}"):
        invariants.check(core)
