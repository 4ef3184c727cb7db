"""The choice among several holders of a chunk: the one expected to deliver it first."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

from kvtier.keys import OffloadKey

_DEFAULT_S: Final = 0.001
"""Seconds per chunk of a peer that was not measured lately: its share of a large get measures it."""
_VALID_S: Final = 30.0
_NEWEST: Final = 0.5  # weight of the newest measurement

HolderT = TypeVar("HolderT")


class Pace:
    """How fast chunks are read from one peer.

    Args:
        clock: seconds, monotonic.

    Attributes:
        in_flight: number of chunks being read from it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.in_flight = 0
        self._clock = clock
        self._chunk_s = _DEFAULT_S
        self._measured_s = clock() - _VALID_S

    @contextmanager
    def reading(self, count: int) -> Iterator[None]:
        """Time a read of ``count`` chunks. A failed read is not measured."""
        self.in_flight += count
        load, begun_s = self.in_flight, self._clock()
        try:
            yield
            self._measure((self._clock() - begun_s) / load)
        finally:
            self.in_flight -= count

    def expected_s(self, more: int) -> float:
        """Return the seconds until ``more`` chunks have been read, behind those in flight."""
        is_valid = self._clock() - self._measured_s < _VALID_S
        return (self.in_flight + more) * (self._chunk_s if is_valid else _DEFAULT_S)

    def _measure(self, chunk_s: float) -> None:
        now_s = self._clock()
        weight = _NEWEST if now_s - self._measured_s < _VALID_S else 1.0
        self._chunk_s += weight * (chunk_s - self._chunk_s)
        self._measured_s = now_s


def share_out(
    holders: Mapping[OffloadKey, Sequence[HolderT]], pace: Callable[[HolderT], Pace]
) -> dict[OffloadKey, HolderT]:
    """Return one holder for each key. A large get is split among holders by their throughput."""
    given: Counter[HolderT] = Counter()
    chosen: dict[OffloadKey, HolderT] = {}
    for key, choices in holders.items():
        holder = min(choices, key=lambda one: pace(one).expected_s(given[one] + 1))
        given[holder] += 1
        chosen[key] = holder
    return chosen
