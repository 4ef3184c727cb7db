"""The model of a simulated world, and the core that is checked against it.

A chunk's expected bytes follow from its key and from the engine's weights at the time of its store.
The world knows every slot and its current readers and writer.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import inf
from random import Random
from typing import Any, NoReturn

from kvtier import Identity
from kvtier._core.requests import Request
from kvtier._core.slot_trailers import SlotTrailers, slot_trailers_bytes
from kvtier._core.states import ChunkState
from kvtier.keys import OffloadKey
from kvtier_testing import invariants
from kvtier_testing.sim.efficiency import EfficiencyCheckedTiering
from kvtier_testing.sim.loop import SimLoop

CHUNK_BYTES = 64
IDENTITY = Identity.make("simulated", {"dtype": "int8"})
IDENTITIES = (IDENTITY, Identity.make("simulated", {"dtype": "fp8"}))
"""Identities of engines. An engine's initial weights have the number of its identity."""
GARBAGE = b"\xee" * CHUNK_BYTES


ADDRESS = re.compile(r"(?<=0x)[0-9a-f]+|(?<=cancel scope )[0-9a-f]+")  # differs in each run


class Violation(AssertionError):
    """A rule of the simulation was broken. The message gives the rule, the place and the time."""


@cache
def content(key: OffloadKey, weights: int) -> bytes:
    """Return the bytes of a chunk that was computed with these weights."""
    return hashlib.blake2b(key, digest_size=CHUNK_BYTES, salt=weights.to_bytes(8, "big")).digest()


@dataclass(frozen=True, slots=True)
class Use:
    """One reader's or writer's use of a slot."""

    who: str
    writes: bool


class SimMemory:
    """The slots of one process. Each access is registered first, and fails if it conflicts with another.

    Args:
        before: the slots of the process before, whose bytes and trailers these are; None for new ones.

    Attributes:
        trailers: trailers of the slots, for the next process.
    """

    def __init__(self, world: World, slots: int, before: SimMemory | None = None) -> None:
        self.slots = slots
        self._world = world
        held = before.held if before else bytearray(slots * CHUNK_BYTES)
        self.held: bytearray = held
        metadata = before.metadata if before else bytearray(slot_trailers_bytes(slots))
        self.metadata: bytearray = metadata
        self.trailers = SlotTrailers(memoryview(metadata), slots)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(held))
        self._bytes = memoryview(held)
        self._views = [self._bytes[slot * CHUNK_BYTES :][:CHUNK_BYTES] for slot in range(slots)]
        self._uses: list[list[Use]] = [[] for _ in range(slots)]

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one slot."""
        return CHUNK_BYTES

    def view(self, slot: int) -> memoryview:
        """Return the bytes of one slot."""
        return self._views[slot]

    def holds(self, slot: int, key: OffloadKey, weights: int) -> bool:
        """Return whether a slot holds a chunk computed with these weights."""
        return self._views[slot] == content(key, weights)

    def begin_use(self, slots: Sequence[int], who: str, *, writes: bool) -> Use:
        """Register a reader or writer of slots. A slot has many readers or one writer."""
        use = Use(who, writes)
        for slot in slots:
            for other in self._uses[slot]:
                if writes or other.writes:
                    verbs = "write" if writes else "read", "writes" if other.writes else "reads"
                    self._world.fail(f"{who} is to {verbs[0]} slot {slot}, which {other.who} {verbs[1]}")
            self._uses[slot].append(use)
        return use

    def end_use(self, slots: Sequence[int], use: Use) -> None:
        """End a use that ``begin_use`` registered."""
        for slot in slots:
            self._uses[slot].remove(use)

    @contextmanager
    def using(self, slots: Sequence[int], who: str, *, writes: bool) -> Iterator[None]:
        """Register a reader or writer while the context is entered."""
        use = self.begin_use(slots, who, writes=writes)
        try:
            yield
        finally:
            self.end_use(slots, use)

    def scribble(self, slots: Iterable[int]) -> None:
        """Overwrite slots with bytes that belong to no chunk."""
        for slot in slots:
            self._views[slot][:] = GARBAGE


class World:
    """The ground truth about one engine and its successive processes.

    Args:
        seed: name of the run; each part draws from its own random stream, derived from the seed.
        trace: callback for each line of the trace; None to disable it.
        identity: the engine's index in ``IDENTITIES``.

    Attributes:
        weights: the weights of the current process. Its initial weights belong to the identity;
            later ones are unique to this engine.
        seen: counts of events, which show whether a run exercised anything at all.
        process: number of the current process.
        is_alive: whether a process is running. Actions of dead processes are ignored.
    """

    def __init__(self, seed: object, trace: Callable[[str], object] | None = None, identity: int = 0) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        self.loop = loop
        self.seed = seed
        self.identity = IDENTITIES[identity]
        self.first_weights = self.weights = identity
        self.seen: Counter[str] = Counter()
        self.process = 0
        self.traces = trace is not None
        self.is_alive = True
        self._trace = trace
        self._name = ""
        self.had: list[int] = []  # weights that this process has had
        self._all: list[int] = list(range(len(IDENTITIES)))

    def beside(self, number: int, identity: int) -> World:
        """Return the ground truth about another engine of the same run."""
        other = World(f"{self.seed}/{number}", self._trace, identity)
        other._name = f"{number}: "
        other.seen, other._all = self.seen, self._all
        return other

    @property
    def now_s(self) -> float:
        """The virtual time."""
        return self.loop.time()

    def chance(self, name: str) -> Random:
        """Return an independent random stream: draws from other streams do not change it."""
        return Random(f"{self.seed}/{name}")

    def note(self, line: str) -> None:
        """Add a line to the trace. If the line is costly to make, check ``traces`` first."""
        if self._trace is not None:
            self._trace(f"{self.now_s:9.4f}  {self._name}{ADDRESS.sub('...', line)}")

    def start_process(self) -> None:
        """Start a process with the engine's initial weights."""
        self.process += 1
        self.weights = self.first_weights
        self.had = [self.weights]
        self.is_alive = True

    def new_weights(self) -> None:
        """Give the engine new, unique weights."""
        self.weights = len(self._all)
        self._all.append(self.weights)
        self.had.append(self.weights)

    def weights_since(self, oldest: int) -> list[int]:
        """Return the weights of this process from ``oldest`` on."""
        return [weights for weights in self.had if weights >= oldest]

    def is_of(
        self, key: OffloadKey, held: bytes | memoryview, oldest: int, had: Sequence[int] | None = None
    ) -> bool:
        """Return whether bytes are a chunk's, for any weights of a process from ``oldest`` on.

        ``had`` are the weights of a process that may have ended since.
        """
        weights_had = self.had if had is None else had
        return any(held == content(key, weights) for weights in weights_had if weights >= oldest)

    def fail(self, what: str | BaseException) -> NoReturn:
        """End the run with a violation, which only the run itself can catch."""
        error = (
            what
            if isinstance(what, BaseException)
            else Violation(f"at {self.now_s:.4f} s: {self._name}{what}")
        )
        if self.is_alive:
            self.loop.fail(error)
        raise error

    def require(self, holds: object, what: str) -> None:
        """Fail unless the condition holds."""
        if not holds:
            self.fail(what)

    def is_whole(self, key: OffloadKey, held: bytes | memoryview) -> bool:
        """Return whether bytes are a chunk's, for any weights."""
        return any(held == content(key, weights) for weights in self._all)

    def name_of(self, held: bytes, keys: Iterable[OffloadKey]) -> str:
        """Return a description of bytes for messages."""
        if held == GARBAGE:
            return "nobody's bytes"
        for key in keys:
            for weights in self._all:
                if held == content(key, weights):
                    return f"chunk {show(key)} of weights {weights}"
        return "no chunk's bytes"


def show(key: OffloadKey) -> str:
    """Return the readable part of a simulated key."""
    return key[:-4].decode("ascii", "replace")


class CheckedTiering(EfficiencyCheckedTiering):
    """The real core, compared with the ground truth after each call.

    Attributes:
        announced: keys in each secondary tier, as announced.
    """

    world: World
    memory: SimMemory

    def watch(self, world: World, memory: SimMemory) -> None:
        """Start checking against a world."""
        self.world, self.memory = world, memory
        invariants.watch_evictions(self)
        self._process = world.process
        self._announced_in_primary: set[OffloadKey] = set()
        self.announced: list[set[OffloadKey]] = [set() for _ in self.shared.tiers]

    def settle(self, now_s: float) -> None:
        """End a round; the announced chunks must be available."""
        with self._checks("settle"):
            super().settle(now_s)
        for request in self.holds.awaiting:
            if request.held:
                self.world.fail(f"request {request.name} awaits chunks, and holds {request.held}")
        self._follow_announcements()

    def close(self, request: Request, now_s: float = -inf) -> None:
        """End a request, and check that it holds nothing. Only its claim may remain."""
        with self._checks("close"):
            super().close(request, now_s)
        self.world.require(not request.held, f"request {request.name} has ended and holds {request.held}")

    def reset(self) -> None:
        """Hide all chunks: the engine has new weights."""
        self.world.note("core: reset")
        with self._checks("reset"):
            super().reset()
        self.world.new_weights()
        self._require_ready_bytes()

    def _require_ready_bytes(self) -> None:
        """Fail unless each loadable chunk holds the bytes of its key under the current weights."""
        weights = self.world.weights
        for key, chunk in self.table.visible.items():
            if chunk.state is ChunkState.READY and not self.memory.holds(chunk.slot, key, weights):
                held = self.world.name_of(bytes(self.memory.view(chunk.slot)), self.table.visible)
                self.world.fail(
                    f"wrong bytes: {show(key)} of weights {weights} in slot {chunk.slot} is {held}"
                )

    def _follow_announcements(self) -> None:
        """Apply announcements. For the primary tier they must equal the loadable chunks."""
        for change in self.shared.kv_events.take_events():
            announced = self._announced_in_primary if change.tier is None else self.announced[change.tier]
            if change.removed:
                announced.difference_update(change.keys)
            else:
                announced.update(change.keys)
        visible = self.table.visible.items()
        there = {key for key, chunk in visible if chunk.state is ChunkState.READY}
        self.world.require(
            self._announced_in_primary == there,
            f"announced are {self._announced_in_primary}, there are {there}",
        )

    @contextmanager
    def _checks(self, what: str) -> Iterator[None]:
        try:
            yield
            if self._process != self.world.process:
                return  # a callback left over from an earlier process, which had other weights
            invariants.check(self)
            self._check_bounds()
            self._require_ready_bytes()
        except Exception as error:
            if not isinstance(error, Violation):
                error.add_note(f"at {self.world.now_s:.4f} s, in {what}")
            self.world.fail(error)

    def _check_bounds(self) -> None:
        if self.table.faults:
            self.world.fail(
                f"the eviction policy did what it must not, and was replaced: {self.table.faults}"
            )
        holds, limits = self.holds, self.shared.limits
        if len(holds.promoting) > holds.budget:
            self.world.fail(f"promotions hold {len(holds.promoting)} slots of {holds.budget}")
        most = max(1, int(len(self.table.all) * limits.put_backlog))
        for gate in self.shared.tiers:
            if gate.backlog > most:
                self.world.fail(f"the puts of {gate.name} hold {gate.backlog} slots of {most}")

    def require_idle(self) -> None:
        """Fail if a transfer is in flight or a pin or slot is still held."""
        table, require = self.table, self.world.require
        require(
            self.is_idle, f"after the last fault there are {self.shared.transfers} {self.shared.commands}"
        )
        require(not self.holds.promoting, f"the budget is not given back: {self.holds.promoting}")
        waiting = [*self.holds.pending, *self.holds.awaiting]
        require(not waiting, f"held for {[it.name for it in waiting]}")
        pinned = [chunk for chunk in table.all if chunk.pins]
        require(not pinned, f"pinned by nobody: {pinned}")
        require(table.room + len(table.visible) == len(table.all), "a slot is lost")
        require(table.evictable == len(table.visible), "the policy knows all that may be evicted")
        busy = [
            gate.name for gate in self.shared.tiers if gate.backlog or gate.puts.overdue or gate.gets.overdue
        ]
        require(not busy, f"tiers have nothing to do, but count work: {busy}")


def _checked(name: str) -> Callable[..., Any]:
    def call(core: CheckedTiering, *arguments: Any, **options: Any) -> Any:
        with core._checks(name):
            return getattr(super(CheckedTiering, core), name)(*arguments, **options)

    return call


for _name in ("on_event", "take_commands", "acquire", "release", "fail_load", "reserve", "commit", "abort"):
    setattr(CheckedTiering, _name, _checked(_name))
