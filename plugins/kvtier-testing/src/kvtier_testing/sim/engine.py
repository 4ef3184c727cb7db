"""An engine's scheduler, with chance in all that may vary."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvtier._core.states import Lookup
from kvtier._core.transfers import Reservation
from kvtier.keys import OffloadKey, group_index
from kvtier_testing.sim.bridge import Bridge
from kvtier_testing.sim.device import Copies
from kvtier_testing.sim.model import World, content, show
from kvtier_testing.sim.scenario import Scenario

_ASK_EVERY_S = 0.002
_RATHER = 4  # times as often come new weights while tiers are at work: more can go wrong then


class JobState(Enum):
    """Where a request is in the scheduler."""

    WAITING = 0
    LOADING = 1
    RUNNING = 2
    ENDED = 3


@dataclass(eq=False)
class Job:
    """A request on its way through the scheduler.

    Attributes:
        name: names it.
        keys: its chunks, in the order of the prompt.
        tiers: the tiers that it may be served from; None for all.
        state: where it is.
        waits_since_s: when it was deferred first.
        expired: whether it may not be deferred any more.
        computed: whether a load of it has failed.
        is_scanned: whether it was looked up in this step.
        was_deferred: whether its last lookup has deferred it.
    """

    name: str
    keys: Sequence[OffloadKey]
    tiers: frozenset[int] | None = None
    state: JobState = JobState.WAITING
    waits_since_s: float | None = None
    expired: bool = False
    computed: bool = False
    is_scanned: bool = False
    was_deferred: bool = False


class Engine:
    """Does what a scheduler does, one step after the other."""

    def __init__(self, world: World, scenario: Scenario, bridge: Bridge, copies: Copies) -> None:
        self.jobs: list[Job] = []
        self._world = world
        self._scenario = scenario
        self._bridge = bridge
        self._copies = copies
        self._chance = world.chance(f"engine/{world.process}")
        self._arrived = 0
        self._epoch = 0
        self._cut_off = 0
        self._ended: list[tuple[int, Job | Reservation, bool]] = []

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to be done."""
        return not (self.jobs or self._copies.under_way or self._ended or self._cut_off)

    async def step(self, *, arriving: bool) -> None:
        """Schedule once. Between its calls the executor may get on, as beside a thread."""
        chance = self._chance
        if arriving and self._arrived < self._scenario.requests and chance.random() < 0.4:
            self._arrive()
        self._end_copies()
        preempted = [job for job in self.jobs if job.state is JobState.RUNNING and chance.random() < 0.05]
        for job in preempted:
            job.state = JobState.WAITING
            job.waits_since_s, job.expired = None, False
        started = []
        for job in [job for job in self.jobs if job.state is JobState.WAITING]:
            if self._schedule(job):
                started.append(job.name)
            await self._breathe()
        settles_first = chance.random() < 0.5
        if settles_first:
            self._settle(started, [job.name for job in preempted])
        for job in [job for job in self.jobs if job.state is JobState.RUNNING]:
            self._run(job)
        if not settles_first:
            self._settle(started, [job.name for job in preempted])
        self._abort_some()
        if arriving and chance.random() < self._scenario.resets * (_RATHER if self._bridge.is_busy else 1):
            self._reset()

    async def ask(self, job: Job, longest_s: float) -> int:
        """Look a request up until it waits for nothing; return how many of its chunks are there."""
        self._bridge.new_request(job.name, job.tiers)
        until_s = self._world.now_s + longest_s
        while True:
            found, waits = self._scan(job)
            self._settle([], [])
            if not waits:
                self._bridge.finish(job.name)
                return len(found)
            self._world.require(self._world.now_s < until_s, f"{job.name} is not answered in {longest_s} s")
            await asyncio.sleep(_ASK_EVERY_S)

    async def store(self, keys: Sequence[OffloadKey]) -> None:
        """Store a prompt, and wait until its copies have ended."""
        self._store(keys)
        while not self.is_idle:
            self._end_copies()
            self._settle([], [])
            await asyncio.sleep(self._scenario.step_s)

    # --- lookups ---------------------------------------------------------------------------------

    def _arrive(self) -> None:
        chance = self._chance
        self._arrived += 1
        prompt = chance.choice(self._scenario.prompts)
        tiers = None
        if chance.random() < 0.2:
            tiers = frozenset(index for index in range(len(self._scenario.tiers)) if chance.random() < 0.5)
        job = Job(f"{self._world.process}.{self._arrived}", prompt[: chance.randint(1, len(prompt))], tiers)
        self.jobs.append(job)
        self._bridge.new_request(job.name, job.tiers)

    def _schedule(self, job: Job) -> bool:
        found, waits = self._scan(job)
        if waits or self._chance.random() < 0.1:  # or there are no blocks for it
            return False
        job.waits_since_s, job.expired = None, False
        if found:
            self._load(job, found)
        else:
            job.state = JobState.RUNNING
        return True

    def _scan(self, job: Job) -> tuple[list[OffloadKey], bool]:
        """Ask for each key as vLLM does; return the hits, and whether something is pending."""
        windowed = self._scenario.windowed and group_index(job.keys[0]) == 1
        hits: list[OffloadKey] = []
        waits = False
        for key in reversed(job.keys) if windowed else job.keys:
            answer = self._bridge.lookup(key, job.name)
            if answer is Lookup.MISS:
                break
            waits = waits or answer is not Lookup.HIT
            hits.append(key)
        job.is_scanned, job.was_deferred = True, waits
        if self._world.traces:
            self._world.note(f"engine: {job.name} finds {[show(key) for key in hits]}, waits: {waits}")
        if waits and job.expired:
            self._world.fail(
                f"request {job.name} waits since {job.waits_since_s:.4f} s, beyond its deadline of "
                f"{self._scenario.limits.request_deadline_s} s"
            )
        if job.computed and (hits or waits):
            self._world.fail(f"request {job.name} is told of {hits}, though a load of it has failed")
        return (hits[::-1] if windowed else hits), waits

    def _settle(self, started: list[str], preempted: list[str]) -> None:
        self._bridge.end_schedule(started, preempted)
        now_s = self._world.now_s
        for job in self.jobs:
            if not job.is_scanned:
                continue
            job.is_scanned = False
            if not job.was_deferred:
                job.waits_since_s = job.waits_since_s if job.expired else None
                continue
            if job.waits_since_s is None:
                job.waits_since_s = now_s
            if now_s >= job.waits_since_s + self._scenario.limits.request_deadline_s:
                job.expired = True

    # --- copies ----------------------------------------------------------------------------------

    def _load(self, job: Job, found: list[OffloadKey]) -> None:
        slots = self._bridge.prepare_load(found, job.name)
        job.state = JobState.LOADING
        weights, epoch = self._world.weights, self._epoch

        def done(got: list[bytes] | None) -> None:
            if epoch == self._epoch and got is not None:
                for key, one in zip(found, got, strict=True):
                    if one != content(key, weights):
                        held = self._world.name_of(one, found)
                        self._world.fail(f"{job.name} was given wrong bytes for {show(key)}: {held}")
                self._world.seen["chunks loaded"] += len(found)
            self._ended.append((epoch, job, got is None))

        self._copies.load(slots, done)

    def _run(self, job: Job) -> None:
        """Store what a request has computed; it may be offered again where there is no room."""
        if self._store(job.keys) or self._chance.random() < 0.5:
            self._finish(job)

    def _store(self, keys: Sequence[OffloadKey]) -> bool:
        """Begin to store; return whether there was room, or nothing to do."""
        reservation = self._bridge.prepare_store(keys)
        if reservation is None:
            return False
        if reservation.keys:
            contents = [content(key, self._world.weights) for key in reservation.keys]
            epoch = self._epoch
            self._world.seen["chunks stored"] += len(contents)
            self._copies.store(
                reservation.slots,
                contents,
                lambda good: self._ended.append((epoch, reservation, not good)),
            )
        return True

    def _end_copies(self) -> None:
        """Report the copies that have ended, in any order; those that resets cut off all at once."""
        ended, self._ended = self._ended, []
        self._chance.shuffle(ended)
        for epoch, copied, failed in ended:
            if epoch != self._epoch:
                self._cut_off -= 1
            elif isinstance(copied, Job):
                self._bridge.complete_load(copied.name, failed=failed)
                self._loaded(copied, failed)
            else:
                self._bridge.complete_store(copied, failed=failed)
        if ended and not self._cut_off:
            self._bridge.flushed()

    def _loaded(self, job: Job, failed: bool) -> None:
        if job.state is JobState.LOADING:
            job.state = JobState.WAITING if failed else JobState.RUNNING
            job.computed = job.computed or failed

    def _reset(self) -> None:
        """New weights: what is under way is cut off, and its requests start anew."""
        self._end_copies()
        self._world.seen["reset"] += 1
        self._epoch += 1
        self._cut_off = self._copies.under_way
        self._bridge.reset()
        for job in self.jobs:
            if job.state is JobState.LOADING:
                job.state = JobState.WAITING

    # --- ends ------------------------------------------------------------------------------------

    def _abort_some(self) -> None:
        for job in list(self.jobs):
            if self._chance.random() < 0.02:
                self._world.seen["aborted"] += 1
                self._finish(job)

    def _finish(self, job: Job) -> None:
        job.state = JobState.ENDED
        self.jobs.remove(job)
        self._bridge.finish(job.name)

    async def _breathe(self) -> None:
        if self._chance.random() < 0.1:
            await asyncio.sleep(self._chance.choice((0.0, 0.0, self._scenario.step_s / 10)))


__all__ = ["Engine", "Job", "JobState"]
