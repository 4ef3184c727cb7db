"""Each invariant can fail. Only here is the core's state damaged on purpose."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier.core.admission import Limits, TierGate
from kvtier.core.chunks import Chunk
from kvtier.core.messages import Fetch, PutEnded, SlotsReady
from kvtier.core.policies.lru import LRU
from kvtier.core.requests import Request
from kvtier.core.states import BreakerState, ChunkState, RequestState
from kvtier.core.tiering import Tiering
from kvtier.keys import pack_key
from kvtier_testing import invariants

READY, PUT, FETCHED = pack_key(b"ready"), pack_key(b"put"), pack_key(b"fetched")


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


def chunk_of(core: Tiering, state: ChunkState) -> Chunk:
    return next(chunk for chunk in core.table if chunk.state is state)


def _free_twice(core: Tiering) -> None:
    core.table.free.append(core.table.free[0])


def _two_names(core: Tiering) -> None:
    core.table.visible[pack_key(b"other")] = core.table.visible[PUT]


def _lost_pin(core: Tiering) -> None:
    core.table.visible[PUT].pins = 0


def _strange_slot(core: Tiering) -> None:
    core.table.free.append(Chunk(99))


def _lost_slot(core: Tiering) -> None:
    core.table.free.clear()


def _visible_but_doomed(core: Tiering) -> None:
    core.table.visible[PUT].state = ChunkState.DOOMED


def _ready_but_hidden(core: Tiering) -> None:
    del core.table.visible[PUT]


def _filling_for_ever(core: Tiering) -> None:
    chunk_of(core, ChunkState.FILLING).pins = 0
    for transfer in core.shared.transfers.values():
        if not transfer.is_put:
            transfer.chunks.clear()


def _unknown_to_the_policy(core: Tiering) -> None:
    core.table.policy.pin([READY])


def _known_to_the_policy(core: Tiering) -> None:
    core.table.policy.add([PUT], used=False)


def _wrong_name(core: Tiering) -> None:
    core.table.visible[PUT].key = FETCHED


def _policy_knows_strangers(core: Tiering) -> None:
    core.table.policy.add([pack_key(b"stranger")], used=False)


def _lands_without_pin(core: Tiering) -> None:
    core.promotions.landing.add(core.table.visible[READY])


def _held_for_the_dead(core: Tiering) -> None:
    next(iter(core.promotions.holders)).state = RequestState.CLOSED


def _wrong_backlog(core: Tiering) -> None:
    core.shared.tiers[0].backlog += 1


def _wrong_overdue(core: Tiering) -> None:
    core.shared.tiers[0].puts.overdue += 1


def _lost_probe(core: Tiering) -> None:
    core.shared.tiers[0].gets.state = BreakerState.HALF_OPEN


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_free_twice, "a slot is free once"),
        (_two_names, "visible under one key"),
        (_lost_pin, "has the pins of its users, 1"),
        (_strange_slot, "free and held slots are all slots"),
        (_lost_slot, "is free or in use"),
        (_visible_but_doomed, "may be seen"),
        (_ready_but_hidden, "is READY and can be found"),
        (_filling_for_ever, "waits for an end"),
        (_unknown_to_the_policy, "is known to the policy as it is"),
        (_known_to_the_policy, "is known to the policy as it is"),
        (_wrong_name, "found by their own keys"),
        (_policy_knows_strangers, "knows no more than there is"),
        (_lands_without_pin, "what lands is pinned"),
        (_held_for_the_dead, "nothing is held for a closed request"),
        (_wrong_backlog, "the backlog of t0"),
        (_wrong_overdue, "the overdue puts of t0"),
        (_lost_probe, "the breaker of the gets of t0"),
    ],
)
def test_damage_is_seen(core: Tiering, damage: Callable[[Tiering], None], message: str) -> None:
    damage(core)
    with pytest.raises(AssertionError, match=f"invariant: .*{message}"):
        invariants.check(core)
