"""kvtier-nixl in the simulation: the real tier and its agent, over a simulated NIXL and network.

A read of memory takes time. It moves half of each chunk at its start and half at its end, even if the
holder changes its memory meanwhile. Until it ends, no other read may write to the same place, even if its
caller has given up.
"""

from __future__ import annotations

import ctypes
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import anyio

from kvtier.keys import OffloadKey
from kvtier.tiers import Batch, Outcome, Status
from kvtier_nixl import NixlTier
from kvtier_nixl._agent import Agent, Memory
from kvtier_nixl._peers import _PATIENCE
from kvtier_nixl.config import NixlConfig
from kvtier_testing.sim.loop import OWNER, ProcessId
from kvtier_testing.sim.model import Violation, World, show
from kvtier_testing.sim.network import Network

_DISCARDS = 0.5
"""Fraction of puts that first discard the chunks that peers are reading."""
_MOMENT_S = 0.05
"""Seconds that a lookup may take beyond its wait for peers, because simulated threads take time."""


class Fabric:
    """The medium of reads from other hosts' memory.

    Args:
        read_s: durations of reads before ``until_s``; each read draws one. Later reads take no time.

    Attributes:
        read_from: chunks read from each host.
        lookups: number of lookups that ask all peers.
    """

    def __init__(self, network: Network, read_s: Sequence[float], until_s: float) -> None:
        self.network = network
        self._read_s = read_s
        self._until_s = until_s
        self.agents: dict[str, SimNixl] = {}
        self.read_from: Counter[str] = Counter()
        self.lookups = 0

    def takes_s(self) -> float:
        """Draw the duration of a read."""
        return self.network.chance.choice(self._read_s) if self.network.loop.time() < self._until_s else 0.0


@dataclass(eq=False)
class _Read:
    peer: str
    local: Sequence[tuple[int, int, int]]
    remote: Sequence[tuple[int, int, int]]
    state: str = "PROC"


class SimNixl:
    """A double of NIXL's agent. Its metadata are its name."""

    def __init__(
        self, fabric: Fabric, name: str, memory: Sequence[Memory], on_end: Callable[[], object]
    ) -> None:
        self.owner = _require_owner()
        self.is_closed = False
        self._memory = memory  # stays referenced while peers may read from it
        self._fabric = fabric
        self._on_end = on_end
        self._written: set[int] = set()  # addresses that reads in flight write to
        fabric.agents[name] = self

    def add_remote_agent(self, metadata: bytes) -> bytes:
        return metadata

    def remove_remote_agent(self, name: str) -> None:
        pass

    def get_xfer_descs(self, parts: Sequence[tuple[int, int, int]], _: str) -> Sequence[tuple[int, int, int]]:
        return parts

    def initialize_xfer(self, _: str, local: Any, remote: Any, peer: str) -> _Read:
        return _Read(peer, local, remote)

    def transfer(self, read: _Read) -> str:
        fabric = self._fabric
        holder = fabric.agents[read.peer]
        to = {address for address, _, _ in read.local}
        if to & self._written:
            fabric.network.loop.fail(
                Violation(f"{self.owner}: memory that a read still writes to is used again")
            )
        self._written |= to
        if self._can_move(holder):
            _move(read, first=True)
        ended = partial(self._end, read, holder)
        fabric.network.send(self.owner[0], holder.owner[0], ended, reads=True, takes_s=fabric.takes_s())
        return read.state

    def check_xfer_state(self, read: _Read) -> str:
        return read.state

    def release_xfer_handle(self, read: _Read) -> None:
        """Do nothing: a read cannot be stopped."""

    def _can_move(self, holder: SimNixl) -> bool:
        dead = self._fabric.network.dead
        return not (self.is_closed or holder.is_closed or {self.owner, holder.owner} & dead)

    def _end(self, read: _Read, holder: SimNixl) -> None:
        self._written -= {address for address, _, _ in read.local}
        read.state = "ERR"
        if self._can_move(holder):
            _move(read, first=False)
            read.state = "DONE"
            self._fabric.read_from[holder.owner[0]] += len(read.local)
        self._on_end()


def _move(read: _Read, *, first: bool) -> None:
    for (to, length, _), (source, _, _) in zip(read.local, read.remote, strict=True):
        half = length // 2
        start, count = (0, half) if first else (half, length - half)
        ctypes.memmove(to + start, source + start, count)


class SimAgent(Agent):
    """The real agent over a simulated NIXL, with callbacks in place of its thread."""

    def __init__(self, fabric: Fabric, *memory: Memory, is_local: bool) -> None:
        super().__init__(*memory, is_local=is_local)
        self._fabric = fabric
        self._waiting: deque[Callable[[], None] | None] = deque()
        self.thread: Any = SimpleNamespace(start=lambda: None)
        self._jobs: Any = SimpleNamespace(put=self._put)

    def _put(self, job: Callable[[], None] | None) -> None:
        self._waiting.append(job)
        network = self._fabric.network
        network.loop.call_later(network.chance.choice((0.0, 0.0, 1e-4)), self._do_next)

    def _do_next(self) -> None:
        job = self._waiting.popleft()
        if job is None:
            self._end()
        else:
            job()
            self._poll()

    def _start(self) -> None:
        self._agent = SimNixl(self._fabric, self.name, (self._serving, self._receiving), self._poll)
        self.metadata = self.name.encode()

    def _end(self) -> None:
        if self._agent is not None:
            self._agent.is_closed = True
        super()._end()


class PeerTier(NixlTier):
    """The real tier, with checks that hold under all faults of peers and network."""

    def __init__(self, config: NixlConfig, fabric: Fabric, world: World) -> None:
        super().__init__(config)
        self._fabric = fabric
        self._world = world
        self._reset_to = world.first_weights

    def _new_agent(self, *, is_local: bool) -> Agent:
        return SimAgent(self._fabric, self._serving, self._receiving, is_local=is_local)

    def _warn(self, subject: str, text: str) -> None:
        self._world.note(f"{self._context.name}: {subject}: {text}")

    async def contains_at(self, keys: Sequence[OffloadKey], addresses: Sequence[str]) -> Sequence[bool]:
        """Look up. A silent peer costs at most ``answer_timeout_s``; less if it was named."""
        began_s, fabric = time.monotonic(), self._fabric
        limit_s = self.config.answer_timeout_s * (1 + _PATIENCE * bool(addresses)) + _MOMENT_S
        try:
            held = await super().contains_at(keys, addresses)
        finally:
            took_s = time.monotonic() - began_s
            if took_s > limit_s:
                self._world.fail(f"peers have kept a lookup waiting for {took_s:.4f} s")
        fabric.lookups += 1
        return held

    async def get(self, batch: Batch) -> Outcome:
        """Get. Chunks are never damaged here, so they must be right even before kvtier verifies them."""
        began = self._reset_to
        outcome = await super().get(batch)
        for index, key in enumerate(batch.keys):
            held = bytes(batch.views[index])
            if outcome.statuses[index] is Status.OK and not self._world.is_of(key, held, began):
                what = self._world.name_of(held, batch.keys)
                self._world.fail(f"peers have given {what} for {show(key)}, of no weights from {began} on")
        for reason, count in outcome.reasons.items():
            self._world.seen[f"peers {reason}"] += count
        return outcome

    async def put(self, batch: Batch) -> Outcome:
        """Put. First, chunks being read by peers may be discarded, as kvtier discards damaged ones."""
        pool = self._held
        if self._fabric.network.chance.random() < _DISCARDS:
            await self.discard([key for key, chunk in pool._chunks.items() if chunk.row in pool._leased])
        return await super().put(batch)

    def _copy_in(self, batch: Batch, rows: Mapping[int, int]) -> None:
        leased = [] if self._pool is None else [row for row in rows.values() if row in self._pool._leased]
        self._world.require(not leased, f"rows {leased} are written to, and leased to peers")
        super()._copy_in(batch, rows)

    async def reset(self) -> None:
        """Reset. Later gets must return no older chunk."""
        weights = self._world.weights
        await super().reset()
        self._reset_to = weights

    async def require_idle(self) -> None:
        """Drop all chunks after their leases end; fail if memory is still in use."""
        await anyio.sleep(self.config.lease_s)
        pool, agent = self._pool, self._agent
        if pool is None or agent is None:
            return
        pool.clear()
        free = pool.reserve(pool.rows, time.monotonic())
        self._world.require(
            sorted(free) == [*range(pool.rows)], f"of {pool.rows} served rows, all unused, {free} are free"
        )
        for row in free:
            pool.give_back(row)
        with anyio.move_on_after(1.0):
            rows = await agent.take_rows(self._receiving.rows)
            agent.free_rows(rows)
            all_rows = [*range(self._receiving.rows)]
            self._world.require(sorted(rows) == all_rows, f"of receiving rows {all_rows} {rows} are free")
            return
        self._world.fail("no row of the receiving memory is free")


def _require_owner() -> ProcessId:
    owner = OWNER.get()
    assert owner is not None
    return owner
