"""Keys by the age of their runs, for policies. A run's last key in its prompt is the first to leave."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import groupby, islice, takewhile
from typing import TypeVar

from kvtier.keys import OffloadKey
from kvtier.policies._base import Run

_SPARE_ENTRIES = 64


def take_first(keys: dict[OffloadKey, None], count: int) -> list[OffloadKey]:
    """Remove and return the first ``count`` keys, or all if there are fewer."""
    taken = list(islice(keys, count))
    for key in taken:
        del keys[key]
    return taken


class PartOfRun:
    """Keys of one run, in the order of the prompt."""

    __slots__ = ("_is_sorted", "keys", "run")

    def __init__(self, run: Run) -> None:
        self.run = run
        self.keys: dict[OffloadKey, None] = {}
        self._is_sorted = True

    def add(self, keys: Sequence[OffloadKey]) -> None:
        if not self.keys:
            self.keys, self._is_sorted = dict.fromkeys(keys), True
            return
        if self._is_sorted:
            place = self.run.place
            self._is_sorted = place(next(reversed(self.keys))) <= place(keys[0])
        self.keys.update(dict.fromkeys(keys))

    @property
    def depth(self) -> int:
        self._sort()
        return self.run.place(next(reversed(self.keys)))

    def pop(self, count: int) -> list[OffloadKey]:
        """Remove and return up to ``count`` keys, the last of the prompt first."""
        self._sort()
        keys = self.keys
        if count >= len(keys):
            self.keys = {}
            return list(reversed(keys))
        return [keys.popitem()[0] for _ in range(count)]

    def _sort(self) -> None:
        if not self._is_sorted:
            self.keys = dict.fromkeys(sorted(self.keys, key=self.run.place))
            self._is_sorted = True


PartT = TypeVar("PartT", bound=PartOfRun)


def deepest(parts: Iterable[PartT], count: int) -> tuple[PartT, int]:
    """Return the part of a run that ends last, and how many of ``count`` keys to take from it first."""
    first, *others = sorted(parts, key=lambda part: part.depth, reverse=True)
    if others:
        place, end = first.run.place, others[0].depth
        count = min(
            count, max(1, sum(1 for _ in takewhile(lambda key: place(key) > end, reversed(first.keys))))
        )
    return first, count


def run_of(keys: Sequence[OffloadKey], time: int) -> Run:
    """Return a separate run for keys in the order of their prompt."""
    return Run(time, {key: place for place, key in enumerate(keys)}.__getitem__)


class AgedKeys:
    """A set of keys in the order of the last use of their runs.

    The order is a heap of times. It is corrected only when a run is about to leave that was used meanwhile.
    So a use of a run or a late key costs no more than an entry.
    """

    __slots__ = ("_ages", "_homes", "_parts")

    def __init__(self) -> None:
        self._homes: dict[OffloadKey, int] = {}  # run numbers, which cost the garbage collector nothing
        self._parts: dict[int, PartOfRun] = {}
        self._ages: list[tuple[int, int]] = []  # a heap of times and numbers; some runs have no part left

    def add(self, run: Run, keys: Sequence[OffloadKey]) -> None:
        """Add keys of a run, in the order of the prompt; none of them may be present."""
        if not keys:
            return
        part = self._parts.get(run.number)
        if part is None:
            part = self._parts[run.number] = PartOfRun(run)
            heappush(self._ages, (run.time, run.number))
            if len(self._ages) > 2 * len(self._parts) + _SPARE_ENTRIES:
                self._ages = [(part.run.time, number) for number, part in self._parts.items()]
                heapify(self._ages)
        part.add(keys)
        homes, number = self._homes, run.number
        for key in keys:
            homes[key] = number

    def remove(self, keys: Iterable[OffloadKey]) -> None:
        """Remove keys, all of which must be present."""
        for number, those in groupby(keys, self._homes.pop):
            left = self._parts[number].keys
            for key in those:
                del left[key]
            if not left:
                del self._parts[number]

    def oldest(self) -> Run:
        """Return the least recently used run. There must be a key."""
        ages, parts = self._ages, self._parts
        while (part := parts.get(ages[0][1])) is None or part.run.time > ages[0][0]:
            if part is None:
                heappop(ages)
            else:
                heapreplace(ages, (part.run.time, part.run.number))
        return part.run

    def part(self, run: Run) -> PartOfRun | None:
        """Return the keys of a run, or None if there are none."""
        return self._parts.get(run.number)

    def pop_of(self, run: Run, count: int) -> list[OffloadKey]:
        """Remove and return up to ``count`` keys of a run, the last of the prompt first."""
        part = self._parts[run.number]
        taken, homes = part.pop(count), self._homes
        for key in taken:
            del homes[key]
        if not part.keys:
            del self._parts[run.number]
        return taken

    def pop_oldest(self, count: int) -> list[OffloadKey]:
        """Remove and return up to ``count`` keys, from the oldest run first."""
        taken: list[OffloadKey] = []
        while len(taken) < count and self._parts:
            taken += self.pop_of(self.oldest(), count - len(taken))
        return taken

    def clear(self) -> None:
        self._homes.clear()
        self._parts.clear()
        self._ages.clear()

    def __len__(self) -> int:
        return len(self._homes)

    def __contains__(self, key: object) -> bool:
        return key in self._homes
