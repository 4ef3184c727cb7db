"""Back-pressure: how many chunks may be in flight to a tier, by how fast it is.

A dropped put costs a later hit. One that waits too long costs slots of the primary tier now, and one that
slows down a get costs a request that waits now. So puts are dropped first.
"""

from __future__ import annotations

from math import inf

_WEIGHT = 0.3  # of the last put in the running mean
_SLOWED = 2.0  # times what it usually takes: then a get is held up
_NOTICEABLE_S = 0.02  # ... by that much at least
_LEAST_SHARE = 1 / 64
_RECOVERY_BY_GET = 1 / 16
_RECOVERY_BY_PUT = 1 / 32
_DRIFT = 0.2
_QUICKEST_S = 1e-6


class PutPressure:
    """Bounds the chunks that are being put into one tier.

    Two things bound them. What is queued must be through within ``drain_s``, by the time that a chunk has
    taken lately. And while puts make gets take longer than they usually do fewer of them are let in: half
    as many at each get that was held up, a little more at each that was not.

    Args:
        drain_s: seconds within which all that is queued should be put.
        width: puts that the tier works on at once.

    Attributes:
        share: which share of the bound is let in now, for the sake of the gets.
    """

    def __init__(self, drain_s: float, width: int) -> None:
        self.share = 1.0
        self._drain_s = drain_s
        self._width = width
        self._chunk_s: float | None = None
        self._usual_s: dict[int, float] = {}  # of a get, by the number of its chunks, in powers of two
        self._halved_s = -inf

    def room(self, backlog: int) -> float:
        """Return how many chunks more may be put at once while ``backlog`` of them are on their way.

        One is let in whenever nothing is under way, or nobody would find out that the tier is fast again.
        """
        if self._chunk_s is None:
            return inf
        of_one_put = self._drain_s / self._chunk_s * self.share
        return max(0.0, min(of_one_put, self._width * of_one_put - backlog), 0.0 if backlog else 1.0)

    def put_ended(self, chunks: int, seconds: float) -> None:
        """Update the rate by a put that was answered, or given up."""
        chunk_s = max(seconds, _QUICKEST_S) / chunks
        before_s = self._chunk_s
        self._chunk_s = chunk_s if before_s is None else before_s + _WEIGHT * (chunk_s - before_s)
        self.share = min(1.0, self.share + _RECOVERY_BY_PUT)

    def get_ended(self, chunks: int, seconds: float, now_s: float, *, beside_puts: bool) -> None:
        """Halve or restore the share by the time of a get, and whether puts were in flight."""
        size = chunks.bit_length()
        usual_s = self._usual_s.setdefault(size, seconds)
        if seconds <= _SLOWED * usual_s or seconds - usual_s < _NOTICEABLE_S:
            self.share = min(1.0, self.share + _RECOVERY_BY_GET)
        elif beside_puts and now_s - seconds >= self._halved_s:  # it began after the last such step
            self.share = max(_LEAST_SHARE, self.share / 2)
            self._halved_s = now_s
        if seconds < usual_s:
            self._usual_s[size] = seconds
        elif not beside_puts:
            self._usual_s[size] = usual_s + _DRIFT * (seconds - usual_s)
