"""Who may be put into which tier now, and what may be fetched now."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier._core.backoff import RandomSource, no_jitter
from kvtier._core.breaker import Breaker, BreakerRules
from kvtier._core.messages import TransferHealth
from kvtier._core.pressure import PutPressure
from kvtier._core.states import BreakerState
from kvtier.keys import OffloadKey

_DRAIN_SHARE = 0.5  # of a deadline: what is queued should be through by then
_SLOW_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds that the core keeps. Fractions are of the primary tier's slots.

    Attributes:
        request_deadline_s: how long a request waits for pending answers.
        promotion_budget: slots that promotions may hold which no request has loaded yet.
        landing_reserve: slots kept free, so that a fetch can bring chunks at once with the answer.
        put_backlog: slots that puts may pin. A tier has an equal share of them, and what the others
            leave: a slow one starves neither them nor the stores.
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


class TierGate:
    """What the core knows of one tier's condition, and what follows for its puts and gets.

    Args:
        name: the tier's name.
        deadline_s: how long one of its transfers is waited for.
        width: puts that it works on at once.
        rules: when its breakers open.
        chance: the source of chance.

    Attributes:
        puts: the breaker of its puts.
        gets: the breaker of its gets.
        backlog: chunks that its puts pin now.
        down: why it can not be used, or None.
        distrusted: whether an audit has found a chunk of it damaged: it is not used any more.
    """

    def __init__(
        self,
        name: str,
        deadline_s: float = 5.0,
        *,
        width: int = 4,
        rules: BreakerRules | None = None,
        chance: RandomSource = no_jitter,
    ) -> None:
        self.name = name
        self.deadline_s = deadline_s
        self.puts = Breaker(rules, chance)
        self.gets = Breaker(rules, chance)
        self.backlog = 0
        self.down: str | None = None
        self.distrusted = False
        self._pressure = PutPressure(deadline_s * _DRAIN_SHARE, width)

    @property
    def overdue(self) -> int:
        """Transfers past their deadline that have not ended."""
        return self.puts.overdue + self.gets.overdue

    @property
    def unusable(self) -> str | None:
        """The reason why it is given no work at all, or None."""
        if self.distrusted:
            return "audit"
        return None if self.down is None else "down"

    @property
    def works(self) -> bool:
        """Whether nothing keeps it from being given work."""
        return self.unusable is None and self.puts.is_closed and self.gets.is_closed

    @property
    def is_healthy(self) -> bool | None:
        """Whether its last real put and get were answered in time; None where there was none yet."""
        known = {self.puts.health, self.gets.health}
        if self.unusable is not None or not known.isdisjoint((TransferHealth.BAD, TransferHealth.LATE)):
            return False
        return True if TransferHealth.GOOD in known else None

    def of(self, *, puts: bool) -> Breaker:
        """Return the breaker of the puts, or of the gets."""
        return self.puts if puts else self.gets

    def get_refusal(self, now_s: float) -> str | None:
        """Return the reason why no get is begun now, or None."""
        return self.unusable or self.gets.refusal(now_s)

    def put_room(self, count: int, most_backlog: int, now_s: float) -> tuple[int, str]:
        """Return how many of ``count`` chunks are put now, and why not the others.

        Args:
            count: chunks that there are to be put.
            most_backlog: chunks that the tier's puts may pin.
            now_s: the owner's clock.
        """
        refusal = self.unusable or self.puts.refusal(now_s)
        if refusal is not None:
            return 0, refusal
        room = max(0, most_backlog - self.backlog)
        if self.puts.state is not BreakerState.CLOSED:  # the probe: it may hang, and pin its slots
            return min(count, room, 1), "breaker_open" if room else "backlog"
        allowed = self._pressure.room(self.backlog)
        if allowed < room:
            return min(count, int(allowed)), "back_pressure"
        return min(count, room), "backlog"

    def put_ended(self, chunks: int, health: TransferHealth, seconds: float) -> None:
        """Update the back-pressure by a put's duration. Puts that failed at once are ignored."""
        if health in (TransferHealth.GOOD, TransferHealth.LATE) and seconds:
            self._pressure.put_ended(chunks, seconds)

    def get_ended(self, chunks: int, health: TransferHealth, seconds: float, now_s: float) -> None:
        """Update the back-pressure by the time of a get, which puts in flight may have slowed down."""
        if health is TransferHealth.GOOD and seconds and chunks:
            self._pressure.get_ended(chunks, seconds, now_s, beside_puts=self.backlog > 0)

    def judge(self, health: TransferHealth, seconds: float, *, is_put: bool) -> TransferHealth:
        """Return the health of a transfer: a get that took most of its deadline has failed; a put has not."""
        is_slow = health is TransferHealth.GOOD and not is_put and seconds > self.deadline_s * _SLOW_SHARE
        return TransferHealth.BAD if is_slow else health


class ReuseTracker:
    """Counts offers of keys, for ``store_threshold``: what comes once only is not worth a slot."""

    def __init__(self, threshold: int, size: int) -> None:
        self._threshold = threshold
        self._size = size
        self._offers: OrderedDict[OffloadKey, int] = OrderedDict()

    def admit(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Count an offer of each key; return the leading ones that were offered often enough."""
        if self._threshold < 2:
            return list(keys)
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
