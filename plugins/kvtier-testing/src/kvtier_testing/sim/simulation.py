"""One engine: successive processes over the same backends, until the last one has drained."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, cast

from kvtier._build import adopted_slots, make_tier_status
from kvtier._execution.executor import Executor, NamedTier
from kvtier.keys import OffloadKey
from kvtier.policies import ARC, LRU, EvictionPolicy
from kvtier.tiers import SecondaryTier
from kvtier.tiers._adopted import AdoptedConfig
from kvtier_testing.sim.backend import Backend
from kvtier_testing.sim.device import Copies
from kvtier_testing.sim.engine import EngineProcess, SimExecutorThread
from kvtier_testing.sim.faults import FaultyTier
from kvtier_testing.sim.loop import OWNER, ProcessId, cancel_begun
from kvtier_testing.sim.model import CHUNK_BYTES, CheckedTiering, SimMemory, World, show
from kvtier_testing.sim.processes import DRAIN_S, Process
from kvtier_testing.sim.scenario import End, Owner, Scenario, TierScenario, chain
from kvtier_testing.sim.tiers import SimAdoptedTier, SimTier, SimTierConfig, VerifyingSimTier

if TYPE_CHECKING:
    from kvtier_nixl import NixlConfig
    from kvtier_testing.sim.peers import Fabric, PeerTier

_RECOVERY_S = 1800.0
"""Seconds until all tiers must be in use again: a tier may need two puts, minutes apart."""

_DAMAGED = 0.5
"""Share of processes that find a flipped bit in the slots that they adopt."""

_POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LRU, "arc": ARC}

MakeTier = Callable[[Backend], SecondaryTier[Any]]


@dataclass(frozen=True)
class Overrides:
    """An author's own parts for the simulation.

    Attributes:
        tier: factory of the first tier, called with a backend. The tier may keep its chunks there, or
            anywhere else that needs neither threads nor sockets.
        policy: factory of the primary tier's eviction policy.
    """

    tier: MakeTier | None = None
    policy: Callable[[], EvictionPolicy] | None = None


class Engine:
    """An engine of a run: its processes, their shared parts, and the final checks.

    Args:
        host: address of its host.
        backends: backends of its tiers.
        peers: index of the tier that reads from peers, and its fabric; None if there is none.

    Attributes:
        process: the current process, or the last one.
    """

    process: Process
    _context: Context

    def __init__(
        self,
        world: World,
        host: str,
        given: Overrides,
        scenario: Scenario,
        backends: Sequence[Backend],
        peers: tuple[int, Fabric] | None,
    ) -> None:
        self.world = world
        self.host = host
        self._given = given
        self._scenario = scenario
        self._backends = backends
        self._peers = peers
        self._outliving: set[asyncio.Task[Any]] = set()  # uncancellable calls of ended processes
        self._kept: SimMemory | None = None  # of the last process, for the next one
        self._to_damage = {
            index for index, tier in enumerate(scenario.tiers) if tier.checks_damage and given.tier is None
        }

    async def run(self) -> None:
        """Run the processes in turn; return after the last fault, with the last process still open."""
        scenario = self._scenario
        self.world.note(f"{scenario}")
        for backend, tier in zip(self._backends, scenario.tiers, strict=True):
            self._schedule_faults(backend, tier)
        for until_s, end in scenario.process_ends:
            await self._run_process(until_s, end)
        await self._start(scenario.faults_end_s)
        self.world.note("the last fault is over")

    @property
    def _owner(self) -> ProcessId:
        return self.host, self.world.process

    async def _run_process(self, until_s: float, end: End) -> None:
        task = self._start(until_s)
        process = self.process
        self.world.seen[end.value] += 1
        if end is End.SHUTDOWN:
            await task
            await process.aclose()
            self._count(process)
            left = self.world.loop.tasks_of(self._owner)
            self._outliving |= left
            if left:  # they may still use it
                self._kept = None
            return
        await asyncio.wait([task], timeout=max(0.0, until_s - self.world.now_s))
        if task.done():
            task.result()
        await self._crash(process, task)

    async def _crash(self, process: Process, task: asyncio.Task[None]) -> None:
        """Kill the process: cancel its remaining tasks in this loop and ignore their results."""
        self.world.note("crash")
        self.world.is_alive = False
        self._count(process)
        self.world.loop.network.kill(self._owner)
        for backend in self._backends:
            backend.crash()
            backend.resumed.set()
        task.cancel()
        process.kill()
        with suppress(BaseException):
            await task
        closing = self._spawn(process.aclose())
        await asyncio.wait([closing], timeout=DRAIN_S)
        while left := self.world.loop.tasks_of(self._owner):
            cancel_begun(left)
            for ended in (await asyncio.wait(left, timeout=0.001))[0]:
                _ = ended.cancelled() or ended.exception()  # marks the exception as retrieved
        for backend in self._backends:
            backend.set_faults(backend.faults)

    async def require_rest(self) -> None:
        """Fail unless the engine becomes idle and holds nothing."""
        await self._within(DRAIN_S, self.process.drain(), "all has come to rest")
        self.process.core.require_idle()

    async def require_end(self) -> None:
        """Fail unless the engine becomes idle and the last process shuts down."""
        process = self.process
        await self.require_rest()
        if self._peers is not None:
            await self.peer_tier.require_idle()
        await self._within(DRAIN_S, process.aclose(), "the process is shut down")
        busy = [tier for tier in process.tiers if +tier.running]
        self.world.require(not busy, f"after shutdown calls are under way: {[it.running for it in busy]}")
        self._count(process)
        if self._outliving:
            await asyncio.wait(self._outliving, timeout=DRAIN_S)

    def require_nothing_false_announced(self) -> None:
        """Fail if a chunk is still announced after its removal was reported."""
        for index, (backend, announced) in enumerate(
            zip(self._backends, self.process.core.announced[self._first :], strict=True)
        ):
            if self._is_elsewhere(index):
                continue  # its contents are not visible here
            wrong = announced - backend.records.keys() - backend.unreported
            names = sorted(map(show, wrong))
            self.world.require(not wrong, f"{names} are announced to be in {backend.name}, and are not")

    # --- recovery --------------------------------------------------------------------------------

    async def require_recovery(self) -> None:
        """Fail unless stored chunks are found again in the primary tier and in each secondary tier."""
        process = self.process
        given_alone = self._given.tier is not None
        waiting = list(range(len(self._backends[:1] if given_alone else self._backends)))
        until_s = self.world.now_s + _RECOVERY_S
        for attempt in count():
            keys = chain(f"probe{self.host}.{attempt}.", 1)
            self.empty_backends()  # makes room
            await process.store(keys)
            await process.store(keys)  # some write policies wait for the second offer
            found = await process.find(keys)
            self.world.require(found == 1, "what was stored just now, and all is well, is not found")
            await self._within(DRAIN_S, process.drain(), "a store has come to rest")
            waiting = [index for index in waiting if not await self._serves(process, index, keys)]
            if not waiting:
                return
            names = [self._backends[index].name for index in waiting]
            self.world.require(self.world.now_s < until_s, f"{names} are not used again, though all is well")
            await asyncio.sleep(1.0)

    async def _serves(self, process: Process, index: int, keys: Sequence[OffloadKey]) -> bool:
        """Evict a chunk from the primary tier; return whether this tier returns it."""
        (key,), backend = keys, self._backends[index]
        if key not in backend.records and not self._is_elsewhere(index):
            return False
        for other, tier in enumerate(process.tiers):
            if other != index:
                await tier.inner.discard(keys)
        await self._within(DRAIN_S, process.drain(), "nothing has the chunk pinned")
        self.evict(key)
        if index in self._to_damage:
            await self._require_set_aside(process, index, keys)
            return False
        return await process.find(keys) == 1 and process.core.shared.tiers[self._first + index].works

    def empty_backends(self) -> None:
        """Lose all chunks of the backends, except those held by peers."""
        for backend in self._backends:
            backend.empty()

    def evict(self, key: OffloadKey) -> None:
        """Evict a chunk from the primary tier."""
        process = self.process
        for _ in process.core.table.all:
            if key in process.core.table.visible:
                process.core.shared.evict(1)
        self.world.require(key not in process.core.table.visible, f"{show(key)} cannot be evicted")

    async def _require_set_aside(self, process: Process, index: int, keys: Sequence[OffloadKey]) -> None:
        """Damage a chunk; fail unless the tier misses it and forgets it."""
        backend, tier, (key,) = self._backends[index], process.tiers[index], keys
        backend.damage(share=1.0)
        before = tier.gets
        found = await process.find(keys)
        self.world.require(found == 0, f"{show(key)} is no good, and was found in {backend.name}")
        await self._within(DRAIN_S, process.drain(), "a fetch has come to rest")
        gone = key not in backend.records
        self.world.require(gone or tier.gets == before, f"{show(key)} is no good, and not discarded")
        if gone:
            self._to_damage.discard(index)

    # --- parts -----------------------------------------------------------------------------------

    def _start(self, until_s: float) -> asyncio.Task[None]:
        """Start a process; return its task, which runs until ``until_s``."""
        self.world.start_process()
        self.world.note(f"process {self.world.process} starts")
        self._context = copy_context()
        self._context.run(OWNER.set, self._owner)
        self.process = self._context.run(self._make_process)
        return self._spawn(self.process.run(until_s))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine as a task of the current process."""
        return self.world.loop.create_task(work, context=self._context.copy())

    def _make_process(self) -> Process:
        scenario, world = self._scenario, self.world
        core = self._core()
        if scenario.owner is Owner.TASKS:
            from kvtier_testing.sim.tasks import ManagerProcess, SimRegion  # needs torch

            region = SimRegion(world, scenario.slots)
            tiers, named = self._tiers(region)
            core.watch(world, region)
            return ManagerProcess(world, scenario, core, tiers, named, region, self._copies(region))
        memory = SimMemory(world, scenario.slots, self._kept)
        tiers, named = self._tiers(memory)
        if scenario.keeps_memory:
            self._kept = memory
            named.insert(0, self._adopt(core, memory))
        core.watch(world, memory)
        chance = world.chance(f"executor/{world.process}").random
        executor = SimExecutorThread(
            lambda post: Executor(named, world.identity, memory, post, chance=chance)
        )
        return EngineProcess(world, scenario, core, tiers, executor, self._copies(memory))

    def _adopt(self, core: CheckedTiering, memory: SimMemory) -> NamedTier:
        """Make the core adopt the last process's chunks; return the tier that verifies them."""
        world, chance = self.world, self.world.chance(f"adopted/{self.world.process}")
        if chance.random() < _DAMAGED:
            memory.view(chance.randrange(memory.slots))[chance.randrange(CHUNK_BYTES)] ^= 1
        found = adopted_slots(memory.trailers, world.identity)
        world.seen["chunks left by a process"] += len(found)
        core.table.adopt(memory.trailers, found)
        return NamedTier("adopted", partial(SimAdoptedTier, memory, chance))

    @property
    def _first(self) -> int:
        """Return the index of the first tier of the scenario."""
        return int(self._scenario.keeps_memory)

    def _core(self) -> CheckedTiering:
        scenario = self._scenario
        remembered = scenario.limits.max_tracker_size
        gates = [
            make_tier_status(f"tier{index}", tier.config, CHUNK_BYTES, remembered)
            for index, tier in enumerate(scenario.tiers)
        ]
        if scenario.keeps_memory:
            gates.insert(0, make_tier_status("adopted", AdoptedConfig(), CHUNK_BYTES, remembered))
        make = self._given.policy or _POLICIES[scenario.policy]
        return CheckedTiering(
            make(),
            gates,
            scenario.limits,
            windowed_groups=frozenset({1}) if scenario.windowed else frozenset(),
            track_kv_events=True,
        )

    def _copies(self, memory: SimMemory) -> Copies:
        scenario = self._scenario
        return Copies(
            self.world,
            memory,
            failures=scenario.copy_failures,
            until_s=scenario.faults_end_s,
            longest_s=scenario.copy_s,
        )

    def _tiers(self, memory: SimMemory) -> tuple[list[FaultyTier], list[NamedTier]]:
        tiers: list[FaultyTier] = []
        named = []
        for index, scenario in enumerate(self._scenario.tiers):

            def make(index: int = index, is_recreated: bool = scenario.is_recreated) -> FaultyTier:
                if index == len(tiers):
                    tiers.append(self._tier(index, memory))
                elif is_recreated:
                    tiers[index] = self._tier(index, memory)
                return tiers[index]

            named.append(NamedTier(f"tier{index}", make))
            self._disturb(scenario, tiers, index)
        return tiers, named

    def _is_elsewhere(self, index: int) -> bool:
        """Return whether a tier keeps its chunks outside a backend, as the peer tier does."""
        is_of_peers = self._peers is not None and self._peers[0] == index
        return is_of_peers or (index == 0 and self._given.tier is not None)

    @property
    def peer_tier(self) -> PeerTier:
        """Return the current process's peer tier."""
        assert self._peers is not None
        return cast("PeerTier", self.process.tiers[self._peers[0]].inner)

    def _tier(self, index: int, memory: SimMemory) -> FaultyTier:
        scenario, backend = self._scenario.tiers[index], self._backends[index]
        inner: SecondaryTier[Any]
        config, drains = scenario.config, False
        if isinstance(config, SimTierConfig):
            inner, drains = (
                (VerifyingSimTier if scenario.verifies else SimTier)(config, backend),
                config.drains,
            )
        else:
            from kvtier_testing.sim.peers import PeerTier  # needs kvtier-nixl

            assert self._peers is not None
            inner = PeerTier(cast("NixlConfig", config), self._peers[1], self.world)
        if self._given.tier is not None and index == 0:
            inner = self._given.tier(backend)
        return FaultyTier(inner, backend, memory, drains=drains)

    def _schedule_faults(self, backend: Backend, scenario: TierScenario) -> None:
        for prompt, preloaded in zip(self._scenario.prompts, scenario.preloaded, strict=False):
            for key in prompt[:preloaded]:
                backend.preload(key)
        for when_s, faults in scenario.fault_schedule:
            self.world.loop.call_at(when_s, backend.set_faults, faults)
        prompts = dict(enumerate(self._scenario.prompts))
        for number, times in scenario.shared_at_s:
            for key, when_s in zip(prompts.get(number, ()), times, strict=False):
                self.world.loop.call_at(when_s, backend.share, key)
        for when_s in scenario.corrupts_at_s:
            self.world.loop.call_at(when_s, backend.damage)

    def _disturb(self, scenario: TierScenario, tiers: Sequence[FaultyTier], index: int) -> None:
        """Evict chunks from the tier at the scheduled times, while this process lives."""
        process, chance = self.world.process, self.world.chance(f"losses{self.world.process}")

        def lose(count: int) -> None:
            tier = tiers[index].inner
            if self.world.process == process and self.world.is_alive and isinstance(tier, SimTier):
                tier.lose(count)

        for when_s in scenario.loses_at_s:
            if when_s > self.world.now_s:
                self.world.loop.call_at(when_s, lose, chance.randint(1, 6))

    async def _within(self, longest_s: float, work: Coroutine[Any, Any, None], what: str) -> None:
        task = self._spawn(work)
        done, _ = await asyncio.wait([task], timeout=longest_s)
        if not done:
            self.world.fail(f"{longest_s:g} s after the last fault it is not so that {what}")
        task.result()

    def _count(self, process: Process) -> None:
        names = {backend.name for backend in self._backends}
        for parts, number in process.core.take_counts().items():
            what = " ".join(part for part in parts if part not in names)
            self.world.seen[f"core {what}"] += int(number)
