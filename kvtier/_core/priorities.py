"""Priorities of chunks in the primary tier, by the requests that use them, and for how long; releases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Final

from kvtier._core.chunks import DEFAULT, LOW, Chunk
from kvtier._core.requests import Request
from kvtier._core.shared import Keys, SharedState
from kvtier._core.states import ChunkState, RequestState
from kvtier.keys import OffloadKey

SPARE_ENTRIES: Final = 64
"""Ended requests that are remembered beyond their use."""


class Priorities:
    """Gives chunks the highest priority of the requests that use them; finds those that leave with theirs.

    A low priority applies only to chunks that the request brought in. Of two equal ones the longer counts.
    """

    def __init__(self, shared: SharedState) -> None:
        self._table = shared.table
        self.due: list[OffloadKey] = []  # chunks whose request, put or load has ended
        self._several = Request(priority=LOW)  # stands for more than one
        self.ending: list[tuple[float, int, Request]] = []  # a heap: when priorities of requests are over
        self._numbers = count()

    def use(self, request: Request, keys: Keys, new: Iterable[OffloadKey] = ()) -> None:
        """Note that a request uses chunks. It brought in those in ``new``."""
        users, priority = self._table.users, request.priority
        mine = None if priority == DEFAULT else request
        if mine is None and not users:
            return
        was = {key: self._table.priority(key) for key in keys}
        taken = set(new if priority == LOW else ())
        others = [key for key in was if was[key] == LOW == priority and users[key] is not mine]
        if mine is not None and priority > DEFAULT:
            same = {key: users[key] for key in was if was[key] == priority}
            taken = {key for key, it in same.items() if it is not mine and it.priority_s <= mine.priority_s}
        self._table.prioritize([key for key in was if priority > was[key] or key in taken], mine)
        self._table.prioritize(others, self._several)

    def schedule_end(self, request: Request, now_s: float) -> None:
        """Schedule the end of an ended request's priority."""
        if request.own and request.priority_s < inf:
            if len(self.ending) > 2 * len(self._table.users) + SPARE_ENTRIES:
                self.ending = sorted(entry for entry in self.ending if entry[2].own)
            heappush(self.ending, (now_s + request.priority_s, next(self._numbers), request))

    def expire(self, now_s: float) -> None:
        """Give chunks back the default priority when their time is over."""
        while self.ending and self.ending[0][0] <= now_s:
            self._table.prioritize([*heappop(self.ending)[2].own], None)

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
