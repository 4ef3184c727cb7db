"""States of chunks, requests and breakers, and the tables of allowed moves.

Integer enums hash and compare as fast as integers. An enum of names costs a Python call each time, a tenth of
the budget of a microsecond per chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, ClassVar

from kvtier.errors import StateError


class Lookup(IntEnum):
    """The answer to a lookup of one key, over all tiers."""

    MISS = 0
    HIT = 1  # the bytes are in the primary tier
    PENDING = 2  # they are being copied there
    RETRY = 3  # not known yet


class ChunkState(IntEnum):
    """The life of the chunk that a slot holds."""

    ABSENT = 0  # the slot is free
    FILLING = 1  # bytes are being copied into the slot
    READY = 2  # the bytes may be loaded
    DOOMED = 3  # hidden; the slot waits for the last copy or pin to end


class ChunkEvent(IntEnum):
    """Events of a chunk."""

    RESERVED = 0
    FILLED = 1
    EVICTED = 2
    DROPPED = 3  # by a failed copy, an audit or a reset
    FREED = 4


_FILLING, _READY, _DOOMED = ChunkState.FILLING, ChunkState.READY, ChunkState.DOOMED
CHUNK_MOVES: Mapping[ChunkEvent, Mapping[ChunkState, ChunkState]] = {
    ChunkEvent.RESERVED: {ChunkState.ABSENT: _FILLING},
    ChunkEvent.FILLED: {_FILLING: _READY},
    ChunkEvent.EVICTED: {_READY: ChunkState.ABSENT},
    ChunkEvent.DROPPED: dict.fromkeys((_FILLING, _READY, _DOOMED), _DOOMED),
    ChunkEvent.FREED: {_DOOMED: ChunkState.ABSENT},
}


class RequestState(IntEnum):
    """The life of a request, as far as its lookups go."""

    IDLE = 0  # no answer is pending
    WAITING = 1  # an answer is pending; its deadline runs
    EXPIRED = 2  # its deadline has passed: pending keys are misses
    CLOSED = 3  # the request has ended
    COMPUTED = 4  # a load failed: all its lookups miss, so it is computed


class RequestEvent(IntEnum):
    """Events of a request."""

    DEFERRED = 0
    SERVED = 1
    OVERDUE = 2
    ENDED = 3
    LOAD_FAILED = 4


_IDLE, _WAITING, _EXPIRED, _CLOSED, _COMPUTED = RequestState
REQUEST_MOVES: Mapping[RequestEvent, Mapping[RequestState, RequestState]] = {
    RequestEvent.DEFERRED: dict.fromkeys((_IDLE, _WAITING), _WAITING),
    RequestEvent.SERVED: {**dict.fromkeys((_IDLE, _WAITING, _EXPIRED), _IDLE), _COMPUTED: _COMPUTED},
    RequestEvent.OVERDUE: {_WAITING: _EXPIRED},
    RequestEvent.ENDED: dict.fromkeys((_IDLE, _WAITING, _EXPIRED, _COMPUTED), _CLOSED),
    RequestEvent.LOAD_FAILED: dict.fromkeys((_IDLE, _COMPUTED), _COMPUTED),
}


class BreakerState(IntEnum):
    """Whether a tier gets transfers of one verb."""

    CLOSED = 0  # it does
    HALF_OPEN = 1  # one probe is in flight; no other transfer starts
    OPEN = 2  # it does not, until a pause is over; then comes the next probe


class Stateful:
    """Base of chunks and requests: the state changes as a table says, and anything else raises."""

    __slots__ = ()
    MOVES: ClassVar[Mapping[Any, Mapping[Any, Any]]]
    state: Any

    def move(self, event: IntEnum) -> None:
        """Change the state as the table says. StateError if the event is not possible in this state."""
        try:
            self.state = self.MOVES[event][self.state]
        except KeyError:
            text = f"{self} is {self.state.name}, in which {event.name} is not possible"
            raise StateError(text) from None
