"""The chunks that this engine serves: their rows in the serving memory, and their leases.

Rows are bookkeeping: this module never touches their bytes. Used only from the event loop.
"""

from __future__ import annotations

import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from kvtier.keys import OffloadKey

MAX_LEASES: Final = 256
"""Leases at once, over all peers."""


@dataclass(frozen=True, slots=True)
class ServedChunk:
    """A served chunk: its row, and the trailer that verifies its bytes."""

    row: int
    trailer: bytes


@dataclass(frozen=True, slots=True)
class _Lease:
    rows: tuple[int, ...]
    expires_s: float


class ChunkPool:
    """Rows of chunks. Unpinned chunks are evicted by recency.

    Leases are pins of peers. They expire, so that a dead peer does not keep memory. Leases take at most half
    of the rows, so that peers cannot block puts.

    Args:
        rows: number of rows.
        lease_s: duration of a lease in seconds.
        on_evict: called with the keys of evicted chunks.
    """

    def __init__(self, rows: int, lease_s: float, on_evict: Callable[[Sequence[OffloadKey]], None]) -> None:
        self.rows = rows
        self.lease_s = lease_s
        self._on_evict = on_evict
        self._free = list(range(rows))
        self._chunks: OrderedDict[OffloadKey, ServedChunk] = OrderedDict()  # least recently used first
        self._pins: Counter[int] = Counter()
        self._leases: OrderedDict[int, _Lease] = OrderedDict()  # earliest expiry first
        self._leased: Counter[int] = Counter()
        self._removed: set[int] = set()  # pinned rows whose chunk was removed
        self._next_lease = secrets.randbits(
            48
        )  # Differs from the numbers of leases of an earlier engine at this address.

    def __len__(self) -> int:
        return len(self._chunks)

    def __contains__(self, key: object) -> bool:
        return key in self._chunks

    def touch(self, keys: Iterable[OffloadKey]) -> None:
        """Mark chunks as recently used; the last of them is evicted first."""
        for key in reversed(list(keys)):
            if key in self._chunks:
                self._chunks.move_to_end(key)

    def reserve(self, count: int, now_s: float) -> list[int]:
        """Return at most ``count`` rows to fill; evict unpinned chunks if too few are free."""
        self._expire(now_s)
        evicted = self._victims(count - len(self._free))
        for key in evicted:
            self.discard(key)
        if evicted:
            self._on_evict(evicted)
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give_back(self, row: int) -> None:
        """Free a reserved row."""
        self._free.append(row)

    def publish(self, key: OffloadKey, row: int, trailer: bytes) -> None:
        """Start to serve a chunk from a reserved row. A chunk that is already served stays in its row."""
        if key in self._chunks:
            self.give_back(row)
        else:
            self._chunks[key] = ServedChunk(row, trailer)

    def pin(self, key: OffloadKey) -> ServedChunk | None:
        """Pin and return a chunk.

        Its row keeps its bytes until ``unpin``. Return None if it is not served.
        """
        chunk = self._chunks.get(key)
        if chunk is not None:
            self._chunks.move_to_end(key)
            self._pins[chunk.row] += 1
        return chunk

    def unpin(self, row: int) -> None:
        """End a pin."""
        self._pins[row] -= 1
        if self._pins[row] <= 0:
            del self._pins[row]
            if row in self._removed:
                self._removed.remove(row)
                self._free.append(row)

    def lease(self, keys: Sequence[OffloadKey], now_s: float) -> tuple[int, list[ServedChunk | None]]:
        """Pin chunks for a peer until it releases them or the lease expires.

        Returns:
            The lease's number, and for each key the chunk; None if it is not there or too much is leased.
        """
        self._expire(now_s)
        chunks: list[ServedChunk | None] = []
        for key in keys:
            has_room = len(self._leases) < MAX_LEASES and len(self._leased) < max(1, self.rows // 2)
            chunk = self.pin(key) if has_room else None
            if chunk is not None:
                self._leased[chunk.row] += 1
            chunks.append(chunk)
        number, self._next_lease = self._next_lease, self._next_lease + 1
        rows = tuple(chunk.row for chunk in chunks if chunk is not None)
        if rows:
            self._leases[number] = _Lease(rows, now_s + self.lease_s)
        return number, chunks

    def release(self, number: int) -> None:
        """End a lease, unless it has expired."""
        lease = self._leases.pop(number, None)
        for row in lease.rows if lease is not None else ():
            self._leased[row] -= 1
            if self._leased[row] <= 0:
                del self._leased[row]
            self.unpin(row)

    def discard(self, key: OffloadKey) -> None:
        """Stop serving a chunk. Its row is reused when its last pin is released."""
        chunk = self._chunks.pop(key, None)
        if chunk is None:
            return
        if self._pins[chunk.row] > 0:
            self._removed.add(chunk.row)
        else:
            self._free.append(chunk.row)

    def clear(self) -> None:
        """Stop serving all chunks."""
        for key in list(self._chunks):
            self.discard(key)

    def _victims(self, count: int) -> list[OffloadKey]:
        """Return the ``count`` chunks that are evicted next, or fewer if the rest is pinned."""
        free = (key for key, chunk in self._chunks.items() if not self._pins[chunk.row])
        return list(islice(free, max(0, count)))

    def _expire(self, now_s: float) -> None:
        while self._leases:
            number, lease = next(iter(self._leases.items()))
            if lease.expires_s > now_s:
                return
            self.release(number)
