"""An engine's scheduler with randomised behaviour, and the executor behind two queues.

It drives the core as the vLLM adapter does, without vLLM: results are processed at the next lookup or at
the end of a step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf

from kvtier._core.chunks import block_of
from kvtier._core.messages import SlotsReady
from kvtier._core.promotion.waits import Wait
from kvtier._core.requests import Request, Terms
from kvtier._core.states import Lookup
from kvtier._core.tiers.load_gate import ComputeSpeed
from kvtier._core.transfers import Pinned, Reservation
from kvtier._execution.driver import Driver
from kvtier._execution.executor import CLOSE_S, Executor, ExecutorThread, Post
from kvtier._log import GuardedLogger
from kvtier.keys import OffloadKey, group_index
from kvtier_testing.sim.device import Copies
from kvtier_testing.sim.faults import FaultyTier
from kvtier_testing.sim.model import CheckedTiering, World, content, show
from kvtier_testing.sim.offers import offer
from kvtier_testing.sim.processes import DRAIN_S, Process
from kvtier_testing.sim.scenario import Scenario

_ASK_EVERY_S = 0.002
_MOST_FULL_STEPS = 40
_ROUNDING_S = 1e-9  # the core sums its deadlines in another order
_NOBODY = "192.0.2.1:1"
_RATHER = 4  # factor for resets while tiers are busy, when more can go wrong

logger = GuardedLogger("kvtier.sim")


class SimExecutorThread(ExecutorThread):
    """The executor's thread as a task of the simulated loop. Its queues and wake-ups are the real ones."""

    def __init__(self, make: Callable[[Post], Executor]) -> None:
        super().__init__(make)
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task, which also serves earlier submissions."""
        self.task = asyncio.get_running_loop().create_task(self._serve(), name="executor")

    async def aclose(self, drain_s: float) -> None:
        """Do what ``close`` does, without blocking."""
        assert self.task is not None
        self._drain_by_s = asyncio.get_running_loop().time() + drain_s
        self._end_by_s = self._drain_by_s + CLOSE_S
        self._closing = True
        self._wake()
        await self.task
        self._ended = True
        self._refuse_inbox()


class JobState(Enum):
    """The state of a request in the scheduler."""

    WAITING = 0
    LOADING = 1
    RUNNING = 2
    ENDED = 3


@dataclass(eq=False)
class Job:
    """A request in the scheduler.

    Attributes:
        request: the core's request.
        keys: keys of its chunks, in prompt order.
        waits_since_s: time of its first deferral.
        expired: whether it may not be deferred any more.
        computed: whether one of its loads failed, so that it is computed.
        is_scanned: whether it was looked up in this step.
        was_deferred: whether its last lookup deferred it.
        patience_s: longest time that it may be deferred.
    """

    request: Request
    keys: Sequence[OffloadKey]
    state: JobState = JobState.WAITING
    waits_since_s: float | None = None
    expired: bool = False
    computed: bool = False
    is_scanned: bool = False
    was_deferred: bool = False
    patience_s: float = 0.0

    @property
    def name(self) -> str:
        """Its name in traces and failures."""
        return self.request.name


@dataclass(frozen=True)
class EndedCopy:
    """A finished copy, not yet reported to the core; ``job`` is None for a store.

    ``unfilled`` maps the slots that a store did not fill to reasons.
    """

    epoch: int
    handle: Pinned | Reservation
    job: Job | None
    failed: bool
    unfilled: Mapping[int, str] = field(default_factory=dict)


class EngineProcess(Process):
    """Does the work of a scheduler, step by step. Its calls to the core never wait."""

    def __init__(
        self,
        world: World,
        scenario: Scenario,
        core: CheckedTiering,
        tiers: Sequence[FaultyTier],
        executor: SimExecutorThread,
        copies: Copies,
    ) -> None:
        super().__init__(world, core, tiers)
        self._scenario = scenario
        self._executor = executor
        self._copies = copies
        self._events = executor.events
        self._driver = Driver(core, executor.submit, logger, clock=lambda: world.now_s)
        self._chance = world.chance(f"engine/{world.process}")
        self._patience = world.chance(f"patience/{world.process}")
        self._claims = world.chance(f"claims/{world.process}")
        self._priorities = world.chance(f"priorities/{world.process}")
        self._blocks = world.chance(f"blocks/{world.process}")
        self._holes = world.chance(f"holes/{world.process}")
        self._places = world.chance(f"places/{world.process}")
        peers = [address for tier in scenario.tiers for address in getattr(tier.config, "peers", ())]
        self._addresses = [*peers, _NOBODY]
        core.shared.gate.window_chunks = 2
        self._full_steps = 0  # steps without room for a request, in which waiting requests are not looked up
        self._jobs: list[Job] = []
        self._requests = 0
        self._epoch = 0
        self._cut_off = 0  # copies cut off by resets and not yet ended
        self._flushing: list[Pinned | Reservation] = []
        self._ended: list[EndedCopy] = []

    async def run(self, until_s: float) -> None:
        self._executor.start()
        self._driver.on_event(SlotsReady(range(self._scenario.slots)))
        while self._world.now_s < until_s:
            if self._scenario.chunk_s:
                self.core.note_computed(0, 1, self._scenario.chunk_s)
            await self._step(arriving=True)
            await asyncio.sleep(self._scenario.step_s * self._chance.choice((0.5, 1.0, 1.0, 3.0)))

    async def drain(self) -> None:
        self.core.shared.gate.compute = ComputeSpeed()  # From now on every found chunk is loaded.
        at_rest = 0  # Results at the end of a step become visible in the next step.
        while at_rest < 2:
            while not (
                self._is_idle and self.core.is_idle and self.tiers_are_idle and self.core.claims.is_empty
            ):
                await self._step(arriving=False)
                await asyncio.sleep(self._scenario.step_s)
                at_rest = 0
            self._settle()
            at_rest += 1

    async def find(self, keys: Sequence[OffloadKey]) -> int:
        """Look a request up until it waits for nothing; return the number of chunks found."""
        job = Job(self._new_request(None), keys, patience_s=self._scenario.limits.request_deadline_s)
        until_s = self._world.now_s + DRAIN_S
        while True:
            found, waits = self._scan(job)
            self._settle()
            if not waits:
                self.core.close(job.request)
                return len(found)
            self._world.require(self._world.now_s < until_s, f"{job.name} is not answered in {DRAIN_S} s")
            await asyncio.sleep(_ASK_EVERY_S)

    async def aclose(self) -> None:
        if self._executor.task is None:
            return
        self._copies.hurry()
        await self._executor.aclose(self._chance.choice((0.0, 0.1, 1.0)))
        self._driver.on_events(self._events)

    def kill(self) -> None:
        self._copies.stop()

    @property
    def _is_idle(self) -> bool:
        return not (self._jobs or self._copies.under_way or self._ended or self._cut_off)

    async def _step(self, *, arriving: bool) -> None:
        """Schedule once. The executor may run between calls, as a thread would."""
        chance = self._chance
        if arriving and self._requests < self._scenario.requests and chance.random() < 0.4:
            self._arrive()
        self._end_copies()
        preempted = [job for job in self._jobs if job.state is JobState.RUNNING and chance.random() < 0.05]
        for job in preempted:
            job.state = JobState.WAITING
            job.waits_since_s, job.expired = None, False
        started = []
        waiting = [job for job in self._jobs if job.state is JobState.WAITING]
        for job in [] if self._is_full(arriving) else waiting:
            if self._schedule(job):
                started.append(job)
            await self._breathe()
        settles_first = chance.random() < 0.5
        if settles_first:
            self._settle(started, preempted)
        for job in [job for job in self._jobs if job.state is JobState.RUNNING]:
            self._run(job)
        if not settles_first:
            self._settle(started, preempted)
        self._abort_some()
        is_busy = bool(self.core.shared.running)
        if arriving and chance.random() < self._scenario.resets * (_RATHER if is_busy else 1):
            self._reset()

    def _is_full(self, arriving: bool) -> bool:
        if self._full_steps:
            self._full_steps -= 1
        elif arriving and max(self._scenario.waits_s) and self._patience.random() < 0.02:
            self._full_steps = self._patience.randint(1, _MOST_FULL_STEPS)
        return self._full_steps > 0

    # --- lookups ---------------------------------------------------------------------------------

    def _new_request(self, tiers: frozenset[int] | None) -> Request:
        self._requests += 1
        return Request(f"{self._world.process}.{self._requests}", tiers)

    def _arrive(self) -> None:
        chance = self._chance
        prompt = chance.choice(self._scenario.prompts)
        tiers = None
        if chance.random() < 0.2:
            # Adopted chunks precede the drawn tiers and are not filtered.
            first = int(self._scenario.keeps_memory)
            asked = range(first, first + len(self._scenario.tiers))
            tiers = frozenset(index for index in asked if chance.random() < 0.5)
        job = Job(self._new_request(tiers), prompt[: chance.randint(1, len(prompt))])
        self._claim(job.request, chance.choice((0.0, 0.0, 0.1, 1.0)))
        wait_s = self._patience.choice(self._scenario.waits_s)
        job.request.wait = Wait(wait_s) if wait_s else None
        job.request.addresses = tuple(
            self._places.choices(self._addresses, k=self._places.choice((0, 0, 1, 2)))
        )
        job.request.priority = self._priorities.choice((1, 1, 1, 0, 0, 2, 3))
        job.request.priority_s = self._priorities.choice((inf, inf, 0.0, 0.5))
        job.request.releases = job.request.priority == 0 and self._priorities.random() < 0.7
        job.patience_s = wait_s + self._scenario.limits.request_deadline_s
        for _ in range(self._blocks.choice((0, 0, 0, 1, 2))):
            self._add_part(job.request)
        self._jobs.append(job)

    def _add_part(self, request: Request) -> None:
        """Let a request act on blocks of its own prompt, of another prompt, or of none."""
        chance = self._blocks
        prompt = chance.choice(self._scenario.prompts)
        named = [block_of(key) for key in chance.sample(prompt, chance.randint(1, len(prompt)))]
        part = Request(f"{request.name}.{len(request.parts)}", blocks=dict.fromkeys([*named, 1]))
        part.priority, part.priority_s = chance.choice(((1, inf), (1, inf), (0, inf), (2, 0.2), (3, inf)))
        part.releases = part.priority == 0 and chance.random() < 0.5
        kept_s, next_use_s = chance.choice(((0.0, 0.0), (0.1, 0.0), (1.0, 0.0), (0.0, 0.3), (0.2, 2.0)))
        if kept_s or next_use_s:
            name = chance.choice((part.name, part.name, "agent 1"))
            self.core.claims.start_request(part, Terms(name, kept_s, next_use_s))
        self.core.add_part(request, part)

    def _claim(self, request: Request, kept_s: float) -> None:
        """Claim a request's chunks, alone or with other requests; sometimes release other claims."""
        next_use_s = self._patience.choice((0.0, 0.1, 0.3, 2.0))
        name = self._claims.choice((request.name, request.name, "agent 1", "agent 2"))
        releases = self._claims.choice(((), (), (), ("agent 1",)))
        self.core.claims.start_request(request, Terms(name, kept_s, next_use_s, releases))

    def _schedule(self, job: Job) -> bool:
        found, waits = self._scan(job)
        if waits or self._chance.random() < 0.1:  # as without free blocks
            return False
        job.waits_since_s, job.expired = None, False
        if found:
            self._load(job, found)
        else:
            job.state = JobState.RUNNING
        return True

    def _scan(self, job: Job) -> tuple[list[OffloadKey], bool]:
        """Look up each key as vLLM does; return the hits, and whether a key is pending."""
        windowed = [key for key in job.keys if group_index(key) in self.core.shared.windowed]
        front = [key for key in job.keys if key not in windowed]
        hits, waits = self._scan_group(job, front)
        if windowed and (hits or not front):  # windows reach only as far as the prefix, from the back
            found, waits_too = self._scan_group(job, windowed[: len(hits) or None][::-1])
            hits, waits = hits + found[::-1], waits or waits_too
        job.is_scanned, job.was_deferred = True, waits
        if self._world.traces:
            self._world.note(f"engine: {job.name} finds {[show(key) for key in hits]}, waits: {waits}")
        if waits and job.expired:
            self._world.fail(
                f"request {job.name} waits since {job.waits_since_s:.4f} s, beyond its deadline of "
                f"{job.patience_s} s"
            )
        if job.computed and (hits or waits):
            self._world.fail(f"request {job.name} is told of {hits}, though a load of it has failed")
        return hits, waits

    def _scan_group(self, job: Job, keys: Sequence[OffloadKey]) -> tuple[list[OffloadKey], bool]:
        hits: list[OffloadKey] = []
        waits = False
        for key in keys:
            answer = self._lookup(key, job.request)
            if answer is Lookup.MISS:
                break
            waits = waits or answer is not Lookup.HIT
            hits.append(key)
        return hits, waits

    def _lookup(self, key: OffloadKey, request: Request) -> Lookup:
        """Look a chunk up. Results posted by threads may arrive before any lookup."""
        if self._events and self._chance.random() < 0.5:
            self._driver.on_events(self._events)
        if request.answers_stand and (answer := self.core.repeat_answer(key, request)) is not None:
            return answer
        return self.core.lookup(key, request)

    def _settle(self, started: Sequence[Job] = (), preempted: Sequence[Job] = ()) -> None:
        """End the scheduling phase of a step."""
        for job in started:
            if job.state is not JobState.ENDED:
                self.core.scheduled(job.request)
        for job in preempted:
            if job.state is not JobState.ENDED:
                self.core.restart(job.request)
        self._driver.end_round(self._events)
        for job in self._jobs:
            if job.is_scanned:
                self._note_wait(job)

    def _note_wait(self, job: Job) -> None:
        now_s = self._world.now_s
        job.is_scanned = False
        waits_for_its_turn = job.request.deadline_s is None  # waits for computation, not for a tier
        if not job.was_deferred or waits_for_its_turn:
            job.waits_since_s = job.waits_since_s if job.expired else None
            return
        if job.waits_since_s is None:
            job.waits_since_s = now_s
        if now_s >= job.waits_since_s + job.patience_s + _ROUNDING_S:
            job.expired = True

    # --- copies ----------------------------------------------------------------------------------

    def _load(self, job: Job, found: list[OffloadKey]) -> None:
        pinned = self.core.acquire(found, job.request)
        job.state = JobState.LOADING
        weights, epoch = self._world.weights, self._epoch

        def done(got: list[bytes] | None) -> None:
            if epoch == self._epoch and got is not None:
                for key, one in zip(found, got, strict=True):
                    if one != content(key, weights):
                        held = self._world.name_of(one, found)
                        self._world.fail(f"{job.name} was given wrong bytes for {show(key)}: {held}")
                self._world.seen["chunks loaded"] += len(found)
            self._ended.append(EndedCopy(epoch, pinned, job, got is None))

        self._copies.load(pinned.slots, done)

    def _run(self, job: Job) -> None:
        """Store a request's computed chunks; they may be offered again if there is no room."""
        has_ended = self._store(job.keys, job.request) or self._chance.random() < 0.5
        if has_ended:
            self._finish(job)

    def _store(self, keys: Sequence[OffloadKey], request: Request | None = None) -> bool:
        """Start a store; return whether there was room or nothing to store."""
        reservation, epoch = self.core.reserve(keys, request), self._epoch
        if reservation is None:
            return False
        if not reservation.keys:
            self.core.abort(reservation)
            return True
        contents = offer(self._world, reservation.keys, self._holes if request is not None else None)
        filled = {slot: one for slot, one in zip(reservation.slots, contents, strict=True) if one is not None}
        lacking = dict.fromkeys([slot for slot in reservation.slots if slot not in filled], "incomplete")
        self._world.seen["chunks stored"] += len(filled)

        def done(good: bool) -> None:
            unfilled = lacking if good else dict.fromkeys(reservation.slots, "failed")
            self._ended.append(EndedCopy(epoch, reservation, None, not good, unfilled))

        self._copies.store(list(filled), list(filled.values()), done)
        return True

    async def store_once(self, keys: Sequence[OffloadKey]) -> None:
        self._store(keys)
        while not self._is_idle:
            self._end_copies()
            self._settle()
            await asyncio.sleep(self._scenario.step_s)

    def _end_copies(self) -> None:
        """Report finished copies in any order; those cut off by resets all at once."""
        ended, self._ended = self._ended, []
        self._chance.shuffle(ended)
        for copy in ended:
            if copy.epoch != self._epoch:
                self._cut_off -= 1
                self._flushing.append(copy.handle)
            else:
                self._end_copy(copy)
        if not self._cut_off:
            flushed, self._flushing = self._flushing, []
            for handle in flushed:
                if isinstance(handle, Reservation):
                    self.core.abort(handle)
                else:
                    self._driver.end_load(handle)

    def _end_copy(self, copy: EndedCopy) -> None:
        handle, job = copy.handle, copy.job
        if isinstance(handle, Pinned):
            assert job is not None
            request = None if job.state is JobState.ENDED else job.request
            self._driver.end_load(handle, request, failed=copy.failed)
            if job.state is JobState.LOADING:
                job.state = JobState.WAITING if copy.failed else JobState.RUNNING
                job.computed = job.computed or copy.failed
        else:
            self.core.drop_unfilled(handle, copy.unfilled)
            self._driver.commit(handle)

    def _reset(self) -> None:
        """Get new weights: cut off running copies and restart their requests."""
        self._end_copies()
        self._world.seen["reset"] += 1
        self._epoch += 1
        self._cut_off = self._copies.under_way
        self._driver.reset()
        for job in self._jobs:
            if job.state is JobState.LOADING:
                job.state = JobState.WAITING

    # --- ends ------------------------------------------------------------------------------------

    def _abort_some(self) -> None:
        for job in list(self._jobs):
            if self._chance.random() < 0.02:
                self._world.seen["aborted"] += 1
                self._finish(job)

    def _finish(self, job: Job) -> None:
        job.state = JobState.ENDED
        self._jobs.remove(job)
        self.core.close(job.request, self._world.now_s)

    async def _breathe(self) -> None:
        if self._chance.random() < 0.1:
            await asyncio.sleep(self._chance.choice((0.0, 0.0, self._scenario.step_s / 10)))
