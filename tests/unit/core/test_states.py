"""Every move of the tables is made; every other one is refused."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from itertools import product

import pytest

from kvtier.core.breaker import Breaker
from kvtier.core.chunks import Chunk
from kvtier.core.requests import Request
from kvtier.core.states import (
    BREAKER_MOVES,
    CHUNK_MOVES,
    REQUEST_MOVES,
    TRANSFER_MOVES,
    BreakerEvent,
    BreakerState,
    ChunkEvent,
    ChunkState,
    RequestEvent,
    RequestState,
    TransferEvent,
    TransferState,
)
from kvtier.core.transfers import Transfer
from kvtier.errors import StateError

CHUNKS = list(product(ChunkEvent, ChunkState))
REQUESTS = list(product(RequestEvent, RequestState))
TRANSFERS = list(product(TransferEvent, TransferState))
BREAKERS = list(product(BreakerEvent, BreakerState))


@pytest.mark.parametrize(("event", "state"), CHUNKS)
def test_chunk_moves(event: ChunkEvent, state: ChunkState) -> None:
    chunk = Chunk(7)
    chunk.state = state
    if state in CHUNK_MOVES[event]:
        chunk.move(event)
        assert chunk.state is CHUNK_MOVES[event][state]
    else:
        with pytest.raises(StateError, match=f"slot 7.*{state.name}: {event.name}"):
            chunk.move(event)
        assert chunk.state is state


@pytest.mark.parametrize(("event", "state"), REQUESTS)
def test_request_moves(event: RequestEvent, state: RequestState) -> None:
    request = Request("r1")
    request.state = state
    if state in REQUEST_MOVES[event]:
        request.move(event)
        assert request.state is REQUEST_MOVES[event][state]
    else:
        with pytest.raises(StateError, match=f"request r1 is {state.name}: {event.name}"):
            request.move(event)
        assert request.state is state


@pytest.mark.parametrize(("event", "state"), BREAKERS)
def test_breaker_moves(event: BreakerEvent, state: BreakerState) -> None:
    breaker = Breaker()
    breaker.state = state
    if state in BREAKER_MOVES[event]:
        breaker.move(event)
        assert breaker.state is BREAKER_MOVES[event][state]
    else:
        with pytest.raises(StateError, match=f"breaker .* is {state.name}: {event.name}"):
            breaker.move(event)
        assert breaker.state is state


@pytest.mark.parametrize(("event", "state"), TRANSFERS)
def test_transfer_moves(event: TransferEvent, state: TransferState) -> None:
    transfer = Transfer(3, 0, (), [], 0.0, is_put=True, state=state)
    if state in TRANSFER_MOVES[event]:
        transfer.move(event)
        assert transfer.state is TRANSFER_MOVES[event][state]
    else:
        with pytest.raises(StateError, match=f"transfer 3 is {state.name}: {event.name}"):
            transfer.move(event)
        assert transfer.state is state


@pytest.mark.parametrize(
    ("moves", "start", "end"),
    [
        (CHUNK_MOVES, ChunkState.ABSENT, None),
        (REQUEST_MOVES, RequestState.IDLE, RequestState.CLOSED),
        (TRANSFER_MOVES, TransferState.RUNNING, TransferState.ENDED),
    ],
)
def test_every_state_is_reached_and_only_the_last_is_final(
    moves: Mapping[IntEnum, Mapping[IntEnum, IntEnum]], start: IntEnum, end: IntEnum | None
) -> None:
    reached = {start} | {after for table in moves.values() for after in table.values()}
    assert reached == set(type(start))
    for state in type(start):
        leaves = any(table.get(state, state) is not state for table in moves.values())
        assert leaves is (state is not end)
