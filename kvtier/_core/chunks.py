"""The chunks of the primary tier: the key, state and pins of each slot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from operator import attrgetter
from typing import TYPE_CHECKING, ClassVar

from kvtier._core.slot_trailers import SlotTrailers
from kvtier._core.states import CHUNK_MOVES, ChunkEvent, ChunkState, Stateful
from kvtier.keys import GROUP_BYTES, OffloadKey
from kvtier.policies._base import EvictionPolicy, Run
from kvtier.policies._lru import LRU

if TYPE_CHECKING:
    from kvtier._core.requests import Request

NO_KEY = OffloadKey(b"")
LOW, DEFAULT, HIGHEST = 0, 1, 3  # priorities
NO_RUN = Run()
_run_of, _place_of = attrgetter("run"), attrgetter("place")
_FILLING, _READY = ChunkState.FILLING, ChunkState.READY
_AFTER_EVICTION = CHUNK_MOVES[ChunkEvent.EVICTED][_READY]  # the one state that this is allowed in


def block_of(key: OffloadKey) -> int:
    """Return the last 64 bits of the hash of a chunk's last block: KV events and hints name it by these."""
    return int.from_bytes(key[-GROUP_BYTES - 8 : -GROUP_BYTES], "big")


@dataclass(slots=True, eq=False, repr=False)
class Chunk(Stateful):
    """The content of one slot. There is one such record for each slot, used again and again."""

    MOVES: ClassVar = CHUNK_MOVES

    slot: int
    key: OffloadKey = NO_KEY
    state: ChunkState = ChunkState.ABSENT
    pins: int = 0  # reasons why the slot may not be given on; the copy that fills it is one
    origin: int | None = None  # the tier that it was promoted from and not yet loaded
    run: Run = NO_RUN  # that has used it last
    place: int = 0  # in the prompt of that run

    def __repr__(self) -> str:
        return f"<chunk {self.key.hex()[:16]} in slot {self.slot}, {self.state.name}, {self.pins} pins>"


class ChunkTable:
    """Owns the slots. Visible chunks are found by key; one that is being promoted is not visible.

    A chunk is a candidate for eviction, and known as one to the order of its priority, exactly while it is
    READY and has no pins. Lower priorities leave first. Those of DEFAULT, nearly all, are ordered by the
    policy. That is a plug-in: its choices are checked here.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        # They choose the chunks to evict, by priority; LRU replaces the one of DEFAULT at its first fault.
        self.orders: list[EvictionPolicy] = [LRU(), policy, LRU(), LRU()]
        self.users: dict[OffloadKey, Request] = {}  # set the priority of these chunks; others have DEFAULT
        self.faults: list[tuple[str, str]] = []  # policies, and why they were replaced; the reader clears it
        self.visible: dict[OffloadKey, Chunk] = {}  # those that are found by their keys
        self.free: list[Chunk] = []  # those whose slots hold nothing
        # Those of the engine before, the least recently used first. Their bytes are to be verified in place,
        # by a get or in the background. Until they are used the slots may be filled, as free ones.
        self.adopted: dict[OffloadKey, Chunk] = {}
        self.trailers: SlotTrailers | None = None  # for the next engine; None if none is to adopt the chunks
        self.all: list[Chunk] = []
        self.uses = 0  # uses of chunks so far: the clock of the runs
        self._adopted_slots: frozenset[int] = frozenset()
        # Visible chunks by their blocks. None until it is asked for: most engines need none.
        self._by_block: dict[int, dict[OffloadKey, None]] | None = None

    @property
    def room(self) -> int:
        """How many slots may be filled without an eviction."""
        return len(self.free) + len(self.adopted)

    def named(self, blocks: Iterable[int]) -> list[OffloadKey]:
        """Return the visible chunks whose last blocks are named, in the order of the names."""
        if self._by_block is None:
            self._by_block = {}
            self._index(self.visible)
        return [key for block in blocks for key in self._by_block.get(block, ())]

    def _index(self, keys: Iterable[OffloadKey]) -> None:
        if (index := self._by_block) is not None:
            for key in keys:
                index.setdefault(block_of(key), {})[key] = None

    def _hide(self, key: OffloadKey) -> None:
        del self.visible[key]
        if (index := self._by_block) is not None:
            del index[block_of(key)][key]
            if not index[block_of(key)]:
                del index[block_of(key)]

    def add_slots(self, slots: Iterable[int]) -> None:
        """Add free slots, except those that were adopted."""
        added = [Chunk(slot) for slot in slots if slot not in self._adopted_slots]
        self.all += added
        self.free[:0] = reversed(added)
        self._call(DEFAULT, lambda policy: policy.resize(len(self.all)))

    def adopt(self, trailers: SlotTrailers, keys: Mapping[OffloadKey, int]) -> None:
        """Add the slots of chunks of the engine before, the least recently used first; keep entries of all.

        A tier that works in place verifies them. Call it before any slot is ready.
        """
        self.trailers = trailers
        self.adopted = {key: Chunk(slot, key) for key, slot in keys.items()}
        self._adopted_slots = frozenset(keys.values())
        self.all += self.adopted.values()
        self._call(DEFAULT, lambda policy: policy.resize(len(self.all)))

    @property
    def evictable(self) -> int:
        """How many chunks may be evicted, as far as the policy knows."""
        orders = self.orders if self.users else self.orders[DEFAULT : DEFAULT + 1]
        try:
            return sum(map(len, orders))
        except Exception:
            self._replace_policy("raised")
            return sum(map(len, self.orders))

    def priority(self, key: OffloadKey) -> int:
        """Return the priority of a chunk: 0 to 3."""
        return DEFAULT if (user := self.users.get(key)) is None else user.priority

    def prioritize(self, keys: Iterable[OffloadKey], user: Request | None) -> None:
        """Give visible chunks the priority of a request; None for DEFAULT."""
        chunks = [chunk for key in keys if (chunk := self.visible.get(key)) is not None]
        self.pin(chunks)
        for chunk in chunks:
            self._forget_user(chunk.key)
            if user is not None:
                self.users[chunk.key] = user
                user.own[chunk.key] = False
        self.unpin(chunks)

    def lower(self, most: int) -> int:
        """Give candidates of high priority beyond ``most`` the default priority; return their number."""
        second, highest = self.orders[DEFAULT + 1 :]
        lowered = second.evict(len(second) + len(highest) - most)
        lowered += highest.evict(len(highest) - most)
        for key in lowered:
            self._forget_user(key)
        self._add_candidates([self.visible[key] for key in lowered], used=False)
        return len(lowered)

    def evict(self, count: int, spared: Run = NO_RUN) -> list[OffloadKey]:
        """Free up to ``count`` slots, by priority and the policy's choice; return the keys that went.

        Chunks of the ``spared`` run stay. LRU replaces a policy that chooses what it must not.
        """
        evicted: list[OffloadKey] = []
        kept: dict[OffloadKey, Chunk] = {}  # chunks of the spared run: the orders get them back
        for priority in range(len(self.orders)) if self.users else (DEFAULT,):
            before = -1
            while before < len(kept) and len(evicted) < count:
                before = len(kept)
                if fault := self._evict(priority, count - len(evicted), evicted, spared, kept):
                    self._replace_policy(fault)  # by one that knows of those kept
                    kept = {key: chunk for key, chunk in kept.items() if key in self.users}
                    self._evict(DEFAULT, count - len(evicted), evicted, spared, kept)
        self._add_candidates([*kept.values()], used=False)
        return evicted

    def _evict(
        self,
        priority: int,
        count: int,
        evicted: list[OffloadKey],
        spared: Run,
        kept: dict[OffloadKey, Chunk],
    ) -> str:
        """Free what an order chooses as far as it may be freed; return what was wrong with the choice."""
        fault, order, users, free = "", self.orders[priority], self.users, self.free
        visible = self.visible
        try:
            keys = order.evict(count)
            if len(keys) > count:
                keys, fault = keys[:count], "too_many"
            elif len(keys) < count and len(order):
                fault = "withheld"
            for key in keys:
                chunk = visible.get(key)
                if (
                    chunk is None
                    or chunk.state is not _READY
                    or chunk.pins
                    or key in kept
                    or (users and self.priority(key) != priority)
                ):
                    fault = "not_a_candidate"
                elif chunk.run is spared:
                    kept[key] = chunk
                else:
                    if users:
                        self._forget_user(key)
                    self._hide(key)
                    chunk.state = _AFTER_EVICTION
                    free.append(chunk)
                    evicted.append(key)
        except Exception:  # whatever a plug-in does: it must not end the engine
            return "raised"
        return fault

    def _replace_policy(self, fault: str) -> None:
        self.faults.append((type(self.orders[DEFAULT]).__name__, fault))
        self.orders[DEFAULT] = LRU(len(self.all))
        chunks = [chunk for chunk in self.visible.values() if chunk.key not in self.users]
        self._add_candidates([it for it in chunks if it.state is _READY and not it.pins], used=False)

    def _call(self, priority: int, act: Callable[..., object], *keys: list[OffloadKey]) -> None:
        """Call an order. A policy that raises is replaced by LRU over the chunks as they are."""
        try:
            act(self.orders[priority], *keys)
        except Exception:
            self._replace_policy("raised")

    def _call_each(self, keys: list[OffloadKey], act: Callable[..., object]) -> None:
        """Call the orders of the keys, each with its own ones."""
        if not self.users:
            self._call(DEFAULT, act, keys)
            return
        parts: dict[int, list[OffloadKey]] = {}
        for key in keys:
            parts.setdefault(self.priority(key), []).append(key)
        for priority, part in parts.items():
            self._call(priority, act, part)

    def _add_candidates(self, chunks: Sequence[Chunk], *, used: bool) -> None:
        """Add chunks that may be evicted to the orders. Chunks of a run are in the order of its prompt."""
        run, place = NO_RUN, 0
        keys: list[OffloadKey] = []
        for chunk in chunks:
            if chunk.run is not run or chunk.place < place:
                if keys:  # rare: chunks of several runs, or of one in another order
                    self._add_sorted(chunks, used=used)
                    return
                run = chunk.run
            place = chunk.place
            keys.append(chunk.key)
        if keys:
            self._call_each(keys, lambda order, keys: order.add_run(run, keys, used=used))

    def _add_sorted(self, chunks: Sequence[Chunk], *, used: bool) -> None:
        for run, part in groupby(chunks, _run_of):
            keys = [chunk.key for chunk in sorted(part, key=_place_of)]
            self._call_each(keys, lambda order, keys, run=run: order.add_run(run, keys, used=used))

    def use(self, chunks: Sequence[Chunk], run: Run, places: Mapping[OffloadKey, int]) -> None:
        """Note that a run uses chunks, now. Those without a place follow each other."""
        keys = [chunk.key for chunk in chunks]
        found = list(zip(chunks, self._use(keys, run, places), strict=True))
        if self.trailers is not None:
            self.trailers.use([chunk.slot for chunk in chunks])
        candidates = [
            chunk
            for chunk, place in found
            if not chunk.pins and (chunk.run is not run or chunk.place != place)
        ]
        self.pin(candidates)
        for chunk, place in found:
            chunk.run, chunk.place = run, place
        self.unpin(candidates)

    def _use(self, keys: Sequence[OffloadKey], run: Run, places: Mapping[OffloadKey, int]) -> Iterable[int]:
        """Advance the clock and a run's time; return the places of keys in that run."""
        self.uses += len(keys)
        run.time, run.place = self.uses, self._place
        following = range(self.uses, self.uses + len(keys))
        return map(places.get, keys, following) if places else following

    def _place(self, key: OffloadKey) -> int:
        """Return the place of a chunk in the prompt of its run."""
        return 0 if (chunk := self.visible.get(key)) is None else chunk.place

    def _forget_user(self, key: OffloadKey) -> None:
        if (user := self.users.pop(key, None)) is not None:
            del user.own[key]

    def assign_slots(
        self,
        keys: Sequence[OffloadKey],
        run: Run,
        places: Mapping[OffloadKey, int],
        *,
        visible: bool,
        in_place: bool = False,
    ) -> list[Chunk]:
        """Assign a slot to each key, for a run: FILLING, with the pin of the copy that will fill it.

        With ``in_place`` each key gets the slot that has its adopted chunk already. Otherwise free slots come
        first, then slots of adopted chunks, the least recently used first.
        """
        if in_place:
            chunks = [self.adopted.pop(key) for key in keys]
        else:
            if self.adopted:
                self._give_up(keys)
            left = len(self.free) - len(keys)
            chunks = self.free[left:][::-1]
            del self.free[left:]
            if self.trailers is not None:
                self.trailers.fill([chunk.slot for chunk in chunks])
        for chunk, key, place in zip(chunks, keys, self._use(keys, run, places), strict=True):
            chunk.key = key
            chunk.state = _FILLING  # free slots are ABSENT: the table's one move from there
            chunk.pins = 1
            chunk.origin = None
            chunk.run = run
            chunk.place = place
        if visible:
            self.visible.update(zip(keys, chunks, strict=True))
            self._index(keys)
        return chunks

    def is_verified(self, key: OffloadKey) -> bool:
        """Return whether the bytes of an adopted chunk were verified in the background."""
        return self.trailers is not None and self.trailers.is_verified(self.adopted[key].slot)

    def split_adopted(self, keys: Iterable[OffloadKey]) -> tuple[list[OffloadKey], list[OffloadKey]]:
        """Return the keys of adopted chunks, and the others."""
        found = [key for key in keys if key in self.adopted]
        return found, [key for key in keys if key not in self.adopted] if found else list(keys)

    def _give_up(self, keys: Sequence[OffloadKey]) -> None:
        """Free the slots of adopted chunks that ``keys`` name, and as many more as they need."""
        adopted = self.adopted
        given_up = [key for key in keys if key in adopted]
        for key in given_up:
            self._free_adopted(adopted.pop(key))
        for key in [*islice(adopted, max(0, len(keys) - len(self.free)))]:
            self._free_adopted(adopted.pop(key))

    def _free_adopted(self, chunk: Chunk) -> None:
        chunk.key = NO_KEY
        self.free.append(chunk)

    def filled(self, chunks: Sequence[Chunk], pins: int = 0) -> list[Chunk]:
        """End the copies into ``chunks``; those that are READY now get ``pins`` pins and are returned.

        They are visible, and with no pins candidates at once. DOOMED ones are given back.
        """
        ready = []
        for chunk in chunks:
            if chunk.state is _FILLING:
                chunk.state = _READY  # FILLING has no other move at this event
                chunk.pins += pins
                self.visible[chunk.key] = chunk  # an order of eviction asks for its place
                ready.append(chunk)
        self._index(chunk.key for chunk in ready)
        self.unpin(chunks)  # the copy's pin
        return ready

    def pin(self, chunks: Iterable[Chunk]) -> None:
        """Add a pin to chunks that are visible."""
        held = []
        for chunk in chunks:
            if not chunk.pins:
                held.append(chunk.key)
            chunk.pins += 1
        if held:
            self._call_each(held, lambda order, keys: order.pin(keys))

    def unpin(self, chunks: Iterable[Chunk], *, used: bool = False) -> None:
        """Remove a pin from chunks; ``used`` is whether a request has read them."""
        candidates: list[Chunk] = []
        for chunk in chunks:
            chunk.pins -= 1
            if not chunk.pins:
                if chunk.state is _READY:
                    candidates.append(chunk)
                else:
                    self._free(chunk)
        if candidates:
            self._add_candidates(candidates, used=used)

    def drop(self, chunks: Sequence[Chunk]) -> None:
        """Hide chunks for good and take a pin from each; a slot is free when its chunk's last pin ends."""
        if self.trailers is not None:
            self.trailers.drop([chunk.slot for chunk in chunks])
        for chunk in chunks:
            chunk.move(ChunkEvent.DROPPED)
            if self.visible.get(chunk.key) is chunk:
                self._hide(chunk.key)
                self._forget_user(chunk.key)
        self.unpin(chunks)

    def reset(self) -> None:
        """Hide every visible chunk for good; slots of unpinned chunks become free at once."""
        if self.trailers is not None:
            self.trailers.reset()
        self.prioritize([*self.users], None)
        for chunk in self.visible.values():
            chunk.move(ChunkEvent.DROPPED)
            if not chunk.pins:
                self._free(chunk)
        self.visible.clear()
        self._by_block = None
        self.give_up_adopted()
        self._call(DEFAULT, lambda policy: policy.clear())

    def give_up_adopted(self) -> None:
        while self.adopted:
            self._free_adopted(self.adopted.popitem()[1])

    def _free(self, chunk: Chunk) -> None:
        chunk.move(ChunkEvent.FREED)
        chunk.key, chunk.origin, chunk.run = NO_KEY, None, NO_RUN
        self.free.append(chunk)
