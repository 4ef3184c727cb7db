"""What must hold of the core between any two calls. Costs time in proportion to the slots."""

from __future__ import annotations

from collections import Counter

from kvtier.core.chunks import Chunk
from kvtier.core.states import ChunkState
from kvtier.core.tiering import Tiering


def check(core: Tiering) -> None:
    """Compare the core's state with what follows from the handles that are out.

    Raises:
        AssertionError: an invariant does not hold; the message says which.
    """
    table = core.table
    expected = _expected_pins(core)
    free, visible = set(table.free), set(table.visible.values())
    _require(len(free) == len(table.free), "a slot is free once")
    _require(len(visible) == len(table.visible), "a chunk is visible under one key")
    candidates = 0
    for chunk in table.all:
        state = chunk.state
        _require(chunk.pins == expected[chunk], f"{chunk} has the pins of its users, {expected[chunk]}")
        _require((chunk in free) is (state is ChunkState.ABSENT), f"{chunk} is free or in use")
        _require(
            chunk not in visible or state in (ChunkState.READY, ChunkState.FILLING), f"{chunk} may be seen"
        )
        _require(state is not ChunkState.READY or chunk in visible, f"{chunk} is READY and can be found")
        _require(
            state not in (ChunkState.FILLING, ChunkState.DOOMED) or chunk.pins > 0,
            f"{chunk} waits for an end",
        )
        if chunk in visible:
            candidate = state is ChunkState.READY and not chunk.pins
            _require((chunk.key in table.policy) is candidate, f"{chunk} is known to the policy as it is")
            candidates += candidate
    held = sum(1 for chunk in table.all if chunk.state is not ChunkState.ABSENT)
    _require(len(free) + held == len(table.all), "free and held slots are all slots")
    _require(
        all(table.visible[key].key == key for key in table.visible), "chunks are found by their own keys"
    )
    _require(len(table.policy) == candidates, "the policy knows no more than there is")
    _require(all(chunk.pins for chunk in core.promotions.landing), "what lands is pinned")
    _require(
        all(request.state.name != "CLOSED" for request in core.promotions.holders),
        "nothing is held for a closed request",
    )
    _check_backlog(core)


def _expected_pins(core: Tiering) -> Counter[Chunk]:
    pins: Counter[Chunk] = Counter()
    for reservation in core.reservations:
        pins.update(reservation.chunks)
    for pinned in core.pinned:
        pins.update(pinned.chunks)
    for transfer in core.ledger.transfers.values():
        pins.update(transfer.chunks)
    for request in core.promotions.holders:
        pins.update(list(request.held))
    return pins


def _check_backlog(core: Tiering) -> None:
    for index, gate in enumerate(core.ledger.tiers):
        mine = [transfer for transfer in core.ledger.transfers.values() if transfer.tier == index]
        backlog = sum(len(transfer.chunks) for transfer in mine if transfer.is_put)
        _require(gate.backlog == backlog, f"the backlog of {gate.name} is that of its puts")
        overdue = sum(transfer.state.name == "OVERDUE" for transfer in mine)
        _require(gate.overdue == overdue, f"the overdue transfers of {gate.name} are counted")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(f"invariant: {what}")
