"""Transfers in flight, and the handles of stores and loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from kvtier._core.chunks import Chunk
from kvtier._core.requests import Request
from kvtier._core.tiers.breaker import Breaker
from kvtier.keys import OffloadKey


class SlotUse(IntEnum):
    """The slots that a get may use for chunks that it finds."""

    NONE = 0  # none: it only locates
    FREE = 1  # free ones
    EVICT = 2  # free ones, and evictions for the next chunks found, which are certainly wanted


@dataclass(slots=True, eq=False)
class Transfer:
    """A put or a get that was submitted to a tier. Fields from ``left`` on are for gets alone."""

    id: int
    tier: int
    keys: Sequence[OffloadKey]
    chunks: Sequence[Chunk]  # chunks whose slots it reads or writes; for a get, of the leading keys
    deadline_s: float  # on the owner's clock
    is_put: bool
    breaker: Breaker  # the breaker of its tier and verb
    is_overdue: bool = False  # the deadline has passed: the answer is a miss, but slots are still in use
    left: frozenset[OffloadKey] = frozenset()  # keys that left the tier meanwhile, as far as it is tracked
    slot_use: SlotUse = SlotUse.NONE
    waiters: dict[Request, None] = field(default_factory=dict)  # all may be served from the same tiers
    located: bool = False  # its keys were known to be in the tier
    is_probe: bool = False  # it only measures the tier; no request waits for it
    is_poll: bool = False  # all its waiters already know that no tier has its first key
    load: int = 0  # chunks that all gets of the tier were to copy when it started; 0 if not measured

    @property
    def verb(self) -> str:
        """The name of the operation in metrics and logs."""
        return "put" if self.is_put else "get"


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """Chunks that the owner copies to or from, until it ends the handle."""

    chunks: Sequence[Chunk]  # in the order of their keys

    @property
    def slots(self) -> list[int]:
        """The slots to copy to or from, in the order of the keys."""
        return [chunk.slot for chunk in self.chunks]


@dataclass(frozen=True, slots=True, eq=False)
class Reservation(Handle):
    """Slots for a store. Exactly one ``commit`` or ``abort`` ends it."""

    keys: Sequence[OffloadKey]  # keys with a slot: a prefix of the new keys
    evicted: Sequence[OffloadKey]


@dataclass(frozen=True, slots=True, eq=False)
class Pinned(Handle):
    """Chunks pinned for a load. Exactly one ``release`` ends it."""

    origins: Sequence[int | None]  # tier that each chunk came from; None for the primary tier
