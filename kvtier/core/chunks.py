"""The chunks of the primary tier: which key is in which slot, in what state, under how many pins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvtier.core.policies.base import EvictionPolicy
from kvtier.core.states import CHUNK_MOVES, ChunkEvent, ChunkState, forbidden
from kvtier.keys import OffloadKey

NO_KEY = OffloadKey(b"")
_EVICTED = CHUNK_MOVES[ChunkEvent.EVICTED]
_FILLED = CHUNK_MOVES[ChunkEvent.FILLED]
_FAILED = CHUNK_MOVES[ChunkEvent.FAILED]
_FREED = CHUNK_MOVES[ChunkEvent.FREED]


class Chunk:
    """What one slot holds now. There is one such record for each slot, used again and again.

    Attributes:
        slot: index of the slot.
        key: the chunk's offload key.
        state: see ``ChunkState``.
        pins: reasons why the slot may not be given on; the copy that fills it is one.
        origin: index of the tier that it was promoted from and not yet loaded, else None.
    """

    __slots__ = ("key", "origin", "pins", "slot", "state")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.key = NO_KEY
        self.state = ChunkState.ABSENT
        self.pins = 0
        self.origin: int | None = None

    def __repr__(self) -> str:
        return f"<chunk {self.key.hex()[:16]} in slot {self.slot}, {self.state.name}, {self.pins} pins>"

    def move(self, event: ChunkEvent) -> None:
        """Change the state as the table says."""
        try:
            self.state = CHUNK_MOVES[event][self.state]
        except KeyError:
            forbidden(self, self.state, event)


class ChunkTable:
    """Owns the slots. Visible chunks are found by key; a landing one is seen only by its fetch.

    A chunk is a candidate for eviction, and known to the policy as one, exactly while it is READY
    and has no pins.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.visible: dict[OffloadKey, Chunk] = {}
        self.free: list[Chunk] = []
        self.all: list[Chunk] = []

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self.all)

    def add_slots(self, slots: Iterable[int]) -> None:
        """Take slots into use."""
        added = [Chunk(slot) for slot in slots]
        self.all += added
        self.free[:0] = reversed(added)
        self.policy.resize(len(self.all))

    def evict(self, count: int) -> list[OffloadKey]:
        """Free up to ``count`` slots by the policy's choice; return the keys that went."""
        keys = self.policy.evict(count)
        pop, free = self.visible.pop, self.free.append
        for key in keys:
            chunk = pop(key)
            try:
                chunk.state = _EVICTED[chunk.state]
            except KeyError:
                forbidden(chunk, chunk.state, ChunkEvent.EVICTED)
            free(chunk)
        return keys

    def take(self, keys: Sequence[OffloadKey], *, visible: bool) -> list[Chunk]:
        """Give a free slot to each key: FILLING, with the pin of the copy that will fill it."""
        count = len(keys)
        chunks = self.free[-count:][::-1] if count else []
        del self.free[len(self.free) - count :]
        filling = ChunkState.FILLING  # free slots are ABSENT: the table's one move from there
        for chunk, key in zip(chunks, keys, strict=True):
            chunk.key = key
            chunk.state = filling
            chunk.pins = 1
            chunk.origin = None
        if visible:
            self.visible.update(zip(keys, chunks, strict=True))
        return chunks

    def filled(self, chunks: Iterable[Chunk], pins: int = 0) -> list[Chunk]:
        """End the copies into ``chunks``; those that are READY now get ``pins`` pins and are returned.

        With no pins they are candidates at once. DOOMED ones are given back.
        """
        ready = []
        for chunk in chunks:
            try:
                state = chunk.state = _FILLED[chunk.state]
            except KeyError:
                forbidden(chunk, chunk.state, ChunkEvent.FILLED)
            if state is ChunkState.READY:
                chunk.pins = pins
                ready.append(chunk)
            else:
                self._drop_pin(chunk)
        if not pins:
            self.policy.add([chunk.key for chunk in ready], used=False)
        return ready

    def failed(self, chunks: Iterable[Chunk]) -> None:
        """End copies that brought nothing: the chunks are never seen, the slots are free."""
        visible = self.visible
        for chunk in chunks:
            if visible.get(chunk.key) is chunk:
                del visible[chunk.key]
            try:
                chunk.state = _FAILED[chunk.state]
            except KeyError:
                forbidden(chunk, chunk.state, ChunkEvent.FAILED)
            chunk.pins -= 1
            if not chunk.pins:
                self._free(chunk)

    def show(self, chunk: Chunk) -> None:
        """Let a landed chunk be found by its key."""
        self.visible[chunk.key] = chunk

    def pin(self, chunks: Iterable[Chunk]) -> None:
        """Add a pin to READY chunks."""
        held = []
        for chunk in chunks:
            if not chunk.pins:
                held.append(chunk.key)
            chunk.pins += 1
        if held:
            self.policy.pin(held)

    def unpin(self, chunks: Iterable[Chunk], *, used: bool = False) -> None:
        """Take a pin from chunks, prefix first; ``used`` says that a request has read them."""
        candidates = []
        for chunk in chunks:
            if chunk.state is not ChunkState.READY:
                self._drop_pin(chunk)
                continue
            chunk.pins -= 1
            if not chunk.pins:
                candidates.append(chunk.key)
        if candidates:
            self.policy.add(candidates, used=used)

    def drop(self, chunks: Iterable[Chunk]) -> None:
        """Hide chunks that are pinned for ever; their slots are free when the last pin is gone."""
        for chunk in chunks:
            chunk.move(ChunkEvent.DROPPED)
            if self.visible.get(chunk.key) is chunk:
                del self.visible[chunk.key]

    def reset(self) -> None:
        """Hide every visible chunk for ever; slots without a pin are free at once."""
        self.policy.clear()
        for chunk in self.visible.values():
            chunk.move(ChunkEvent.RESET)
            if not chunk.pins:
                self._free(chunk)
        self.visible.clear()

    def _drop_pin(self, chunk: Chunk) -> None:
        chunk.pins -= 1
        if not chunk.pins:
            self._free(chunk)

    def _free(self, chunk: Chunk) -> None:
        try:
            chunk.state = _FREED[chunk.state]
        except KeyError:
            forbidden(chunk, chunk.state, ChunkEvent.FREED)
        chunk.key, chunk.origin = NO_KEY, None
        self.free.append(chunk)
