"""Keys by age, for policies: as cheap as a dict, and the oldest ones can be taken in batches."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from kvtier.keys import OffloadKey

_AHEAD = 1024


def take_first(keys: dict[OffloadKey, None], count: int) -> list[OffloadKey]:
    """Remove and return the first ``count`` keys, or all where there are fewer."""
    taken = list(islice(keys, count))
    for key in taken:
        del keys[key]
    return taken


class AgedKeys:
    """A set of keys in the order in which they were added.

    Not an OrderedDict: one of 100,000 keys that grows holds the owner's thread for 20 ms. A dict grows ten
    times faster, but what was taken from its front leaves a gap to be walked over each time. So the oldest
    are moved out ahead, many at once.
    """

    __slots__ = ("_oldest", "_rest")

    def __init__(self) -> None:
        self._oldest: dict[OffloadKey, None] = {}
        self._rest: dict[OffloadKey, None] = {}

    def add(self, keys: Iterable[OffloadKey]) -> None:
        """Add keys as the youngest ones; none of them is there."""
        self._rest.update(dict.fromkeys(keys))

    def remove(self, key: OffloadKey) -> None:
        if key in self._rest:
            del self._rest[key]
        else:
            del self._oldest[key]

    def pop_oldest(self, count: int) -> list[OffloadKey]:
        """Remove and return up to ``count`` keys, the oldest first."""
        if len(self._oldest) < count:
            moved = take_first(self._rest, count - len(self._oldest) + _AHEAD)
            self._oldest.update(dict.fromkeys(moved))
        return take_first(self._oldest, max(0, count))

    def clear(self) -> None:
        self._oldest.clear()
        self._rest.clear()

    def __len__(self) -> int:
        return len(self._oldest) + len(self._rest)

    def __contains__(self, key: object) -> bool:
        return key in self._rest or key in self._oldest
