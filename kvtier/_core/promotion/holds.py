"""The requests that wait, in their order, the chunks that are pinned for them, and the budget for that."""

from __future__ import annotations

from collections.abc import Iterable

from kvtier._core.chunks import Chunk
from kvtier._core.requests import Request
from kvtier._core.shared import SharedState
from kvtier._core.states import ChunkState

_READY = ChunkState.READY


class Holds:
    """The chunks that are pinned for requests until they have loaded them."""

    budget: int  # slots that promotions may hold in all
    reserve: int  # slots to keep free, for chunks that a get may find

    def __init__(self, shared: SharedState) -> None:
        self.promoting: set[Chunk] = set()  # or promoted and held: they count against the budget
        self.pending: dict[Request, None] = {}  # requests that wait for an answer, first come first
        self.awaiting: dict[Request, None] = {}  # for chunks of other engines: not in line, and hold nothing
        self.changes = 0  # times that requests were given chunks to hold, or a get ended
        self._shared = shared
        self.resize(0)

    def resize(self, slots: int) -> None:
        """Compute the budget and the reserve for this number of slots."""
        limits = self._shared.limits
        self.budget = max(1, int(slots * limits.promotion_budget))
        reserve = int(slots * limits.promotion_reserve)
        self.reserve = min(self.budget, reserve) if self._shared.asks_tiers else 0

    @property
    def room(self) -> int:
        """How many chunks more may be promoted now."""
        return max(0, self.budget - len(self.promoting))

    @property
    def first(self) -> Request | None:
        """The request that is first in line; one that only locates, or prefetches, takes no turn."""
        return next((it for it in self.pending if not (it.locates or it.is_prefetch)), None)

    def enter(self, request: Request) -> None:
        """Put a request in line, unless it is in line already or awaits chunks."""
        if request not in self.awaiting:
            self.pending[request] = None

    def leave_line(self, request: Request, until_s: float) -> None:
        """Take a request out of the line that awaits chunks until then; its deadline counts from there."""
        self.pending.pop(request, None)
        self.awaiting[request] = None
        request.deadline_s = until_s + self._shared.limits.request_deadline_s

    def rejoin(self, request: Request, now_s: float) -> None:
        """Put a request in line that awaits chunks no more; it gets the usual deadline."""
        del self.awaiting[request]
        self.pending[request] = None
        deadline_s = now_s + self._shared.limits.request_deadline_s
        request.deadline_s = min(request.deadline_s or deadline_s, deadline_s)

    def hold(self, request: Request) -> None:
        """Pin the hits of a request until it is served."""
        self.enter(request)
        if request.locates:  # it loads nothing
            request.hits.clear()
            return
        if not request.hits:
            return
        visible, held = self._shared.table.visible, request.held
        hits = [chunk for key in request.hits if (chunk := visible.get(key)) and chunk.state is _READY]
        added = [chunk for chunk in dict.fromkeys(hits) if chunk not in held]
        request.hits.clear()
        self.changes += bool(added)
        self._shared.table.pin(added)
        held.update(dict.fromkeys(hits, request.round))

    def start_clock(self, request: Request, now_s: float) -> None:
        """Start the time of a request, unless it has started."""
        if request.deadline_s is None:
            request.deadline_s = now_s + self._shared.limits.request_deadline_s

    def stop_clock(self, request: Request) -> None:
        """Note that a request waits for no tier now, unless it awaits chunks."""
        if not request.awaits_any:
            request.deadline_s = None

    def unhold(self, request: Request) -> None:
        """Unpin what is held for a request that waits for nothing more."""
        self.pending.pop(request, None)
        self.awaiting.pop(request, None)
        request.deadline_s = None
        request.note_change()
        self._unpin(request)

    def unpin_unasked(self, request: Request) -> None:
        """Unpin what the request's last full scan did not ask for.

        It has that in its own cache by now, mostly because another request of the same prefix ran. A scan
        that was begun as a repeated one asks for few keys, whatever changed since.
        """
        if request.is_repeated or self._shared.windowed:
            return
        now = request.round
        gone = [chunk for chunk, when in request.held.items() if when is not now]
        for chunk in gone:
            del request.held[chunk]
        self._shared.table.unpin(gone)
        self.free_budget(gone)

    def release_awaiting(self) -> None:
        """Unpin what is held for requests that await chunks: these may never come."""
        for request in self.awaiting:
            if request.held and request.wait is not None and request.wait.keys:
                wanted = set(request.wanted)
                request.wait.leading += sum(chunk.key not in wanted for chunk in request.held)
                self._unpin(request)

    def _unpin(self, request: Request) -> None:
        chunks, request.held = request.held, {}
        self._shared.table.unpin(chunks)
        self.free_budget(chunks)

    def free_budget(self, chunks: Iterable[Chunk]) -> None:
        """Remove from the promotion budget those chunks that nothing pins any more."""
        if self.promoting:
            self.promoting.difference_update([chunk for chunk in chunks if not chunk.pins])

    def free_for_first(self, first: Request, count: int) -> None:
        """Free budget for the request that is first in line, and slots if none is left.

        Requests behind it hold them, and the last in line loses first. Call it between two rounds only: hits
        stay valid until their round ends.
        """
        table, promoting = self._shared.table, self.promoting
        behind = [*self.awaiting, *(other for other in reversed(self.pending) if other is not first)]
        behind.sort(key=lambda other: not other.is_prefetch)
        if count > self.room:
            held = dict.fromkeys(chunk for other in behind for chunk in other.held)
            spare = [chunk for chunk in held if chunk in promoting and chunk not in first.held]
            promoting.difference_update(spare[: count - self.room])
        count = min(count, self.room) - table.room
        if count <= table.evictable:
            return
        for other in behind:
            table.unpin(other.held)
        self._shared.evict(count)
        for other in behind:
            left = {chunk: when for chunk, when in other.held.items() if chunk.state is _READY}
            if len(left) < len(other.held):
                other.note_change()
            other.held = left
            table.pin(left)
        self.free_budget(list(promoting))

    @property
    def free_reserve(self) -> int:
        """The number of slots to keep free now.

        Slots of running gets count as free: unused ones are returned, so asking for chunks that no tier has
        evicts nothing.
        """
        if not self.reserve:
            return 0
        lent = sum(len(transfer.chunks) for transfer in self._shared.running if not transfer.is_put)
        return max(0, self.reserve - lent)

    def reset(self) -> None:
        """Unpin everything. Requests wait on, and their deadlines go on."""
        for request in [*self.pending, *self.awaiting]:
            self._unpin(request)
            request.located.clear()
            request.note_change()
        self.pending = {request: None for request in self.pending if request.is_waiting}
