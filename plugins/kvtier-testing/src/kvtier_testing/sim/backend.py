"""The backend of a simulated tier: chunks that outlive processes, and the faults that are injected now."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from random import Random

from kvtier.keys import OffloadKey
from kvtier.tiers._seal import seal
from kvtier_testing.sim.model import GARBAGE, IDENTITY, World, content

_ANOTHER = OffloadKey(b"another chunk\0\0\0\0")


@dataclass(frozen=True, slots=True)
class FaultProfile:
    """The faults of a tier for a while. Shares are of calls, or of chunks where that is said.

    Attributes:
        latency_s: seconds that a call takes, about.
        error: share that fails before anything is done.
        lost: share that is done and whose answer is lost: it fails all the same.
        hang: share that does not go on until the profile changes to one without hangs.
        late: share that takes a hundred times as long.
        cancelled: share that ends as if somebody had cancelled it, which nobody has.
        chunks: share of chunks that fail, though others of their batch do not.
        damage: share of chunks that are given with wrong bytes, where kvtier checks them.
        again: share of puts that the backend takes a second time, later.
        closed: whether the tier cannot be opened.
        full: whether there is no room.
        only: the calls that fail, are lost, hang, come late or are cancelled; all of them by default.
    """

    latency_s: float = 0.002
    error: float = 0.0
    lost: float = 0.0
    hang: float = 0.0
    late: float = 0.0
    cancelled: float = 0.0
    chunks: float = 0.0
    damage: float = 0.0
    again: float = 0.0
    closed: bool = False
    full: bool = False
    only: tuple[str, ...] | None = None


NO_FAULTS = FaultProfile()


@dataclass(slots=True)
class Record:
    """What a backend keeps of a chunk.

    Attributes:
        trailer: what proves them.
        durable: whether they are there after a crash.
        owner: through which backend they were put.
    """

    payload: bytes
    trailer: bytes
    durable: bool
    owner: Backend


class Backend:
    """What is behind a tier, a disk or a server, as one engine has it. It outlives the engine's processes.

    Args:
        beside: the backend of another engine with the same identity, where both share their chunks.

    Attributes:
        records: the chunks, the least recently used first. After a reset they are those of one process.
        capacity: how many there may be.
        process: who has it open.
        unreported: chunks that may be announced though they are gone: nobody reported that they left.
    """

    def __init__(self, world: World, name: str, capacity: int, beside: Backend | None = None) -> None:
        self.world = world
        self.name = name
        self.chance = world.chance(name)
        self._shared: OrderedDict[OffloadKey, Record] = OrderedDict() if beside is None else beside._shared
        self._sharing: list[Backend] = [] if beside is None else beside._sharing
        self._sharing.append(self)
        self.records = self._shared
        self.capacity = capacity
        self.faults = NO_FAULTS
        self.process = 0
        self.unreported: set[OffloadKey] = set()
        self.resumed = asyncio.Event()
        self.resumed.set()

    @property
    def was_reset(self) -> bool:
        """Whether this process was reset: it has chunks of its own only."""
        return self.records is not self._shared

    def set_faults(self, faults: FaultProfile) -> None:
        """Inject other faults from now on. Calls that hang resume when the new profile has no hangs."""
        if self.world.traces:
            self.world.note(f"{self.name}: {faults}")
        self.faults = faults
        if faults.hang:
            self.resumed.clear()
        else:
            self.resumed.set()

    def connect(self) -> int:
        """A process opens it; what another one put after a reset is not for it."""
        self.process += 1
        self.records = self._shared
        return self.process

    def crash(self) -> None:
        """The process has died: what was not durable is gone, as far as chance will have it."""
        self.process += 1
        mine = [key for key, record in self.records.items() if record.owner is self and not record.durable]
        self._drop([key for key in mine if self.chance.random() >= 0.3])
        if self.chance.random() < self.faults.damage:
            self.damage()

    def write(self, process: int, key: OffloadKey, payload: bytes, trailer: bytes, *, durable: bool) -> bool:
        """Keep a chunk; return whether there was room."""
        if process != self.process:
            return False
        if key not in self.records and len(self.records) >= self.capacity:
            return False
        self.records[key] = Record(payload, trailer, durable, self)
        self.records.move_to_end(key)
        return True

    def preload(self, key: OffloadKey) -> None:
        """Store a chunk as a run before this one has, with the weights that processes start with."""
        payload = content(key, self.world.first_weights)
        trailer = seal(key, memoryview(payload), self.world.identity.short_digest)
        self.write(self.process, key, payload, trailer, durable=True)

    def share(self, key: OffloadKey) -> None:
        """Store a chunk as another engine does meanwhile. After a reset such chunks are invisible here."""
        if not self.was_reset and key not in self.records:
            self.preload(key)
            self.world.seen["shared by another engine"] += 1

    def read(self, process: int, key: OffloadKey) -> Record | None:
        """Return what is kept of a chunk."""
        record = self.records.get(key) if process == self.process else None
        if record is not None:
            self.records.move_to_end(key)
        return record

    def forget(self, process: int, keys: Sequence[OffloadKey]) -> None:
        """Keep these no longer."""
        if process == self.process:
            self._drop(keys)

    def empty(self) -> None:
        """Lose everything, without a word."""
        self.unreported.update(self.records)
        self._drop(list(self.records))

    def evict(self, count: int) -> Sequence[OffloadKey]:
        """Lose the least recently used chunks."""
        return self._drop(list(islice(self.records, count)))

    def reset(self, process: int) -> None:
        """Forget everything for as long as this process lives; other engines do not."""
        if process == self.process:
            self.records = OrderedDict()

    def damage(self, share: float = 0.5) -> None:
        """Corrupt a share of the stored chunks."""
        for key in list(self.records):
            if self.chance.random() < share:
                record = self.records[key]
                payload, trailer = corrupt(self.chance, record.payload, record.trailer)
                self.records[key] = replace(record, payload=payload, trailer=trailer)
                self.world.seen["bits rotted"] += 1

    def has(self, key: OffloadKey, weights: int) -> bool:
        """Return whether a chunk is there and whole."""
        record = self.records.get(key)
        return record is not None and record.payload == content(key, weights)

    def _drop(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Keep these no longer; the other engines that have announced them are not told."""
        for key in keys:
            self.records.pop(key, None)
        for other in self._sharing:
            if other is not self:
                other.unreported.update(keys)
        return keys


def corrupt(chance: Random, payload: bytes, trailer: bytes) -> tuple[bytes, bytes]:
    """Damage a chunk: a bit has turned over, it is torn, or it is another one."""
    kind = chance.randrange(5 if trailer else 3)
    if kind == 0:
        where = chance.randrange(len(payload))
        return payload[:where] + bytes([payload[where] ^ 1 << chance.randrange(8)]) + payload[
            where + 1 :
        ], trailer
    if kind == 1:
        where = chance.randrange(1, len(payload))
        torn = payload[:where] + GARBAGE[where:]
        return torn if torn != payload else GARBAGE, trailer
    other = content(_ANOTHER, 0)
    if kind == 2:
        return other, trailer
    if kind == 3:
        return payload, trailer[: chance.randrange(len(trailer))]
    return other, seal(_ANOTHER, memoryview(other), IDENTITY.short_digest)
