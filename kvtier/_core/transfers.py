"""Transfers that are under way, and the handles of stores and loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from kvtier._core.chunks import Chunk
from kvtier._core.requests import Request
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
        deadline_s: when it is no longer waited for, on the owner's clock.
        is_overdue: whether that has passed: its answer is a miss; its slots stay in use until it ends.
        slot_use: of a get, which slots it may use.
        located: of a get, whether its keys were known to be in the tier.
        left: keys that have left the tier since it began, by a reset too, where anybody wants to know.
    """

    id: int
    tier: int
    keys: Sequence[OffloadKey]
    chunks: list[Chunk]
    deadline_s: float
    is_put: bool
    slot_use: SlotUse = SlotUse.NONE
    allowed: frozenset[int] | None = None
    waiters: dict[Request, None] = field(default_factory=dict)
    is_overdue: bool = False
    located: bool = False
    left: frozenset[OffloadKey] = frozenset()

    @property
    def verb(self) -> str:
        """How metrics and logs name what the tier does."""
        return "put" if self.is_put else "get"


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """Slots for a store: to be ended by exactly one ``commit`` or ``abort``.

    Attributes:
        keys: the keys that were given a slot, a prefix of the new ones among those asked for.
        chunks: their chunks, in the same order.
        evicted: keys that had to go.
    """

    keys: Sequence[OffloadKey]
    chunks: Sequence[Chunk]
    evicted: Sequence[OffloadKey]

    @property
    def slots(self) -> list[int]:
        """The slots to copy to, in the order of ``keys``."""
        return [chunk.slot for chunk in self.chunks]


@dataclass(frozen=True, slots=True, eq=False)
class Pinned:
    """Chunks pinned for a load: to be ended by exactly one ``release``.

    Attributes:
        chunks: the chunks, in the order of their keys.
        origins: for each chunk the index of the tier that it came from, None for the primary one.
    """

    chunks: Sequence[Chunk]
    origins: Sequence[int | None]

    @property
    def slots(self) -> list[int]:
        """The slots to copy from."""
        return [chunk.slot for chunk in self.chunks]
