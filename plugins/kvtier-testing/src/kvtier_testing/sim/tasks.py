"""Tasks that use TieringManager: they look up, load, store, hold, reset, and are cancelled.

Needs torch, because the device layer does, but no device.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any, cast

from kvtier import TieringManager
from kvtier._core.tiers.load_gate import ComputeSpeed
from kvtier._device._engine import TransferEngine
from kvtier._device.base import Audits, Blocks, Finished
from kvtier._execution.executor import NamedTier
from kvtier._memory.region import Region
from kvtier.errors import StateError, TransferError
from kvtier.keys import OffloadKey
from kvtier_testing.sim.device import Copies
from kvtier_testing.sim.faults import FaultyTier
from kvtier_testing.sim.model import CHUNK_BYTES, CheckedTiering, SimMemory, World, content, show
from kvtier_testing.sim.processes import Process
from kvtier_testing.sim.scenario import Scenario

_MOMENT_S = 1e-6


class SimRegion(SimMemory):
    """The simulated slots as a region whose memory is populated in steps."""

    def populate(self, on_ready: Callable[[range], object]) -> None:
        """Report the slots as ready, the first ones soon."""
        first = max(1, self.slots // 2)
        self._world.loop.call_later(0.0, on_ready, range(first))
        if first < self.slots:
            self._world.loop.call_later(0.01, on_ready, range(first, self.slots))
        self._world.loop.call_later(0.02, on_ready, range(0))

    def close(self) -> None:
        """Do nothing: other checks find late access to slots."""


class SimTransferEngine:
    """Simulated copies behind the interface of a ``TransferEngine``.

    Attributes:
        blocks: contents of each block of the device.
    """

    def __init__(self, copies: Copies) -> None:
        self.blocks: dict[int, bytes] = {}
        self._copies = copies
        self.audits = Audits()
        self._ended: list[Finished] = []
        self._wakeup: Callable[[], object] | None = None
        self._is_closed = False

    def submit_store(self, transfer_id: int, blocks: Blocks, slots: Sequence[int]) -> None:
        self._require_open()
        contents = [self.blocks[int(block)] for block in blocks.ids]
        self._copies.store(slots, contents, lambda good: self._end(transfer_id, good))

    def submit_load(
        self,
        transfer_id: int,
        slots: Sequence[int],
        blocks: Blocks,
        *,
        expedited: bool = False,  # noqa: ARG002
    ) -> None:
        self._require_open()
        ids = [int(block) for block in blocks.ids]

        def done(got: list[bytes] | None) -> None:
            self.blocks.update(zip(ids, got or [], strict=False))
            self._end(transfer_id, got is not None)

        self._copies.load(slots, done)

    def finished(self) -> list[Finished]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, transfer_ids: Iterable[int]) -> None:  # noqa: ARG002
        self._copies.hurry()

    def drain(self) -> None:
        self._copies.hurry()

    def set_wakeup(self, wakeup: Callable[[], object] | None) -> None:
        self._wakeup = wakeup
        if wakeup is not None and self._ended:
            wakeup()

    def close(self) -> None:
        self._is_closed = True
        self._copies.hurry()

    def _end(self, transfer_id: int, good: bool) -> None:
        error = None if good else TransferError("injected")
        self._ended.append(Finished(transfer_id, CHUNK_BYTES, 0.0, error))
        if self._wakeup is not None:
            self._wakeup()

    def _require_open(self) -> None:
        if self._is_closed:
            raise StateError("the engine is closed")


class ManagerProcess(Process):
    """Tasks that use a manager, each making one call at a time."""

    def __init__(
        self,
        world: World,
        scenario: Scenario,
        core: CheckedTiering,
        tiers: Sequence[FaultyTier],
        named: Sequence[NamedTier],
        region: SimRegion,
        copies: Copies,
    ) -> None:
        super().__init__(world, core, tiers)
        self._scenario = scenario
        self._chance = world.chance(f"clients/{world.process}")
        self._engine = SimTransferEngine(copies)
        self._last_block = 0
        self._tasks: list[asyncio.Task[object]] = []
        self._open = asyncio.Event()
        self._closing = asyncio.Event()
        self._host: asyncio.Task[None] | None = None
        self._manager = TieringManager(
            core=core,
            tiers=named,
            identity=world.identity,
            region=cast(Region, region),
            engine=cast(TransferEngine, self._engine),
            blocks_per_chunk=1,
            num_blocks=(sys.maxsize, sys.maxsize),
            drain_s=self._chance.choice((0.0, 0.05, 1.0)),
        )

    async def run(self, until_s: float) -> None:
        self._host = asyncio.ensure_future(self._be_open())
        opened = asyncio.ensure_future(self._open.wait())
        await asyncio.wait([self._host, opened], return_when=asyncio.FIRST_COMPLETED)
        if self._host.done():
            self._host.result()
        await self._work(until_s)
        await asyncio.sleep(max(0.0, until_s - self._world.now_s))

    async def _be_open(self) -> None:
        """Open and close the manager in one task, as it requires."""
        async with self._manager:
            self._open.set()
            await self._closing.wait()

    async def drain(self) -> None:
        self.core.shared.gate.compute = ComputeSpeed()  # every chunk found is loaded from now on
        await self._manager.drain()
        while not (self.core.is_idle and self.tiers_are_idle):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        self.core.settle(self._world.now_s)

    async def store_once(self, keys: Sequence[OffloadKey]) -> None:
        await self._store(keys)

    async def find(self, keys: Sequence[OffloadKey]) -> int:
        """Look keys up; fail if the answer misses the deadline."""
        began_s = self._world.now_s
        found = await self._manager.lookup(keys)
        self._require_within(began_s, self._scenario.limits.request_deadline_s, "a lookup")
        return found

    async def aclose(self) -> None:
        self._closing.set()
        if self._host is not None:
            await self._host

    async def _work(self, until_s: float) -> None:
        """Run some clients until ``until_s``, then cancel those still running."""
        clients = [self._spawn(self._client(until_s)) for _ in range(self._chance.randint(1, 4))]
        try:
            for client in clients:
                await client
        finally:  # the process may die meanwhile
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._tasks.clear()

    def _spawn(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
        task = asyncio.ensure_future(work)
        self._tasks.append(task)
        return task

    async def _client(self, until_s: float) -> None:
        for _ in range(self._scenario.requests):
            if self._world.now_s >= until_s:
                return
            await self._do_something(until_s)
            await asyncio.sleep(self._chance.random() * self._scenario.step_s * 4)

    async def _do_something(self, until_s: float) -> None:
        chance = self._chance
        prompt = chance.choice(self._scenario.prompts)
        keys = prompt[: chance.randint(1, len(prompt))]
        if chance.random() < self._scenario.resets:
            await self._cancelled_at(self._reset(), until_s)
            return
        once = self.find, self._locate, self._load, self._hold, self._store, self._write
        call = chance.choice([*once, self._load_or_store, self._load_or_store])(keys)
        is_cancelled = chance.random() < 0.15
        when_s = self._world.now_s + chance.random() * self._scenario.step_s if is_cancelled else None
        await self._cancelled_at(call, when_s)

    async def _cancelled_at(self, work: Coroutine[Any, Any, object], when_s: float | None) -> None:
        """Await ``work``; cancel it at ``when_s`` if given."""
        task = self._spawn(work)
        if when_s is None:
            await task
            return
        await asyncio.wait([task], timeout=max(0.0, when_s - self._world.now_s))
        if task.done():
            task.result()
            return
        self._world.seen["cancelled"] += 1
        task.cancel()
        began_s = self._world.now_s
        with suppress(asyncio.CancelledError):
            await task
        self._require_within(began_s, self._scenario.copy_s, "a call that was cancelled")

    # --- calls of the clients --------------------------------------------------------------------

    async def _load_or_store(self, keys: Sequence[OffloadKey]) -> None:
        """Handle a prompt as an engine does: load the chunks that exist, store the rest."""
        if await self._load(keys) < len(keys):
            if self._scenario.chunk_s:
                self._manager.report_computed(len(keys), len(keys) * self._scenario.chunk_s)
            await self._store(keys)

    async def _load(self, keys: Sequence[OffloadKey]) -> int:
        """Load chunks, and check that their bytes are of the weights that the engine has now."""
        began_s = self._world.now_s
        blocks = self._blocks(len(keys))
        try:
            count = await self._manager.load(keys, blocks)
        except TransferError:
            return 0
        longest_s = self._scenario.limits.request_deadline_s + self._scenario.copy_s
        self._require_within(began_s, longest_s, "a load")
        got = [self._engine.blocks[block] for block in blocks[:count]]
        self._require_content(keys[:count], got, self._world.weights)
        self._world.seen["chunks loaded"] += count
        return count

    async def _locate(self, keys: Sequence[OffloadKey]) -> None:
        """Locate chunks; fail if the answer misses the deadline."""
        began_s = self._world.now_s
        found = await self._manager.locate(keys)
        self._require_within(began_s, self._scenario.limits.request_deadline_s, "a locate")
        self._world.seen["chunks located"] += sum(found)

    async def _hold(self, keys: Sequence[OffloadKey]) -> None:
        """Acquire chunks for a while, and check that their bytes do not change."""
        oldest = self._world.weights
        async with self._manager.acquire(keys) as acquired:
            before = [bytes(view) for view in acquired.views]
            self._require_content(acquired.keys, before, oldest)
            await asyncio.sleep(self._chance.random() * self._scenario.step_s * 2)
            after = [bytes(view) for view in acquired.views]
            self._world.require(before == after, f"{keys} changed while they were held")

    async def _store(self, keys: Sequence[OffloadKey]) -> int:
        """Store chunks computed with the current weights."""
        blocks = self._blocks(len(keys))
        for key, block in zip(keys, blocks, strict=True):
            self._engine.blocks[block] = content(key, self._world.weights)
        began_s = self._world.now_s
        try:
            count = await self._manager.store(keys, blocks)
        except TransferError:
            return 0
        self._require_within(began_s, self._scenario.copy_s, "a store")
        self._world.seen["chunks stored"] += count
        return count

    async def _write(self, keys: Sequence[OffloadKey]) -> None:
        """Store without a device, and take some time over it."""
        async with self._manager.write(keys) as written:
            for key, view in zip(written.keys, written.views, strict=True):
                view[:] = content(key, self._world.weights)
            await asyncio.sleep(self._chance.random() * self._scenario.step_s * 2)
        self._world.seen["chunks written"] += len(written.keys)

    async def _reset(self) -> None:
        """Reset for new weights."""
        self._world.seen["reset"] += 1
        await self._manager.reset()

    def _blocks(self, count: int) -> list[int]:
        first, self._last_block = self._last_block, self._last_block + count
        return list(range(first, first + count))

    def _require_within(self, began_s: float, longest_s: float, what: str) -> None:
        took_s = self._world.now_s - began_s
        # Simulated threads take time, too.
        if took_s > longest_s + _MOMENT_S:
            self._world.fail(f"{what} has taken {took_s:.4f} s, {longest_s:.4f} s at most are allowed")

    def _require_content(self, keys: Sequence[OffloadKey], got: Sequence[bytes], oldest: int) -> None:
        """Fail unless all bytes belong to one epoch, not older than the call."""
        for weights in self._world.weights_since(oldest):
            if all(one == content(key, weights) for key, one in zip(keys, got, strict=True)):
                return
        held = [self._world.name_of(one, keys) for one in got]
        self._world.fail(f"{[show(key) for key in keys]} of weights {oldest} or newer came as {held}")
