"""Transfers that are under way, and the handles of stores and loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from kvtier._core.chunks import Chunk
from kvtier._core.requests import Request
from kvtier._core.tiers.breaker import Breaker
from kvtier.keys import OffloadKey


class SlotUse(IntEnum):
    """Which slots a get may use for what it finds."""

    NONE = 0  # none: it only locates
    FREE = 1  # free ones
    EVICT = 2  # free ones, and evictions for what is found next to that: it is wanted for certain


@dataclass(slots=True, eq=False)
class Transfer:
    """A put or a get that was submitted to a tier. What follows ``left`` is of gets alone.

    Attributes:
        is_overdue: whether the deadline has passed: the answer is a miss. Slots stay in use until it ends.
        left: keys that have left the tier since it began, by a reset too, where anybody wants to know.
        is_poll: whether all who wait for it were told before that no tier has its first key.
        load: the chunks that gets of the tier were to copy when it began, its own included; 0 where nobody
            wants to know.
    """

    id: int
    tier: int
    keys: Sequence[OffloadKey]
    chunks: Sequence[Chunk]  # whose slots it reads or writes; of a get those of the leading keys
    deadline_s: float  # when it is no longer waited for, on the owner's clock
    is_put: bool
    breaker: Breaker  # of its tier and verb
    is_overdue: bool = False
    left: frozenset[OffloadKey] = frozenset()
    slot_use: SlotUse = SlotUse.NONE
    waiters: dict[Request, None] = field(default_factory=dict)  # all may be served from the same tiers
    located: bool = False  # its keys were known to be in the tier
    is_probe: bool = False  # it only shows how fast the tier is; nobody waits for it
    is_poll: bool = False
    load: int = 0

    @property
    def verb(self) -> str:
        """How metrics and logs name what the tier does."""
        return "put" if self.is_put else "get"


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """Chunks that the owner copies to or from, until it ends that."""

    chunks: Sequence[Chunk]  # in the order of their keys

    @property
    def slots(self) -> list[int]:
        """The slots to copy to or from, in the order of the keys."""
        return [chunk.slot for chunk in self.chunks]


@dataclass(frozen=True, slots=True, eq=False)
class Reservation(Handle):
    """Slots for a store: to be ended by exactly one ``commit`` or ``abort``."""

    keys: Sequence[OffloadKey]  # that were given a slot: a prefix of the new ones among those asked for
    evicted: Sequence[OffloadKey]


@dataclass(frozen=True, slots=True, eq=False)
class Pinned(Handle):
    """Chunks pinned for a load: to be ended by exactly one ``release``."""

    origins: Sequence[int | None]  # the tier that each chunk came from, None for the primary one
