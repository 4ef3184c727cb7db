"""The status of each tier, and back-pressure: how many chunks may be put into it now, and got from it.

A dropped put costs a later hit. A put that waits too long costs slots of the primary tier now, and one that
slows down a get delays a request now. So puts are dropped first.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from kvtier._core.messages import TransferHealth
from kvtier._core.states import BreakerState
from kvtier._core.tiers.breaker import Breaker
from kvtier._core.tiers.write_admission import WriteAdmission

_DRAIN_SHARE = 0.5  # share of a deadline within which queued puts should end
_SLOW_SHARE = 0.75

_WEIGHT = 0.3  # weight of the last put in the running mean
_SLOWED = 2.0  # a get that takes this many times its usual time is held up
_NOTICEABLE_S = 0.02  # ... if the excess is at least this
_LEAST_SHARE = 1 / 64
_RECOVERY_BY_GET = 1 / 16
_RECOVERY_BY_PUT = 1 / 32
_DRIFT = 0.2
_QUICKEST_S = 1e-6


class PutPressure:
    """Bounds the chunks in flight to one tier.

    There are two bounds. Queued chunks must end within ``drain_s``, at the recent time per chunk. And while
    puts make gets slower than usual, fewer are admitted: each delayed get halves the share, each other get
    raises it a little. The tier works on ``width`` puts at once.
    """

    def __init__(self, drain_s: float, width: int) -> None:
        self.share = 1.0  # share of the bound that is admitted now; delayed gets lower it
        self._drain_s = drain_s
        self._width = width
        self._chunk_s: float | None = None
        self._usual_s: dict[int, float] = {}  # time of a get, by its number of chunks in powers of two
        self._halved_s = -inf

    def room(self, backlog: int) -> float:
        """Return how many more chunks may be put now, while ``backlog`` of them are in flight.

        One is admitted whenever none is in flight: otherwise a tier that is fast again would go unnoticed.
        """
        if self._chunk_s is None:
            return inf
        of_one_put = self._drain_s / self._chunk_s * self.share
        return max(0.0, min(of_one_put, self._width * of_one_put - backlog), 0.0 if backlog else 1.0)

    def put_ended(self, chunks: int, seconds: float) -> None:
        """Update the rate by a put that was answered or given up."""
        chunk_s = max(seconds, _QUICKEST_S) / chunks
        before_s = self._chunk_s
        self._chunk_s = chunk_s if before_s is None else before_s + _WEIGHT * (chunk_s - before_s)
        self.share = min(1.0, self.share + _RECOVERY_BY_PUT)

    def get_ended(self, chunks: int, seconds: float, now_s: float, *, beside_puts: bool) -> None:
        """Halve or restore the share by the time of a get, and by whether puts were in flight."""
        size = chunks.bit_length()
        usual_s = self._usual_s.setdefault(size, seconds)
        if seconds <= _SLOWED * usual_s or seconds - usual_s < _NOTICEABLE_S:
            self.share = min(1.0, self.share + _RECOVERY_BY_GET)
        elif beside_puts and now_s - seconds >= self._halved_s:  # it started after the last halving
            self.share = max(_LEAST_SHARE, self.share / 2)
            self._halved_s = now_s
        if seconds < usual_s or not beside_puts:
            self._usual_s[size] = min(seconds, usual_s + _DRIFT * (seconds - usual_s))


class TierStatus:
    """The state of one tier, and the puts and gets that it allows.

    It works on ``width`` puts at once. ``in_place``: its gets verify adopted chunks in their own slots, and
    there are no others.
    """

    def __init__(
        self,
        name: str,
        deadline_s: float = 5.0,
        *,
        width: int = 4,
        breaker: Callable[[], Breaker] = Breaker,
        writes: WriteAdmission | None = None,
        in_place: bool = False,
    ) -> None:
        self.name = name
        self.in_place = in_place
        self.deadline_s = deadline_s
        self.puts = breaker()
        self.gets = breaker()
        self.backlog = 0  # chunks that its puts pin now
        self.down: str | None = None  # why it is unusable; None if it is usable
        self.epoch = 0  # epoch of its last reset
        self.failed_audit = False  # one of its chunks was damaged: it is disabled until a restart
        self.pressure = PutPressure(deadline_s * _DRAIN_SHARE, width)
        self.writes = writes or WriteAdmission()

    @property
    def disabled_reason(self) -> str | None:
        """The reason why it gets no work at all, or None."""
        return "audit" if self.failed_audit else "down" if self.down is not None else None

    @property
    def works(self) -> bool:
        return self.disabled_reason is None and self.puts.is_closed and self.gets.is_closed

    @property
    def is_healthy(self) -> bool | None:
        """Whether its last real put and get ended in time; None before the first."""
        worst = max(self.puts.health, self.gets.health)
        if self.disabled_reason is not None or worst > TransferHealth.GOOD:
            return False
        return True if worst is TransferHealth.GOOD else None

    def get_refusal(self, now_s: float) -> str | None:
        """Return the reason why no get may start now, or None."""
        return self.disabled_reason or self.gets.refusal(now_s)

    def put_room(self, count: int, most_backlog: int, now_s: float) -> tuple[int, str]:
        """Return how many of ``count`` chunks may be put now, and the reason for refusing the rest."""
        refusal = self.disabled_reason or self.puts.refusal(now_s)
        if refusal is not None:
            return 0, refusal
        room = max(0, most_backlog - self.backlog)
        if self.puts.state is not BreakerState.CLOSED:  # the probe: it may hang, and pin its slots
            return min(count, room, 1), "breaker_open" if room else "backlog"
        allowed = self.pressure.room(self.backlog)
        if allowed < room:
            return min(count, int(allowed)), "back_pressure"
        return min(count, room), "backlog"

    def judge(self, health: TransferHealth, seconds: float, *, is_put: bool) -> TransferHealth:
        """Return the health of a transfer. A get that took most of its deadline has failed; a put has not."""
        is_slow = health is TransferHealth.GOOD and not is_put and seconds > self.deadline_s * _SLOW_SHARE
        return TransferHealth.BAD if is_slow else health
