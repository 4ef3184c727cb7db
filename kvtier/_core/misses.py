"""Misses of requests: why each lookup missed, counted once for each chunk of a request."""

from __future__ import annotations

from kvtier._core.requests import Request
from kvtier._core.shared import SharedState
from kvtier._core.states import Lookup
from kvtier.keys import OffloadKey

_MISS = Lookup.MISS


class Misses:
    """Counts the misses of each round, except of requests that are asked again, each of a request once.

    The engine repeats a scan whose answers are pending, and one of a request that it cannot schedule yet.
    """

    def __init__(self, shared: SharedState) -> None:
        self._counts = shared.counts
        self.requests: list[Request] = []  # those with misses in this round

    def note(self, round_: object, key: OffloadKey, request: Request, reason: str) -> Lookup:
        """Note a miss, and return the answer."""
        if not request.misses:
            self.requests.append(request)
        request.misses[key] = reason
        if request.record is not None:
            request.record.missed(round_, key, reason)
        return _MISS

    def count(self, round_: object) -> None:
        """Count the misses of the round that ends."""
        reasons: list[str] = []
        for request in self.requests:
            misses, request.misses = request.misses, {}
            if request.is_prefetch or (request.wanted and request.round is round_):
                continue
            for counted in misses.keys() & request.missed:
                del misses[counted]
            reasons += misses.values()
            request.missed.update(misses)
        for reason in set(reasons):
            self._counts["miss", reason] += reasons.count(reason)
        self.requests.clear()
