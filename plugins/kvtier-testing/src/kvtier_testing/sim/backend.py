"""The backend of a simulated tier: chunks that outlive processes, and the faults currently injected."""

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
    """The faults of a tier for a while. Fractions refer to calls, unless they name chunks.

    Attributes:
        latency_s: approximate duration of a call in seconds.
        error: fraction that fails before having any effect.
        lost: fraction that takes effect but fails, because the answer is lost.
        hang: fraction that hangs until the profile changes to one without hangs.
        late: fraction that takes a hundred times as long.
        cancelled: fraction that raises ``CancelledError`` although it was not cancelled.
        chunks: fraction of chunks that fail individually.
        damage: fraction of chunks returned with wrong bytes, if kvtier verifies them.
        again: fraction of puts that the backend applies a second time, later.
        closed: whether the tier cannot be opened.
        full: whether the tier is full.
        only: calls that these faults can hit; all by default.
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
    """A backend's record of a chunk.

    Attributes:
        trailer: the checksum trailer of the payload.
        durable: whether the payload survives a crash.
        owner: the backend through which it was put.
    """

    payload: bytes
    trailer: bytes
    durable: bool
    owner: Backend


class Backend:
    """A disk or server behind a tier, as one engine sees it. It outlives the engine's processes.

    Args:
        beside: backend of another engine with the same identity, if both share their chunks.

    Attributes:
        records: the chunks, least recently used first. After a reset they belong to one process.
        capacity: maximum number of chunks.
        process: the process that has it open.
        unreported: chunks that left without a report, and so may still be announced.
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
        """Whether this process was reset and sees only its own chunks."""
        return self.records is not self._shared

    def set_faults(self, faults: FaultProfile) -> None:
        """Inject other faults from now on. Hanging calls resume if the new profile has no hangs."""
        if self.world.traces:
            self.world.note(f"{self.name}: {faults}")
        self.faults = faults
        if faults.hang:
            self.resumed.clear()
        else:
            self.resumed.set()

    def connect(self) -> int:
        """Connect a new process, which cannot see chunks that another one put after a reset."""
        self.process += 1
        self.records = self._shared
        return self.process

    def crash(self) -> None:
        """Simulate a crash of the process: chunks that were not durable are lost at random."""
        self.process += 1
        mine = [key for key, record in self.records.items() if record.owner is self and not record.durable]
        self._drop([key for key in mine if self.chance.random() >= 0.3])
        if self.chance.random() < self.faults.damage:
            self.damage()

    def write(self, process: int, key: OffloadKey, payload: bytes, trailer: bytes, *, durable: bool) -> bool:
        """Write a chunk; return whether there was room."""
        if process != self.process:
            return False
        if key not in self.records and len(self.records) >= self.capacity:
            return False
        self.records[key] = Record(payload, trailer, durable, self)
        self.records.move_to_end(key)
        return True

    def preload(self, key: OffloadKey) -> None:
        """Store a chunk as an earlier run would, with the initial weights."""
        payload = content(key, self.world.first_weights)
        trailer = seal(key, memoryview(payload), self.world.identity.short_digest)
        self.write(self.process, key, payload, trailer, durable=True)

    def share(self, key: OffloadKey) -> None:
        """Store a chunk as another engine would. After a reset such chunks are invisible here."""
        if not self.was_reset and key not in self.records:
            self.preload(key)
            self.world.seen["shared by another engine"] += 1

    def read(self, process: int, key: OffloadKey) -> Record | None:
        """Return the record of a chunk, if any."""
        record = self.records.get(key) if process == self.process else None
        if record is not None:
            self.records.move_to_end(key)
        return record

    def forget(self, process: int, keys: Sequence[OffloadKey]) -> None:
        """Remove chunks."""
        if process == self.process:
            self._drop(keys)

    def empty(self) -> None:
        """Lose all chunks without reporting it."""
        self.unreported.update(self.records)
        self._drop(list(self.records))

    def evict(self, count: int) -> Sequence[OffloadKey]:
        """Evict the least recently used chunks."""
        return self._drop(list(islice(self.records, count)))

    def reset(self, process: int) -> None:
        """Hide all chunks from this process until its end, but not from other engines."""
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
        """Return whether an intact chunk is present."""
        record = self.records.get(key)
        return record is not None and record.payload == content(key, weights)

    def _drop(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Remove chunks without telling other engines that have announced them."""
        for key in keys:
            self.records.pop(key, None)
        for other in self._sharing:
            if other is not self:
                other.unreported.update(keys)
        return keys


def corrupt(chance: Random, payload: bytes, trailer: bytes) -> tuple[bytes, bytes]:
    """Damage a chunk: flip a bit, tear it, or replace it by another."""
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
