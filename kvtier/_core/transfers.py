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
    """A put or a get that was submitted to a tier.

    Attributes:
        chunks: the chunks whose slots it reads or writes; of a get those of the leading keys.
        waiters: of a get, the requests that want its keys; an ordered set. They may all be served
            from the same tiers.
        allowed: of a get, the tiers that its waiters may be served from; None for all of them.
        breaker: the one of its tier and verb.
        deadline_s: when it is no longer waited for, on the owner's clock.
        is_overdue: whether that has passed: its answer is a miss; its slots stay in use until it ends.
        slot_use: of a get, which slots it may use.
        located: of a get, whether its keys were known to be in the tier.
        is_probe: of a get, whether it only shows how fast the tier is; nobody waits for it.
        is_poll: of a get, whether all who wait for it were told before that no tier has its first key.
        load: of a get, the chunks that gets of the tier were to copy when it began, its own included; 0 where
            nobody wants to know.
        left: keys that have left the tier since it began, by a reset too, where anybody wants to know.
    """

    id: int
    tier: int
    keys: Sequence[OffloadKey]
    chunks: Sequence[Chunk]
    deadline_s: float
    is_put: bool
    breaker: Breaker
    slot_use: SlotUse = SlotUse.NONE
    allowed: frozenset[int] | None = None
    waiters: dict[Request, None] = field(default_factory=dict)
    is_overdue: bool = False
    located: bool = False
    is_probe: bool = False
    is_poll: bool = False
    load: int = 0
    left: frozenset[OffloadKey] = frozenset()

    @property
    def verb(self) -> str:
        """How metrics and logs name what the tier does."""
        return "put" if self.is_put else "get"


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """Chunks that the owner copies to or from, until it ends that.

    Attributes:
        chunks: the chunks, in the order of their keys.
    """

    chunks: Sequence[Chunk]

    @property
    def slots(self) -> list[int]:
        """The slots to copy to or from, in the order of the keys."""
        return [chunk.slot for chunk in self.chunks]


@dataclass(frozen=True, slots=True, eq=False)
class Reservation(Handle):
    """Slots for a store: to be ended by exactly one ``commit`` or ``abort``.

    Attributes:
        keys: the keys that were given a slot, a prefix of the new ones among those asked for.
        evicted: keys that had to go.
    """

    keys: Sequence[OffloadKey]
    evicted: Sequence[OffloadKey]


@dataclass(frozen=True, slots=True, eq=False)
class Pinned(Handle):
    """Chunks pinned for a load: to be ended by exactly one ``release``.

    Attributes:
        origins: for each chunk the index of the tier that it came from, None for the primary one.
    """

    origins: Sequence[int | None]
