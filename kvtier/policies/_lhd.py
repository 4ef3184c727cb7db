"""Evicts the least hit density first: it keeps the chunks with most hits for the time that they take room.

After Beckmann, Chen and Cidon, "LHD: Improving Cache Hit Rate by Maximizing Hit Density" (NSDI 2018). Hit
density is learned by number of uses and age, ghosts included, and taken as the Gittins index. Chunks that
were used together leave together, the tail of the prompt first, so a choice costs little per chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtier.keys import OffloadKey
from kvtier.policies._aged import PartOfRun, deepest, run_of
from kvtier.policies._base import EvictionPolicy, Run
from kvtier.policies._ghosts import RECORD_BITS, Ghosts
from kvtier.policies._reuse import CLASS_OF_USES, CLASSES, MAX_USES, UNITS, ReuseModel

_GHOSTS = 8  # ghosts remembered for each slot
_UPDATE_UNITS = 2.0
_UPDATE_USES = 256  # minimum number of uses between updates, because an update takes 0.3 ms
_SHARDS = 64  # Split, because a single dict of all keys would take 50 ms to grow in one call.


_TIME_BITS = RECORD_BITS - MAX_USES.bit_length() - 1
TIME = (1 << _TIME_BITS) - 1
_SOON = TIME + 1  # the bit of a record above its time bits
_USES_BITS = _TIME_BITS + 1
_SOON_CAPACITIES = 2.0  # of uses


class Part(PartOfRun):
    """Keys of one run that were used as often; a link in the ring of their class.

    ``record`` is as ghosts remember it: number of uses, whether the last one came soon after the one before,
    and its time.
    """

    __slots__ = ("held", "newer", "next", "number", "older", "record", "ring")

    def __init__(self, run: Run, record: int, number: int = 0) -> None:
        super().__init__(run)
        self.number = number
        self.record = record
        self.held = 0  # In the ring's own part: the number of keys in all parts.
        self.next: Part | None = None  # the next part of the same run
        self.older = self.newer = self.ring = self

    def link(self, ring: Part) -> None:
        """Enter a ring by time. The ring's own link is between its newest and its oldest part."""
        older, time = ring.older, self.record & TIME
        while older is not ring and older.record & TIME > time:
            older = older.older
        self.ring, self.older, self.newer = ring, older, older.newer
        older.newer.older = older.newer = self

    def unlink(self) -> None:
        self.older.newer, self.newer.older = self.newer, self.older

    @property
    def of_run(self) -> Iterator[Part]:
        """Iterate over this part and the later parts of its run."""
        part: Part | None = self
        while part is not None:
            yield part
            part = part.next


class LHD(EvictionPolicy):
    """Least hit density."""

    def __init__(self, capacity: int = 0) -> None:
        self._ghosts = Ghosts()
        self._model = ReuseModel()
        self.resize(capacity)
        self.clear()

    def resize(self, capacity: int) -> None:
        super().resize(capacity)
        self._set_pace(capacity)
        self._ghosts.resize(capacity * _GHOSTS)

    def _set_pace(self, capacity: int) -> None:
        """Set the number of uses in a unit of age, and the number of uses that count as soon."""
        self._unit = max(1.0, capacity / UNITS)
        self._soon = _SOON_CAPACITIES * capacity

    def clear(self) -> None:
        self._ghosts.clear()
        self._model = ReuseModel()
        self._now = self._updated = self._count = 0  # time is the number of uses of chunks
        # Numbers of parts by key: a dict of bytes and integers costs the garbage collector nothing.
        self._homes: list[dict[OffloadKey, int]] = [{} for _ in range(_SHARDS)]
        self._parts: dict[int, Part] = {}
        self._of_runs: dict[int, Part] = {}  # the first part of each run
        self._made = 0
        # Records instead of parts, because a part would keep its neighbours alive.
        self._pinned: dict[OffloadKey, int] = {}
        # By number of uses; of those whose last use came late first. LHD makes no difference between the two.
        self._rings = [Part(Run(), 0) for _ in range(2 * CLASSES)]

    def add(self, keys: Sequence[OffloadKey], *, used: bool) -> None:
        self.add_run(run_of(keys, self._now + len(keys)), keys, used=used)

    def add_run(self, run: Run, keys: Sequence[OffloadKey], *, used: bool) -> None:
        self._now = max(self._now, run.time)
        pinned, recall = self._pinned, self._ghosts.recall
        batches: dict[int, list[OffloadKey]] = {}
        batch: list[OffloadKey] = []
        record, is_use, begun = -1, False, 0
        for key in reversed(keys):
            old = pinned.pop(key, None)
            # A chunk was used whenever a later one was. This repairs records that ghosts forgot: a chunk that
            # counts as new would soon be a hole in its prompt.
            known = max(recall(key) if old is None else old, record)
            if known != record or is_use != (used or old is None):
                self._note(record, is_use, len(batch) - begun)
                record, is_use = known, used or old is None
                batch = batches.setdefault(self._next(known, used=used, is_use=is_use), [])
                begun = len(batch)
            batch.append(key)
        self._note(record, is_use, len(batch) - begun)
        self._count += len(keys)
        for known, batch in batches.items():
            batch.reverse()
            self._enter(run, batch, known)

    def _next(self, record: int, *, used: bool, is_use: bool) -> int:
        """Return a chunk's next record, without a time, after one that may be a use."""
        uses = record >> _USES_BITS
        if not is_use:
            return record & ~TIME
        age = self._now - (record & TIME)
        is_soon = used or (uses and age <= self._soon)
        return min(uses + 1, MAX_USES) << _USES_BITS | (_SOON if is_soon else 0)

    def _note(self, record: int, is_use: bool, count: int) -> None:
        if not is_use:
            return
        uses, model = record >> _USES_BITS, self._model
        model.used[CLASS_OF_USES[min(uses + 1, MAX_USES)]] += count
        if uses:
            age = (self._now - (record & TIME)) / self._unit
            model.reused[CLASS_OF_USES[uses]][model.bin_of(age)] += count

    def _enter(self, run: Run, batch: list[OffloadKey], record: int) -> None:
        """Add keys, which have the same record, to their run."""
        first = self._of_runs.get(run.number)
        part = next((it for it in first.of_run if it.record & ~TIME == record), None) if first else None
        if part is None:
            self._made += 1
            part = self._parts[self._made] = Part(run, record | run.time, self._made)
            part.link(self._rings[CLASS_OF_USES[record >> _USES_BITS] + (CLASSES if record & _SOON else 0)])
            part.next, self._of_runs[run.number] = first, part
        else:
            self._refresh(part)
        part.add(batch)
        part.ring.held += len(batch)
        homes, number = self._homes, part.number
        for key in batch:
            homes[key[-5] % _SHARDS][key] = number

    def _refresh(self, part: Part) -> bool:
        """Move a part to its place if its run was used meanwhile; return whether it was."""
        is_old = part.run.time > part.record & TIME
        if is_old:
            part.unlink()
            part.record = part.record & ~TIME | part.run.time
            part.link(part.ring)
        return is_old

    def pin(self, keys: Sequence[OffloadKey]) -> None:
        homes, parts, pinned = self._homes, self._parts, self._pinned
        for key in keys:
            part = parts[homes[key[-5] % _SHARDS].pop(key)]
            pinned[key] = part.record
            del part.keys[key]
            part.ring.held -= 1
            if not part.keys:
                self._drop(part)
        self._count -= len(keys)

    def _drop(self, part: Part) -> None:
        del self._parts[part.number]
        part.unlink()
        first = self._of_runs[part.run.number]
        if first is not part:
            next(it for it in first.of_run if it.next is part).next = part.next
        elif part.next is not None:
            self._of_runs[part.run.number] = part.next
        else:
            del self._of_runs[part.run.number]

    def evict(self, count: int) -> list[OffloadKey]:
        self._learn()
        evicted: list[OffloadKey] = []
        count = min(count, self._count)
        while len(evicted) < count:
            evicted += self._take(self._choose(), count - len(evicted))
        self._count -= len(evicted)
        return evicted

    def _learn(self) -> None:
        """Update the densities if enough uses were recorded since the last update."""
        elapsed = self._now - self._updated
        if elapsed >= max(_UPDATE_UNITS * self._unit, _UPDATE_USES):
            self._model.update(elapsed / self._unit, elapsed / self._unit / UNITS)
            self._updated = self._now

    def _choose(self) -> Part:
        """Return the part to evict from. The candidates are the oldest and the newest part of each class."""
        density, bin_of, now, unit = self._model.density, self._model.bin_of, self._now, self._unit
        least, chosen = 0.0, None
        for ring, densities in zip(self._rings, density * 2, strict=True):
            if (oldest := self._oldest(ring)) is ring:
                continue
            for part in (oldest, ring.older):
                found = densities[bin_of((now - (part.record & TIME)) / unit)]
                if chosen is None or found < least:
                    least, chosen = found, part
        assert chosen is not None
        return chosen

    def _oldest(self, ring: Part) -> Part:
        """Return the oldest part of a ring, or the ring's own part if it has none."""
        while (oldest := ring.newer) is not ring and self._refresh(oldest):
            pass
        return oldest

    def _take(self, part: Part, count: int) -> list[OffloadKey]:
        """Evict up to ``count`` keys of the run of a part, the last of its prompt first."""
        first = self._of_runs[part.run.number]
        if first.next is not None:
            part, count = deepest(first.of_run, count)
        homes, remember, record = self._homes, self._ghosts.remember, part.record
        taken = part.pop(count)
        for key in taken:
            del homes[key[-5] % _SHARDS][key]
            remember(key, record)
        part.ring.held -= len(taken)
        if not part.keys:
            self._drop(part)
        return taken

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and key in self._homes[key[-5] % _SHARDS]
