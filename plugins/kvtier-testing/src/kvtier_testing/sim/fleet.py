"""One run: usually one engine, else several that share tiers and read from each other."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from kvtier_testing.sim.backend import Backend
from kvtier_testing.sim.loop import OWNER, SimTask, simulate
from kvtier_testing.sim.model import World
from kvtier_testing.sim.network import Network
from kvtier_testing.sim.scenario import Fleet, chain, host
from kvtier_testing.sim.simulation import Engine, Overrides

T = TypeVar("T")

if TYPE_CHECKING:
    from kvtier_testing.sim.peers import Fabric

_HANDSHAKE_MESSAGES = 3
_COLLECT_SELDOM = (1_000_000, 10, 1000)
"""Thresholds of the garbage collector, suited to many long-lived objects such as connections."""
_FOUND_AGAIN_S = 300.0
"""Seconds until engines must be reconnected and breakers closed."""

_RECOVERING = 2
"""Number of engines whose tiers are checked at the end, in turn, because each empties the shared tiers."""

HAS_PEERS = find_spec("kvtier_nixl") is not None


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        seen: counts of events in the simulation, and the core's own counts with the prefix ``core``.
    """

    seen: Counter[str]


def run(
    seed: object,
    given: Overrides | None = None,
    *,
    engines: int = 1,
    trace: Callable[[str], object] | None = None,
) -> Result:
    """Run one seed.

    Args:
        seed: names the run.
        engines: number of engines that share their tiers. If kvtier-nixl is installed, they are peers too.
        trace: callback for each line of the trace.

    Raises:
        Violation, AssertionError, KVTierError: a check failed.
    """
    fleet = Fleet.draw(seed, engines, has_peers=HAS_PEERS)

    async def main() -> Result:
        return await FleetRun(seed, given or Overrides(), fleet, trace).run()

    return _simulate(main, seed, engines)


def report(engines: int) -> str:
    """Return the cost and results of lookups among ``engines`` engines without faults."""

    async def main() -> str:
        fleet = FleetRun("quiet", Overrides(), Fleet.quiet(engines), None)
        await fleet.live()
        text = fleet.describe()
        await fleet.close()
        return text

    return _simulate(main, "quiet", engines)


def _simulate(main: Callable[[], Coroutine[Any, Any, T]], seed: object, engines: int) -> T:
    logging.disable()  # injected faults would flood the log
    thresholds = gc.get_threshold()
    if engines > 1:
        gc.set_threshold(*_COLLECT_SELDOM)
    try:
        return simulate(main, seed, scale=engines)
    finally:
        logging.disable(logging.NOTSET)
        gc.set_threshold(*thresholds)


class FleetRun:
    """A run of engines.

    Attributes:
        fabric: the medium of their reads from each other, if any.
    """

    def __init__(
        self, seed: object, given: Overrides, fleet: Fleet, trace: Callable[[str], object] | None
    ) -> None:
        self._world = World(seed, trace, fleet.engines[0].identity)
        loop = self._world.loop
        self._fleet = fleet
        loop.network = Network(loop, self._world.chance("network"), fleet.latency_s, fleet.link_faults)
        self.fabric: Fabric | None = None
        if fleet.peers is not None:
            from kvtier_testing.sim.peers import Fabric  # needs kvtier-nixl

            self.fabric = Fabric(loop.network, fleet.read_s, fleet.engines[0].faults_end_s)
        self._backends: dict[tuple[int, int], Backend] = {}  # of the first engine, by identity and tier
        self.engines = [self._engine(number, given) for number in range(len(fleet.engines))]

    async def run(self) -> Result:
        """Run all engines until the last fault ends; fail unless all of them have recovered."""
        self._world.loop.set_exception_handler(self._on_unhandled)
        await self.live()
        for engine in self.engines:
            engine.require_nothing_false_announced()
        for engine in self.engines[:_RECOVERING]:
            await engine.require_recovery()
        if self.fabric is not None:
            await self._require_found_by_peers()
        await self.close()
        return Result(+self._world.seen)

    async def close(self) -> None:
        """Shut all engines down; fail if they leave anything behind."""
        await self._all(engine.require_end() for engine in self.engines)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        self._world.require(not left, f"tasks are left behind: {left}")

    def describe(self) -> str:
        """Return the number and distribution of reads from peers, if there are peers."""
        fabric, seen = self.fabric, self._world.seen
        assert fabric is not None
        network, lookups = fabric.network, max(1, fabric.lookups)
        asking = network.messages - _HANDSHAKE_MESSAGES * network.connections
        read = sorted((fabric.read_from[engine.host] for engine in self.engines), reverse=True)
        total, tenth = sum(read), max(1, len(read) // 10)
        loaded, stored = seen["chunks loaded"], seen["chunks stored"]
        return (
            f"{len(self.engines)} engines, {network.connections} connections\n"
            f"{lookups} lookups, {asking / lookups:.1f} messages on the control channel for each\n"
            f"{loaded} chunks loaded, {stored} computed: {loaded / max(1, loaded + stored):.1%} hits\n"
            f"{total} chunks read from peers, {total / len(read):.1f} from each; {read[0]} from one at most, "
            f"{sum(read[:tenth]) / max(1, total):.1%} from the busiest tenth"
        )

    async def live(self) -> None:
        """Run all engines until the last fault ends and all are idle."""
        await self._all(engine.run() for engine in self.engines)
        await self._all(engine.require_rest() for engine in self.engines)

    async def _all(self, works: Iterable[Coroutine[Any, Any, None]]) -> None:
        for task in [asyncio.ensure_future(work) for work in works]:
            await task

    def _engine(self, number: int, given: Overrides) -> Engine:
        scenario, first = self._fleet.engines[number], self._world
        world = first if number == 0 else first.beside(number, scenario.identity)
        backends = []
        for index, tier in enumerate(scenario.tiers):
            beside = self._backends.get((scenario.identity, index))
            backends.append(Backend(world, f"tier{index}", tier.capacity, beside))
            self._backends.setdefault((scenario.identity, index), backends[index])
        peers = None if self.fabric is None or self._fleet.peers is None else (self._fleet.peers, self.fabric)
        return Engine(world, host(number), given, scenario, backends, peers)

    async def _require_found_by_peers(self) -> None:
        """Fail unless each engine finds the chunks of another engine with the same weights."""
        holder = next((it for it in self.engines if it.world.weights == it.world.first_weights), None)
        if holder is None:
            return
        waiting = [engine for engine in self.engines if engine is not holder]
        until_s = self._world.now_s + _FOUND_AGAIN_S
        for attempt in count():
            keys = chain(f"peer{attempt}.", 1)
            await holder.process.store(keys)
            await holder.require_rest()
            for engine in self.engines:
                engine.empty_backends()
            for engine in list(waiting):
                is_like = engine.world.weights == holder.world.weights
                found = await engine.process.find(keys)
                self._world.require(is_like or not found, f"{engine.host} is given chunks of other weights")
                if bool(found) == is_like:
                    waiting.remove(engine)
            if not waiting:
                return
            names = [engine.host for engine in waiting]
            self._world.require(
                self._world.now_s < until_s,
                f"{names} do not find what {holder.host} holds, though all is well",
            )
            await asyncio.sleep(1.0)

    def _on_unhandled(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Fail on an unhandled error, unless its process is dead."""
        error, of = context.get("exception"), context.get("task") or context.get("future")
        handle = context.get("handle")
        owner = of.owner if isinstance(of, SimTask) else handle and handle._context.get(OWNER)
        network = self._world.loop.network
        if owner in network.dead or (owner is None and not all(it.world.is_alive for it in self.engines)):
            return
        self._world.note(f"unhandled: {context}")
        self._world.loop.fail(error if isinstance(error, Exception) else AssertionError(context["message"]))
