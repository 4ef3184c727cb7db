"""Promotes chunks for prompts that clients have announced, before these arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Final

from kvtier._core.promotion.holds import Holds
from kvtier._core.requests import Request
from kvtier._core.retention import MOST_PER_SLOT, SPARE_ENTRIES, Retention
from kvtier._core.shared import SharedState
from kvtier._core.states import Lookup
from kvtier.keys import OffloadKey, group_index

_AT_ONCE: Final = 32
"""Chunks looked up in a round. It bounds the time that this takes from a step of the engine."""


@dataclass(frozen=True, slots=True)
class _Announced:
    """Chunks that are promoted from ``tiers`` from ``from_s`` on, then kept until ``until_s``."""

    keys: Sequence[OffloadKey]
    from_s: float
    until_s: float
    tiers: frozenset[int] | None


class Prefetches:
    """Looks up announced chunks as an engine would, a few in each round, and keeps those that it finds.

    It starts when no request waits and takes at most half of the promotion budget. A waiting request gets the
    slots that it holds. With sliding windows it does nothing: most of their chunks are useless.
    """

    def __init__(
        self,
        shared: SharedState,
        holds: Holds,
        retention: Retention,
        lookup: Callable[[OffloadKey, Request], Lookup],
        close: Callable[[Request], None],
    ) -> None:
        self._shared = shared
        self._holds = holds
        self._retention = retention
        self._lookup = lookup
        self._close = close
        self._announced: dict[str, _Announced] = {}
        self._begins: list[tuple[float, str]] = []  # a heap; an entry counts if its name starts then
        self._size = 0  # keys of all names together
        self._name = ""  # name of the announcement that is looked up now
        self._current: _Announced | None = None  # the announcement itself
        self._left: list[OffloadKey] = []  # its remaining keys, last one first
        self._request: Request | None = None
        self._asked: list[OffloadKey] = []  # keys that this request asks for
        self._promoted: set[OffloadKey] = set()  # those that the primary tier lacked

    @property
    def is_empty(self) -> bool:
        """Whether nothing is announced or looked up."""
        return not (self._announced or self._left or self._request or self._size)

    def announce(
        self,
        name: str,
        keys: Sequence[OffloadKey],
        from_s: float,
        until_s: float,
        tiers: frozenset[int] | None = None,
    ) -> None:
        """Look up ``keys``, in the order of their prompt, from ``from_s`` on; keep them until ``until_s``.

        It replaces an earlier announcement under this name. ``tiers`` are the tiers to ask; None means all.
        """
        self.cancel(name)
        if self._shared.windowed or not keys:
            return
        if self._size + len(keys) > MOST_PER_SLOT * len(self._shared.table.all):
            self._shared.counts["keep_refused", "names"] += len(keys)
            return
        self._size += len(keys)
        self._announced[name] = _Announced(keys, from_s, until_s, tiers)
        heappush(self._begins, (from_s, name))
        if len(self._begins) > 2 * len(self._announced) + SPARE_ENTRIES:
            self._begins = [(it.from_s, name) for name, it in self._announced.items()]
            heapify(self._begins)

    def cancel(self, name: str) -> None:
        """Forget the announcement of a name; chunks that were found stay until their time is over."""
        if (announced := self._announced.pop(name, None)) is not None:
            self._size -= len(announced.keys)
        if name == self._name:
            self._stop()

    def release(self, name: str) -> None:
        """Forget the announcement of a name, and stop keeping its chunks."""
        self.cancel(name)
        self._retention.release(_kept_as(name))

    def ask(self, now_s: float) -> None:
        """Ask for chunks in the round that is about to end, if any are due."""
        if self._request is None and not self._begin(now_s):
            return
        assert self._request is not None
        hits: list[OffloadKey] = []
        ended: set[int] = set()  # groups that lack a chunk which later ones need
        waits = False
        for key in self._asked:
            if (group := group_index(key)) in ended:
                continue
            answer = self._lookup(key, self._request)
            if answer is Lookup.HIT:
                hits.append(key)
            elif answer is not Lookup.MISS:
                self._promoted.add(key)
                waits = True
            else:
                ended.add(group)
        if not waits:
            self._end(hits, ended)

    def clear(self) -> None:
        self._stop()
        self._announced.clear()
        self._begins.clear()
        self._size = 0

    def _begin(self, now_s: float) -> bool:
        """Start the lookup of the next chunks; return whether there are any and no request waits."""
        if self._holds.first is not None:
            return False
        if self._current is not None and self._current.until_s <= now_s:
            self._left.clear()
        while not self._left and self._begins and self._begins[0][0] <= now_s:
            from_s, name = heappop(self._begins)
            due = self._announced.get(name)
            if due is None or due.from_s != from_s:
                continue
            del self._announced[name]
            self._size -= len(due.keys)
            if due.until_s > now_s:
                self._name, self._current, self._left = name, due, [*reversed(due.keys)]
        if not self._left or self._current is None:
            return False
        self._asked = self._take()
        if not self._asked:
            self._shared.counts["keep_refused", "budget"] += len(self._left)
            self._left.clear()
            return False
        self._request = Request(f"prefetch for {self._name}", self._current.tiers, is_prefetch=True)
        return True

    def _take(self) -> list[OffloadKey]:
        """Take the next keys that may be kept, up to the number for one round."""
        most = max(1, min(_AT_ONCE, self._holds.budget // 2))
        room, taken = self._retention.room, list[OffloadKey]()
        while self._left and len(taken) < most:
            if self._left[-1] not in self._retention.pinned:
                if not room:
                    break
                room -= 1
            taken.append(self._left.pop())
        return taken

    def _end(self, hits: list[OffloadKey], ended: set[int]) -> None:
        self._shared.counts["prefetched",] += sum(key in self._promoted for key in hits)
        assert self._current is not None
        self._retention.keep(_kept_as(self._name), hits)
        self._retention.expire(_kept_as(self._name), self._current.until_s)
        if ended:
            self._left = [key for key in self._left if group_index(key) not in ended]
        self._end_request()

    def _stop(self) -> None:
        self._left.clear()
        self._end_request()

    def _end_request(self) -> None:
        if self._request is not None:
            self._close(self._request)
        self._request = None
        self._asked = []
        self._promoted.clear()


def _kept_as(name: str) -> str:
    """Return the name for keeping prefetched chunks, different from the client's own name."""
    return f"next use of {name}"
