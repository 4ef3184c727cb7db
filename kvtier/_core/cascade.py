"""Puts chunks of the primary tier into the secondary tiers, and notes how the puts end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtier._core.chunks import Chunk
from kvtier._core.messages import Put, PutEnded, Touch, TransferHealth
from kvtier._core.shared import Notice, SharedState
from kvtier._core.states import ChunkState
from kvtier.keys import OffloadKey

_READY = ChunkState.READY


class Cascades:
    """The puts into the secondary tiers. Each pins its chunks until it has ended."""

    def __init__(self, shared: SharedState) -> None:
        self.reused: dict[OffloadKey, None] = {}  # loaded from the primary tier since ``follow_reuse``
        self.offered_again: dict[OffloadKey, None] = {}  # offered since then, already there
        self._shared = shared

    def put_stored(self, chunks: Sequence[Chunk], now_s: float) -> list[Chunk]:
        """End the copies of a store, put its chunks into the tiers, and return those that are READY."""
        shared, tiers = self._shared, range(len(self._shared.tiers))
        ready = shared.table.filled(chunks, pins=len(tiers))  # as if every tier were given all
        puts = dict(self._admit(ready, tiers, now_s, reused=False))
        for tier in tiers:
            part = puts.get(tier, ())
            if part:
                self._put(tier, part, now_s)
            if len(part) < len(ready):
                given = frozenset(part)
                shared.table.unpin([chunk for chunk in ready if chunk not in given])
        return ready

    def backfill(self, chunks: Sequence[Chunk], now_s: float) -> None:
        """Put promoted chunks into the tiers before the one that had them: lookups ask these first."""
        ready = [chunk for chunk in chunks if chunk.state is _READY and chunk.origin]
        if ready:
            counts = self._shared.counts
            for tier, part in self._admit(ready, range(ready[0].origin or 0), now_s, reused=True):
                counts["backfilled", self._shared.tiers[tier].name] += len(part)
                self._shared.table.pin(part)
                self._put(tier, part, now_s)

    def offer_again(self, keys: Iterable[OffloadKey]) -> None:
        """Note chunks that are offered again, if a tier was not given all chunks."""
        if any(status.writes.is_selective for status in self._shared.tiers):
            visible = self._shared.table.visible
            self.offered_again.update((key, None) for key in keys if key in visible)

    def follow_reuse(self, now_s: float) -> None:
        """Notify the tiers of chunks that were used again, and put those that they lack."""
        loaded, again = list(self.reused), {**self.reused, **self.offered_again}
        self.reused.clear()
        self.offered_again.clear()
        shared, visible = self._shared, self._shared.table.visible
        there = [chunk for key in again if (chunk := visible.get(key))]
        if loaded:
            tiers = enumerate(shared.tiers)
            shared.commands += [
                Touch(tier, loaded) for tier, status in tiers if status.works and not status.in_place
            ]
        for tier, status in enumerate(shared.tiers):
            skipped = [
                chunk for chunk in there if chunk.state is _READY and chunk.key in status.writes.skipped
            ]
            for _, part in self._admit(skipped, [tier], now_s, reused=True, is_new=False) if skipped else ():
                shared.table.pin(part)
                self._put(tier, part, now_s)
        self.offered_again.update((chunk.key, None) for chunk in there if chunk.state is ChunkState.FILLING)

    def put_ended(self, event: PutEnded, now_s: float) -> Sequence[Chunk]:
        """Process the end of a put; return the chunks that it no longer pins."""
        shared = self._shared
        transfer, _ = shared.end_transfer(event, now_s)
        status = shared.tiers[transfer.tier]
        status.backlog -= len(transfer.chunks)
        if event.seconds and event.health in (TransferHealth.GOOD, TransferHealth.LATE):
            status.pressure.put_ended(len(transfer.chunks), event.seconds)  # failures at once do not count
        shared.counts["put", status.name] += sum(event.kept)
        status.writes.skip(key for key, is_kept in zip(transfer.keys, event.kept, strict=True) if not is_kept)
        if status.writes.note_kept(sum(event.kept)):
            text = (
                f"{status.writes.put_chunks} chunks were put into it and this engine got none: nothing is "
                "asked for again, or tiers before it have it. write_policy 'adaptive' writes less"
            )
            shared.notices.append(Notice(f"tier {status.name}", text))
        shared.announce_end(transfer, event.kept)
        shared.table.unpin(transfer.chunks)
        return transfer.chunks

    def _admit(
        self, ready: Sequence[Chunk], tiers: Iterable[int], now_s: float, *, reused: bool, is_new: bool = True
    ) -> list[tuple[int, Sequence[Chunk]]]:
        """Return the chunks to put, per tier; count the new chunks that a tier does not get."""
        admitted = []
        shared, statuses, counts = self._shared, self._shared.tiers, self._shared.counts
        most = max(1, int(len(shared.table.all) * shared.limits.put_backlog))
        unused = most - sum(status.backlog for status in statuses)
        for index in tiers:
            status = statuses[index]
            chosen, skipped = status.writes.choose(ready, now_s, reused=reused)
            for reason, count in skipped.items() if is_new else ():
                counts["put_dropped", status.name, reason] += count
            if not chosen:
                continue
            share = max(1, most // len(statuses))  # the tier's own share, whatever other tiers hold
            room, reason = status.put_room(len(chosen), max(share, unused + status.backlog), now_s)
            if room < len(chosen) and is_new:
                counts["put_dropped", status.name, reason] += len(chosen) - room
            if room:
                admitted.append((index, chosen if room == len(chosen) else chosen[:room]))
        return admitted

    def _put(self, tier: int, chunks: Sequence[Chunk], now_s: float) -> None:
        """Start a put of chunks that are pinned for it."""
        shared = self._shared
        keys = [chunk.key for chunk in chunks]
        transfer = shared.start_transfer(tier, keys, chunks, now_s, is_put=True)
        shared.tiers[tier].backlog += len(chunks)
        shared.tiers[tier].writes.note_put(keys)
        shared.commands.append(Put(transfer.id, tier, keys, [chunk.slot for chunk in chunks]))
