"""Who may be put into which tier now, and what may be fetched now."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from kvtier.keys import OffloadKey


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds that the core keeps. Fractions are of the primary tier's slots.

    Attributes:
        request_deadline_s: how long a request waits for pending answers.
        promotion_budget: slots that promotions may hold which no request has loaded yet.
        landing_reserve: slots kept free, so that a fetch can bring chunks at once with the answer.
        put_backlog: slots that the puts of one tier may pin.
        store_threshold: how often a chunk must be offered before it is stored; below 2, at once.
        max_tracker_size: keys whose offers are remembered for the threshold.
        max_announced: keys of each tier that may be announced as being there, where that is done at all.
    """

    request_deadline_s: float = 5.0
    promotion_budget: float = 0.25
    landing_reserve: float = 1 / 32
    put_backlog: float = 0.5
    store_threshold: int = 0
    max_tracker_size: int = 64_000
    max_announced: int = 250_000


class Breaker(IntEnum):
    """Whether a tier is given work."""

    CLOSED = 0  # it is
    HALF_OPEN = 1  # it is given one transfer, to see how that goes
    OPEN = 2  # it is not, for now


@dataclass(slots=True)
class TierGate:
    """What the core knows of one tier's condition.

    Attributes:
        name: the tier's name.
        deadline_s: how long one of its transfers is waited for.
        backlog: chunks that its puts pin now.
        overdue: transfers past their deadline that have not ended. While there is one the tier gets
            no work: it would only tie up more slots.
        down: why it can not be used any more, or None.
    """

    name: str
    deadline_s: float = 5.0
    backlog: int = 0
    overdue: int = 0
    down: str | None = None

    @property
    def closed(self) -> str | None:
        """The reason why the tier gets no work now, or None."""
        if self.down is not None:
            return "down"
        return "unresponsive" if self.overdue else None

    @property
    def breaker(self) -> Breaker:
        """OPEN while a transfer is overdue: it has to end before the tier gets work again."""
        return Breaker.OPEN if self.overdue else Breaker.CLOSED


class ReuseTracker:
    """Counts offers of keys, for ``store_threshold``: what comes once only is not worth a slot."""

    def __init__(self, threshold: int, size: int) -> None:
        self._threshold = threshold
        self._size = size
        self._offers: OrderedDict[OffloadKey, int] = OrderedDict()

    def admit(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Count an offer of each key; return the leading ones that were offered often enough."""
        offers = self._offers
        admitted: list[OffloadKey] = []
        for position, key in enumerate(keys):
            offers[key] = count = offers.get(key, 0) + 1
            offers.move_to_end(key)
            if count >= self._threshold and len(admitted) == position:
                admitted.append(key)
        while len(offers) > self._size:
            offers.popitem(last=False)
        return admitted
