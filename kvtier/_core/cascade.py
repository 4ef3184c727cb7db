"""Puts chunks of the primary tier into the secondary tiers, and notes how the puts end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtier._core.chunks import Chunk
from kvtier._core.messages import Put, PutEnded, Touch, TransferHealth
from kvtier._core.shared import SharedState
from kvtier._core.states import ChunkState
from kvtier.keys import OffloadKey

_READY = ChunkState.READY


class Cascades:
    """The puts into the secondary tiers. Each pins its chunks until it has ended.

    Attributes:
        reused: chunks that were loaded from the primary tier since the last ``touch``.
    """

    def __init__(self, shared: SharedState) -> None:
        self.reused: dict[OffloadKey, None] = {}
        self._shared = shared

    def put_stored(self, chunks: Sequence[Chunk], now_s: float) -> list[Chunk]:
        """End the copies of a store, put its chunks into every tier, and return those that are READY."""
        table = self._shared.table
        puts = self._admit(len(chunks), range(len(self._shared.tiers)), now_s)
        ready = table.filled(chunks, pins=len(puts))
        for tier, count in puts:
            self._put(tier, ready[:count], now_s)
            table.unpin(ready[count:])
        return ready

    def backfill(self, chunks: Sequence[Chunk], now_s: float) -> None:
        """Put promoted chunks into the tiers before the one that had them: these are asked first."""
        ready = [chunk for chunk in chunks if chunk.state is _READY and chunk.origin]
        if not ready:
            return
        for tier, count in self._admit(len(ready), range(ready[0].origin or 0), now_s):
            self._shared.counts["backfilled", self._shared.tiers[tier].name] += count
            self._shared.table.pin(ready[:count])
            self._put(tier, ready[:count], now_s)

    def put_ended(self, event: PutEnded, now_s: float) -> list[Chunk]:
        """Process the end of a put, and return the chunks that it no longer pins."""
        shared = self._shared
        transfer, _ = shared.end(event, now_s)
        status = shared.tiers[transfer.tier]
        status.backlog -= len(transfer.chunks)
        if event.seconds and event.health in (TransferHealth.GOOD, TransferHealth.LATE):
            status.pressure.put_ended(len(transfer.chunks), event.seconds)  # not those that failed at once
        shared.counts["put", status.name] += sum(event.kept)
        shared.announce_end(transfer, event.kept)
        shared.table.unpin(transfer.chunks)
        return transfer.chunks

    def touch(self) -> None:
        """Send the tiers what was loaded from the primary tier, or they would take it for unused."""
        keys = list(self.reused)
        self.reused.clear()
        tiers = enumerate(self._shared.tiers)
        self._shared.commands += [Touch(tier, keys) for tier, status in tiers if status.works]

    def _admit(self, count: int, tiers: Iterable[int], now_s: float) -> list[tuple[int, int]]:
        """Return which of the tiers are given how many of the next ``count`` chunks."""
        admitted = []
        shared, statuses = self._shared, self._shared.tiers
        most = max(1, int(len(shared.table.all) * shared.limits.put_backlog))
        unused = most - sum(status.backlog for status in statuses)
        for index in tiers:
            status = statuses[index]
            share = max(1, most // len(statuses))  # its own, whatever the others hold
            room, reason = status.put_room(count, max(share, unused + status.backlog), now_s)
            if room < count:
                shared.counts["put_dropped", status.name, reason] += count - room
            if room:
                admitted.append((index, room))
        return admitted

    def _put(self, tier: int, chunks: list[Chunk], now_s: float) -> None:
        if chunks:
            keys = [chunk.key for chunk in chunks]
            transfer = self._shared.begin(tier, keys, chunks, now_s, is_put=True)
            self._shared.tiers[tier].backlog += len(chunks)
            self._shared.commands.append(Put(transfer.id, tier, keys, [chunk.slot for chunk in chunks]))
