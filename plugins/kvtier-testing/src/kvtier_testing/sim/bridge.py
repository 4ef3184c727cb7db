"""The core as an engine's scheduler thread drives it, with the executor on the other side of two queues.

This is what the vLLM bridge does, without vLLM: what has come back is taken in at the next question or at
the end of a step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from kvtier._core.messages import SlotsReady
from kvtier._core.requests import Request
from kvtier._core.states import Lookup
from kvtier._core.transfers import Pinned, Reservation
from kvtier._driver import Driver
from kvtier._executor import Executor, ExecutorThread, Post
from kvtier.keys import OffloadKey
from kvtier_testing.sim.model import CheckedTiering, World

logger = logging.getLogger("kvtier.sim")


class SimExecutorThread(ExecutorThread):
    """The executor's thread as a task of the simulated loop. Its queues and wake-ups are the real ones."""

    def __init__(self, make: Callable[[Post], Executor]) -> None:
        super().__init__(make)
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task. What is submitted before it runs waits for it."""
        self.task = asyncio.get_running_loop().create_task(self._serve(), name="executor")

    async def aclose(self, drain_s: float) -> None:
        """Do what ``close`` does, without blocking."""
        assert self.task is not None
        self._drain_s = drain_s
        self._closing = True
        self._wake()
        await self.task
        self._ended = True
        self._refuse_inbox()


class Bridge:
    """What an engine's scheduler calls. Nothing here waits."""

    def __init__(self, world: World, core: CheckedTiering, executor: SimExecutorThread) -> None:
        self.core = core
        self._world = world
        self._events = executor.events
        self._driver = Driver(core, executor, logger, clock=lambda: world.now_s)
        self._chance = world.chance(f"bridge/{world.process}")
        self._requests: dict[str, Request] = {}
        self._loads: dict[str, Pinned] = {}
        self._stores: dict[Reservation, None] = {}
        self._flushing: tuple[list[Reservation], list[Pinned]] = ([], [])

    @property
    def is_busy(self) -> bool:
        """Whether a tier is at work."""
        return bool(self.core.shared.running)

    def slots_ready(self, slots: range) -> None:
        """Report slots of the primary tier as usable."""
        self._driver.on_event(SlotsReady(slots))

    def new_request(self, name: str, tiers: frozenset[int] | None) -> None:
        """Begin a request."""
        self._requests[name] = Request(name, tiers)

    def finish(self, name: str) -> None:
        """End a request. Copies of it may be under way."""
        self.core.close(self._requests.pop(name))

    def lookup(self, key: OffloadKey, name: str) -> Lookup:
        """Return whether a chunk is there. What a thread posts can be there from any question on."""
        if self._events and self._chance.random() < 0.5:
            self._driver.on_events(self._events)
        request = self._requests[name]
        if request.answers_stand and (answer := self.core.repeat_answer(key, request)) is not None:
            return answer
        return self.core.lookup(key, request)

    def prepare_load(self, keys: Sequence[OffloadKey], name: str) -> list[int]:
        """Pin chunks for a load; return their slots."""
        pinned = self._loads[name] = self.core.acquire(keys, self._requests[name])
        return pinned.slots

    def complete_load(self, name: str, *, failed: bool) -> None:
        """End a load."""
        self._driver.end_load(self._loads.pop(name), self._requests.get(name), failed=failed)

    def prepare_store(self, keys: Sequence[OffloadKey]) -> Reservation | None:
        """Give slots to a store; None: not now."""
        reservation = self.core.reserve(keys)
        if reservation is not None and reservation.keys:
            self._stores[reservation] = None
        elif reservation is not None:
            self.core.abort(reservation)
        return reservation

    def complete_store(self, reservation: Reservation, *, failed: bool) -> None:
        """End a store."""
        del self._stores[reservation]
        if failed:
            self.core.fail_store(reservation)
        else:
            self._driver.commit(reservation)

    def end_schedule(self, started: Iterable[str], preempted: Iterable[str]) -> None:
        """A step is scheduled."""
        for name in started:
            if name in self._requests:
                self.core.scheduled(self._requests[name])
        for name in preempted:
            if name in self._requests:
                self.core.restart(self._requests[name])
        self._driver.settle()
        self.take_in()

    def reset(self) -> None:
        """Reset for new weights; copies under way are forgotten."""
        self._flushing[0].extend(self._stores)
        self._flushing[1].extend(self._loads.values())
        self._stores.clear()
        self._loads.clear()
        self._driver.reset()

    def flushed(self) -> None:
        """The copies that resets have cut off have ended."""
        reservations, loads = self._flushing
        self._flushing = [], []
        for reservation in reservations:
            self.core.abort(reservation)
        for pinned in loads:
            self._driver.end_load(pinned)

    def take_in(self) -> None:
        """Pass events to the core, and its commands to the executor."""
        self._driver.on_events(self._events)


__all__ = ["Bridge", "SimExecutorThread"]
