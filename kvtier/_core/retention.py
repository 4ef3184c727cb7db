"""Chunks that stay in the primary tier, or leave it, by hints of clients about their next use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf
from typing import Final

from kvtier._core.chunks import DEFAULT, LOW, Chunk
from kvtier._core.requests import Request
from kvtier._core.shared import Keys, SharedState
from kvtier._core.states import ChunkState, RequestState
from kvtier.keys import OffloadKey

MOST_PER_SLOT: Final = 16
"""Keys that all names together may have, per slot."""

SPARE_ENTRIES: Final = 64
"""Stale entries that a heap may have."""


@dataclass(slots=True)
class _Kept:
    """The keys kept under one name, and until when."""

    keys: dict[OffloadKey, None] = field(default_factory=dict)
    until_s: float = inf


class Retention:
    """Pins chunks under names, until a time or a release, within a budget that all names share.

    A chunk has one pin however many names keep it. Chunks beyond the budget are refused for good.
    """

    def __init__(self, shared: SharedState) -> None:
        self.pinned = shared.kept
        self._shared = shared
        self._kept: dict[str, _Kept] = {}
        self._holders: dict[OffloadKey, set[str]] = {}  # names that keep each key
        self._waiting: dict[OffloadKey, None] = {}  # not pinned yet: perhaps being stored
        self._ends: list[tuple[float, str]] = []  # a heap; an entry counts if its name ends then
        self._size = 0  # chunks of all names together

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept, or remembered."""
        return not (self._kept or self._holders or self._waiting or self.pinned or self._size)

    @property
    def room(self) -> int:
        return max(0, self._shared.pin_budget - len(self.pinned) - len(self._waiting))

    def keep(self, name: str, keys: Iterable[OffloadKey]) -> None:
        """Keep chunks that are there or being stored, until ``expire`` or ``release`` of this name."""
        kept = self._kept.get(name) or _Kept()
        most = MOST_PER_SLOT * len(self._shared.table.all)
        for key in keys:
            if key in kept.keys:
                continue
            if self._size >= most:
                self._shared.counts["keep_refused", "names"] += 1
                continue
            self._size += 1
            kept.keys[key] = None
            self._holders.setdefault(key, set()).add(name)
            if key not in self.pinned:
                self._waiting[key] = None
        if kept.keys:
            self._kept[name] = kept

    def expire(self, name: str, until_s: float) -> None:
        """Keep the chunks of a name until ``until_s``."""
        if (kept := self._kept.get(name)) is not None:
            kept.until_s = until_s
            heappush(self._ends, (until_s, name))
            if len(self._ends) > 2 * len(self._kept) + SPARE_ENTRIES:
                self._ends = [(kept.until_s, name) for name, kept in self._kept.items()]
                heapify(self._ends)

    def release(self, name: str) -> None:
        if (kept := self._kept.pop(name, None)) is None:
            return
        self._size -= len(kept.keys)
        chunks = []
        for key in kept.keys:
            self._holders[key].discard(name)
            if not self._holders[key]:
                del self._holders[key]
                self._waiting.pop(key, None)
                if (chunk := self.pinned.pop(key, None)) is not None:
                    chunks.append(chunk)
        self._shared.table.unpin(chunks)

    def settle(self, now_s: float) -> list[Chunk]:
        """Release expired names; pin chunks that have arrived, within the budget, and return them."""
        while self._ends and self._ends[0][0] <= now_s:
            until_s, name = heappop(self._ends)
            if (kept := self._kept.get(name)) is not None and kept.until_s == until_s:
                self.release(name)
        return self._pin_arrived() if self._waiting else []

    def drop_lost(self) -> None:
        """Unpin chunks that can no longer be looked up."""
        lost = [key for key, chunk in self.pinned.items() if chunk.state is not ChunkState.READY]
        self._forget(lost)
        self._shared.table.unpin([self.pinned.pop(key) for key in lost])

    def clear(self) -> None:
        self._kept.clear()
        self._holders.clear()
        self._waiting.clear()
        self._ends.clear()
        self._size = 0
        self._shared.table.unpin(self.pinned.values())
        self.pinned.clear()

    def _pin_arrived(self) -> list[Chunk]:
        shared, budget = self._shared, self._shared.pin_budget
        arrived: list[Chunk] = []
        refused: list[OffloadKey] = []
        waiting: dict[OffloadKey, None] = {}
        for key in self._waiting:
            chunk = shared.table.visible.get(key)
            if chunk is None:
                refused.append(key)
                shared.counts["keep_refused", "absent"] += 1
            elif chunk.state is not ChunkState.READY:
                waiting[key] = None
            elif len(self.pinned) < budget:
                self.pinned[key] = chunk
                arrived.append(chunk)
            else:
                refused.append(key)
                shared.counts["keep_refused", "budget"] += 1
        self._waiting = waiting
        shared.table.pin(arrived)
        self._forget(refused)
        return arrived

    def _forget(self, keys: list[OffloadKey]) -> None:
        """Remove keys from every name; forget names without keys."""
        for key in keys:
            self._waiting.pop(key, None)
            names = self._holders.pop(key, set())
            self._size -= len(names)
            for name in names:
                del self._kept[name].keys[key]
                if not self._kept[name].keys:
                    del self._kept[name]


class Priorities:
    """Gives chunks the highest priority of the requests that use them; finds those that leave with theirs.

    A low priority applies only to chunks that the request brought in.
    """

    def __init__(self, shared: SharedState) -> None:
        self._table = shared.table
        self.due: list[OffloadKey] = []  # chunks whose request, put or load has ended
        self._several = Request(priority=LOW)  # stands for more than one

    def use(self, request: Request | None, keys: Keys, new: Iterable[OffloadKey] = ()) -> None:
        """Note that a request uses chunks. It brought in those in ``new``."""
        mine = None if request is None or request.priority == DEFAULT else request
        users, priority = self._table.users, DEFAULT if mine is None else mine.priority
        if mine is None and not users:
            return
        was = {key: self._table.priority(key) for key in keys}
        lowered = frozenset(new if priority == LOW else ())
        others = [key for key in was if was[key] == LOW == priority and users[key] is not mine]
        self._table.prioritize([key for key in was if priority > was[key] or key in lowered], mine)
        self._table.prioritize(others, self._several)

    def unpinned(self, chunks: Sequence[Chunk], are_put: Iterable[bool]) -> None:
        """Note that puts or loads of chunks have ended, and whether a tier is thereby known to have each."""
        for chunk, is_put in zip(chunks, are_put, strict=True) if self._table.users else ():
            user = self._table.users.get(chunk.key)
            if user is not None and user.releases and chunk.state is ChunkState.READY:
                user.own[chunk.key] |= is_put
                self.due.append(chunk.key)

    def released(self) -> list[Chunk]:
        """Return the chunks to evict now: their request has ended, no other uses them, a tier has them."""
        due, self.due = dict.fromkeys(self.due), []
        users, visible = self._table.users, self._table.visible
        of_ended = [key for key in due if key in users and users[key].state is RequestState.CLOSED]
        return [visible[key] for key in of_ended if users[key].own[key] and not visible[key].pins]
