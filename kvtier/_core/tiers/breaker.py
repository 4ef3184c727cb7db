"""Breakers: one for the puts and one for the gets of each tier.

A breaker sees only how real transfers end. It opens when too many of them fail, or when one passes its
deadline. After a pause it lets one probe through, whose end decides.
"""

from __future__ import annotations

from collections import deque
from math import inf

from kvtier._core.messages import TransferHealth
from kvtier._core.states import BreakerState
from kvtier._core.tiers.backoff import Backoff, RandomSource, no_jitter

_CLOSED, _HALF_OPEN, _OPEN = BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN
_WINDOW = 20  # it opens if half of these transfers fail, once half are known
_LONGEST_PAUSES = 60  # longest pause while probes fail, as a multiple of the first
_RELAPSE_PAUSES = 4


class Breaker:
    """Decides whether a tier gets transfers of one verb now.

    ``failures`` in a row open it; the first probe follows after ``pause_s`` seconds.
    """

    def __init__(self, failures: int = 5, pause_s: float = 1.0, chance: RandomSource = no_jitter) -> None:
        self.state: BreakerState = _CLOSED
        # Transfers past their deadline that still run: another one would only tie up more slots.
        self.overdue = 0
        self.health = TransferHealth.NONE  # by the last transfer that gave evidence
        self._failures = failures
        self._backoff = Backoff(pause_s, _LONGEST_PAUSES * pause_s, chance)
        self._until_s = -inf
        self._closed_s = -inf
        self.probe: int | None = None  # the transfer that decides, while it is HALF_OPEN
        self._in_a_row = 0
        self._recent: deque[bool] = deque(maxlen=_WINDOW)

    @property
    def is_closed(self) -> bool:
        """Whether transfers start normally."""
        return self.state is _CLOSED and not self.overdue

    def refusal(self, now_s: float) -> str | None:
        """Return the reason why no transfer may start now, or None. In OPEN a probe may."""
        if self.overdue:
            return "unresponsive"
        if self.state is _CLOSED or (self.state is _OPEN and now_s >= self._until_s):
            return None
        return "breaker_open"

    def note_start(self, transfer_id: int) -> None:
        if self.state is _OPEN:
            self.state = _HALF_OPEN
            self.probe = transfer_id

    def note_late(self, transfer_id: int, now_s: float) -> str | None:
        """Note that a transfer has passed its deadline. Return as ``note_end`` does."""
        self.overdue += 1
        return self._judge(transfer_id, TransferHealth.LATE, now_s)

    def note_end(
        self, transfer_id: int, health: TransferHealth, now_s: float, *, in_time: bool
    ) -> str | None:
        """Note that a transfer has ended; return "closed", the reason for opening, or None."""
        if in_time:
            return self._judge(transfer_id, health, now_s)
        self.overdue -= 1  # its lateness was counted already
        return None

    def _judge(self, transfer_id: int, health: TransferHealth, now_s: float) -> str | None:
        if health is not TransferHealth.NONE:
            self.health = health
        if self.state is _HALF_OPEN and transfer_id == self.probe:
            return self._end_probe(health, now_s)
        if self.state is not _CLOSED or health is TransferHealth.NONE:
            return None  # transfers from before it opened give no new evidence
        return self._count(health, now_s)

    def _end_probe(self, health: TransferHealth, now_s: float) -> str | None:
        self.probe = None
        if health is TransferHealth.NONE:
            self.state = _OPEN  # the pause is over: the next one is a probe again
            return None
        if health is not TransferHealth.GOOD:
            return self._trip("probe", now_s)
        self.state = _CLOSED
        self._closed_s = now_s
        self._in_a_row = 0
        self._recent.clear()
        return "closed"

    def _count(self, health: TransferHealth, now_s: float) -> str | None:
        failed = health is not TransferHealth.GOOD
        self._in_a_row = self._in_a_row + 1 if failed else 0
        self._recent.append(failed)
        if health is TransferHealth.LATE:
            return self._trip("overdue", now_s)
        if self._in_a_row >= self._failures:
            return self._trip("failures", now_s)
        if failed and 2 * sum(self._recent) >= len(self._recent) >= _WINDOW / 2:
            return self._trip("failure_rate", now_s)
        return None

    def _trip(self, reason: str, now_s: float) -> str:
        relapse = now_s < self._closed_s + _RELAPSE_PAUSES * self._backoff.pause_s
        if self.state is _CLOSED and not relapse:
            self._backoff.reset()
        self.state = _OPEN
        self._until_s = now_s + self._backoff.next_s()
        return reason
