"""Least hit density goes first: what is kept is what yields most hits for the time that it takes room.

After Beckmann, Chen and Cidon, "LHD: Improving Cache Hit Rate by Maximizing Hit Density" (NSDI 2018). Hit
density is learned by number of uses and age, ghosts included, and taken as the Gittins index. Chunks that
were used together leave together, the tail of the prompt first, so a choice costs little per chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.keys import OffloadKey
from kvtier.policies._base import EvictionPolicy
from kvtier.policies._ghosts import RECORD_BITS, Ghosts
from kvtier.policies._reuse import CLASS_OF_USES, CLASSES, MAX_USES, UNITS, ReuseModel

_GHOSTS = 8  # remembered for each slot
_UPDATE_UNITS = 2.0
_UPDATE_USES = 256  # at least: an update takes 0.3 ms
_SHARDS = 64  # one dict of all keys would take 50 ms to grow, in one call


_TIME_BITS = RECORD_BITS - MAX_USES.bit_length() - 1
TIME = (1 << _TIME_BITS) - 1
_SOON = TIME + 1  # the bit of a record above its time
_USES_BITS = _TIME_BITS + 1
_SOON_CAPACITIES = 2.0  # of uses


class Run:
    """Chunks that were used together, as often; a link in the ring of their class.

    ``record`` is as ghosts remember it: number of uses, whether the last one came soon after the one before,
    and its time.
    """

    __slots__ = ("held", "keys", "newer", "number", "older", "record", "ring")

    def __init__(self, keys: list[OffloadKey], record: int, number: int = 0) -> None:
        self.number = number
        self.keys = keys  # in the order of the prompt; keys that have left are among them
        self.held = len(keys)  # how many have not left
        self.record = record
        self.older = self.newer = self.ring = self  # the ring's own run holds what all its runs hold

    def link(self, ring: Run) -> None:
        """Become the newest run of a ring. The ring's own link is between its newest and its oldest run."""
        self.ring = ring
        ring.held += self.held
        self.older, self.newer = ring.older, ring
        ring.older.newer = ring.older = self

    def unlink(self) -> None:
        self.older.newer, self.newer.older = self.newer, self.older


class LHD(EvictionPolicy):
    """Least hit density."""

    def __init__(self, capacity: int = 0) -> None:
        self._ghosts = Ghosts()
        self._model = ReuseModel()
        self.resize(capacity)
        self.clear()

    def resize(self, capacity: int) -> None:
        super().resize(capacity)
        self._unit = max(1.0, capacity / UNITS)
        self._ghosts.resize(capacity * _GHOSTS)

    def clear(self) -> None:
        self._ghosts.clear()
        self._model = ReuseModel()
        self._now = self._updated = self._count = 0  # time is counted in uses of chunks
        # Numbers of runs by key: a dict of bytes and integers costs the garbage collector nothing.
        self._homes: list[dict[OffloadKey, int]] = [{} for _ in range(_SHARDS)]
        self._runs: dict[int, Run] = {}
        self._made = 0
        self._pinned: dict[OffloadKey, int] = {}  # records: a run would keep its neighbours alive
        # By number of uses; of those whose last use came late first. LHD makes no difference between the two.
        self._rings = [Run([], 0) for _ in range(2 * CLASSES)]

    def add(self, keys: Sequence[OffloadKey], *, used: bool) -> None:
        pinned, recall = self._pinned, self._ghosts.recall
        batches: dict[int, list[OffloadKey]] = {}
        batch: list[OffloadKey] = []
        record, is_use, begun = -1, False, 0
        for key in reversed(keys):
            old = pinned.pop(key, None)
            # A chunk was used whenever one behind it was. This mends what ghosts have forgotten: a prompt
            # of which one chunk counted as new would soon have a hole.
            known = max(recall(key) if old is None else old, record)
            if known != record or is_use != (used or old is None):
                self._note(record, is_use, len(batch) - begun)
                record, is_use = known, used or old is None
                batch = batches.setdefault(self._next(known, used=used, is_use=is_use), [])
                begun = len(batch)
            batch.append(key)
        self._note(record, is_use, len(batch) - begun)
        self._now += len(keys)
        self._count += len(keys)
        for known, batch in batches.items():
            batch.reverse()
            self._link(batch, known | self._now)

    def _next(self, record: int, *, used: bool, is_use: bool) -> int:
        """Return a chunk's next record, without a time, after one that may be a use."""
        uses = record >> _USES_BITS
        if not is_use:
            return record & ~TIME
        age = self._now - (record & TIME)
        is_soon = used or (uses and age <= _SOON_CAPACITIES * self.capacity)
        return min(uses + 1, MAX_USES) << _USES_BITS | (_SOON if is_soon else 0)

    def _note(self, record: int, is_use: bool, count: int) -> None:
        """Note uses of chunks, for the model."""
        if not is_use:
            return
        uses, model = record >> _USES_BITS, self._model
        model.used[CLASS_OF_USES[min(uses + 1, MAX_USES)]] += count
        if uses:
            age = (self._now - (record & TIME)) / self._unit
            model.reused[CLASS_OF_USES[uses]][model.bin_of(age)] += count

    def _link(self, batch: list[OffloadKey], record: int) -> None:
        self._made = number = self._made + 1
        run = self._runs[number] = Run(batch, record, number)
        run.link(self._rings[CLASS_OF_USES[record >> _USES_BITS] + (CLASSES if record & _SOON else 0)])
        homes = self._homes
        for key in batch:
            homes[key[-5] % _SHARDS][key] = number

    def pin(self, keys: Sequence[OffloadKey]) -> None:
        homes, runs, pinned = self._homes, self._runs, self._pinned
        for key in keys:
            run = runs[homes[key[-5] % _SHARDS].pop(key)]
            pinned[key] = run.record
            run.held -= 1
            run.ring.held -= 1
            if not run.held:
                self._drop(run)
            elif run.held * 2 < len(run.keys):
                run.keys = [key for key in run.keys if homes[key[-5] % _SHARDS].get(key) == run.number]
        self._count -= len(keys)

    def _drop(self, run: Run) -> None:
        del self._runs[run.number]
        run.unlink()

    def evict(self, count: int) -> list[OffloadKey]:
        self._learn()
        evicted: list[OffloadKey] = []
        count = min(count, self._count)
        while len(evicted) < count:
            self._take(self._choose(), count, evicted)
        self._count -= len(evicted)
        return evicted

    def _learn(self) -> None:
        """Update the densities if enough has been noted since they were updated last."""
        elapsed = self._now - self._updated
        if elapsed >= max(_UPDATE_UNITS * self._unit, _UPDATE_USES):
            self._model.update(elapsed / self._unit, elapsed / self._unit / UNITS)
            self._updated = self._now

    def _choose(self) -> Run:
        """Return the run to evict from: of each class the oldest and the newest one are considered."""
        density, bin_of, now, unit = self._model.density, self._model.bin_of, self._now, self._unit
        least, chosen = 0.0, None
        for ring, densities in zip(self._rings, density * 2, strict=True):
            for run in (ring.newer, ring.older):
                if run is not ring:
                    found = densities[bin_of((now - (run.record & TIME)) / unit)]
                    if chosen is None or found < least:
                        least, chosen = found, run
        assert chosen is not None
        return chosen

    def _take(self, run: Run, count: int, evicted: list[OffloadKey]) -> None:
        """Evict keys of a run from its tail until it is empty or so many are evicted."""
        homes, remember, keys, record = self._homes, self._ghosts.remember, run.keys, run.record
        before = run.held
        while run.held and len(evicted) < count:
            key = keys.pop()
            shard = homes[key[-5] % _SHARDS]
            if shard.get(key) == run.number:
                del shard[key]
                run.held -= 1
                evicted.append(key)
                remember(key, record)
        run.ring.held -= before - run.held
        if not run.held:
            self._drop(run)

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and key in self._homes[key[-5] % _SHARDS]
