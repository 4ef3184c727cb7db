"""Random lives of engines that are killed and restarted over the same host memory: no wrong bytes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from kvtier._core.limits import Limits
from kvtier._core.messages import Answer, Command, Get, GetEnded, Put, PutEnded, SlotsReady
from kvtier._core.requests import Request
from kvtier._core.slot_trailers import SlotTrailers, slot_trailers_bytes
from kvtier._core.states import Lookup
from kvtier._core.tiering import Tiering
from kvtier._core.tiers.tier_status import TierStatus
from kvtier._core.transfers import Reservation
from kvtier.keys import OffloadKey, pack_key
from kvtier.policies import LRU
from kvtier.tiers._seal import check, read, seal
from kvtier_testing import invariants
from tests.effort import effort

SLOTS, CHUNK_BYTES, STEPS = 6, 64, 400
KEYS = [pack_key(bytes([number])) for number in range(10)]
DIGEST = bytes(16)


class World:
    """Host memory and files that outlive engines, and the current engine.

    The bytes of a chunk depend on its key and the weights. Each reset comes with new weights; an engine
    starts with those of its model's files.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.memory = [bytearray(CHUNK_BYTES) for _ in range(SLOTS)]
        self.trailers = SlotTrailers(memoryview(bytearray(slot_trailers_bytes(SLOTS))), SLOTS)
        self.files: dict[OffloadKey, bytes] = {}
        self.resets = self.weights = 0
        self.start()

    def start(self) -> None:
        """Start an engine, which adopts chunks."""
        tiers = [TierStatus("adopted", in_place=True)]
        tiers += [TierStatus("files")] if self.random.random() < 0.7 else []
        self.core = Tiering(LRU(), tiers, Limits(promotion_reserve=0.0, promotion_budget=1.0))
        entries = self.trailers.adopt()
        found = {sealed.key: slot for slot, trailer in entries if (sealed := read(trailer)) is not None}
        self.core.table.adopt(self.trailers, found)
        self.core.on_event(SlotsReady(range(SLOTS)), 0.0)
        self.stores: list[tuple[Reservation, int]] = []
        self.commands: list[tuple[Command, int]] = []
        if self.weights:
            self.files.clear()  # they belong to the engine that was reset
        self.weights = 0

    def content(self, key: OffloadKey, weights: int) -> bytes:
        return random.Random(f"{key.hex()} {weights}").randbytes(CHUNK_BYTES)

    def step(self) -> None:
        acts = [self.offer, self.copy, self.carry_out, self.carry_out, self.ask, self.ask, self.verify]
        rare = self.random.random()
        (self.die if rare < 0.02 else self.reset if rare < 0.03 else self.random.choice(acts))()
        self.commands += [(command, self.weights) for command in self.core.take_commands()]
        invariants.check(self.core)

    def some_keys(self) -> list[OffloadKey]:
        return self.random.sample(KEYS, self.random.randint(1, 3))

    def offer(self) -> None:
        """Begin a store."""
        if reservation := self.core.reserve(self.some_keys()):
            self.stores.append((reservation, self.weights))

    def copy(self) -> None:
        """End a store: it succeeds, fails, or writes parts of some chunks."""
        if not self.stores:
            return
        reservation, weights = self.stores.pop(self.random.randrange(len(self.stores)))
        bad = {slot: "failed" for slot in reservation.slots if self.random.random() < 0.1}
        for key, slot in zip(reservation.keys, reservation.slots, strict=True):
            whole = CHUNK_BYTES // 2 if slot in bad else CHUNK_BYTES
            self.memory[slot][:whole] = self.content(key, weights)[:whole]
        self.core.drop_unfilled(reservation, bad)
        end = self.core.abort if weights != self.weights or self.random.random() < 0.1 else None
        end(reservation) if end else self.core.commit(reservation, 0.0)

    def carry_out(self) -> None:
        """Execute a command."""
        if self.commands:
            command, weights = self.commands.pop(self.random.randrange(len(self.commands)))
            if isinstance(command, Put):
                self.core.on_event(PutEnded(command.id, self.put(command, weights)), 0.0)
            elif isinstance(command, Get):
                self.core.on_event(GetEnded(command.id, self.get(command)), 0.0)

    def put(self, command: Put, weights: int) -> Sequence[bool]:
        """Put chunks; the tier of adopted chunks may also run puts from before a reset."""
        for key, slot in zip(command.keys, command.slots, strict=True):
            if command.tier == 0:
                self.trailers.write(slot, seal(key, memoryview(self.memory[slot]), DIGEST))
            elif weights == self.weights and self.memory[slot] == self.content(key, weights):  # audited
                self.files[key] = bytes(self.memory[slot])
        return [weights == self.weights] * len(command.keys)

    def get(self, command: Get) -> Sequence[Answer]:
        answers = [self.find(command.tier, key) for key in command.keys]
        for index, (key, slot) in enumerate(zip(command.keys, command.slots, strict=False)):
            if answers[index] is Answer.MISSING:
                break
            if command.tier == 0:
                trailer, payload = self.trailers.read(slot), memoryview(self.memory[slot])
                assert not check(trailer, key, payload, DIGEST).is_corrupt, "adopted chunks are whole"
            else:
                self.memory[slot][:] = self.files[key]
            answers[index] = Answer.COPIED
        return answers

    def find(self, tier: int, key: OffloadKey) -> Answer:
        return Answer.LOCATED if tier == 0 or key in self.files else Answer.MISSING

    def ask(self) -> None:
        """Look a prompt up until it is loaded or missed; check that it has the bytes that the engine would
        compute."""
        request, keys = Request(), self.some_keys()
        hits: list[OffloadKey] = []
        for _ in range(8):
            hits = [key for key in keys if self.core.lookup(key, request) is Lookup.HIT]
            if len(hits) == len(keys) or self.random.random() < 0.3:
                break
            self.core.settle(0.0)
            self.commands += [(command, self.weights) for command in self.core.take_commands()]
            self.carry_out()
            hits = []
        if hits:
            pinned = self.core.acquire(hits, request)
            for key, slot, origin in zip(hits, pinned.slots, pinned.origins, strict=True):
                assert self.memory[slot] == self.content(key, self.weights), "a load brings wrong bytes"
                self.counts["adopted"] += origin == 0
            if self.random.random() < 0.05:
                for slot in pinned.slots:  # the damage that an audit of the load detects
                    self.memory[slot][0] ^= 1
                self.core.fail_load(pinned, request)
            else:
                self.core.release(pinned)
        self.core.close(request, 0.0)

    def verify(self) -> None:
        """Verify a chunk in the background; the engine continues before the mark is set."""

        def is_whole(trailer: bytes) -> bool:
            payload = memoryview(bytes(self.memory[slot]))
            for _ in range(self.random.randrange(4)):
                self.random.choice([self.offer, self.copy, self.carry_out, self.reset])()
            sealed = read(trailer)
            return sealed is not None and not check(trailer, sealed.key, payload, DIGEST).is_corrupt

        for slot in self.trailers.unverified()[:1]:
            self.counts["verified"] += self.trailers.verify(slot, is_whole)

    def reset(self) -> None:
        self.core.reset()
        self.files.clear()
        self.resets += 1
        self.weights = self.resets

    def die(self) -> None:
        """Die amid copies and commands, some of which have finished, and start again."""
        self.end_copies()
        for command, weights in self.commands:
            if self.random.random() < 0.5 and isinstance(command, Put):
                self.put(command, weights)
            elif self.random.random() < 0.5 and isinstance(command, Get) and command.tier:
                self.get(command)
        self.start()

    def end_copies(self) -> None:
        """Copy parts of the chunks in flight."""
        for reservation, weights in self.stores:
            for key, slot in zip(reservation.keys, reservation.slots, strict=True):
                part = self.random.randrange(CHUNK_BYTES + 1)
                self.memory[slot][:part] = self.content(key, weights)[:part]


class LateWriter(World):
    """A worker outlives its engine: its copies end after the next engine has filled the slots."""

    late: Sequence[Callable[[], None]] = ()

    def die(self) -> None:
        stores, self.stores = self.stores, []
        super().die()
        self.late = [partial(self.write, reservation, weights) for reservation, weights in stores]

    def copy(self) -> None:
        super().copy()
        for end_copy in self.late if self.random.random() < 0.5 else ():
            end_copy()

    def write(self, reservation: Reservation, weights: int) -> None:
        for key, slot in zip(reservation.keys, reservation.slots, strict=True):
            self.memory[slot][:] = self.content(key, weights)


def live(runs: int, world_type: type[World] = World) -> Counter[str]:
    """Return how many adopted chunks were loaded, and verified in the background, in ``runs`` lives."""
    counts: Counter[str] = Counter()
    for seed in range(runs):
        world = world_type(seed)
        for _ in range(STEPS):
            world.step()
        counts += world.counts
    return counts


def test_no_restart_brings_wrong_bytes() -> None:
    counts = live(effort(30, 2000))
    assert min(counts["adopted"], counts["verified"]) > 50


def test_late_writer_is_found() -> None:
    with pytest.raises(AssertionError, match=r"wrong bytes|whole"):
        live(200, LateWriter)


_fill = SlotTrailers.fill


def _fill_once(self: SlotTrailers, slots: Sequence[int]) -> None:
    _fill(self, [slot for slot in slots if not self.read(slot).strip(b"\0")])


def _fill_as_written(self: SlotTrailers, slots: Sequence[int]) -> None:
    """Write entries before their bytes."""
    _fill(self, slots)
    for slot in slots:
        self.write(slot, self.read(slot))


@pytest.mark.parametrize(
    ("method", "planted"),
    [
        ("fill", _fill_once),
        ("fill", _fill_as_written),
        ("drop", lambda self, slots: None),
        ("reset", lambda self: None),
    ],
    ids=["filled again", "entry before its bytes", "dropped", "reset"],
)
def test_entries_that_are_not_voided_are_found(
    method: str, planted: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlotTrailers, method, planted)
    with pytest.raises(AssertionError, match=r"wrong bytes|whole"):
        live(200)
