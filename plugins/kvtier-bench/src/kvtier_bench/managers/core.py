"""The cost of tiering for the scheduler's thread: microseconds per chunk, compared with vLLM's own managers.

Both are called through vLLM's interface, alternately and in one process. All times are processor time of the
calling thread; other threads and processes do not count.
"""

from __future__ import annotations

import gc
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import median

from kvtier import Identity, TieringConfig
from kvtier._build import make_core, make_tiers
from kvtier._core.kv_events import EventQueue
from kvtier._core.messages import Answer, Command, Get, GetEnded, Put, PutEnded, SlotsReady
from kvtier._core.tiering import Tiering
from kvtier._execution.executor import Executor, ExecutorThread, TierActivity
from kvtier._memory.region import Region
from kvtier.keys import OffloadKey
from kvtier_bench.machine import Machine, files_below, open_folder
from kvtier_bench.managers.vllm import ManagerDriver, open_kvtier, open_vllm

CHUNK_BYTES = 4096  # the smallest slot, because the figures do not depend on its size
BATCH = 64
PROMPT = 62
LARGE = 8192
ENGINE_STEP_S = 0.003
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Cost:
    """Time of the scheduler's thread; microseconds are per chunk unless the call says otherwise."""

    policy: str
    tier: str
    call: str
    unit: str
    kvtier: float
    vllm: float
    ratio: float


class MemoryTier:
    """Replaces the executor and one tier. It keeps only keys and answers at once.

    Attributes:
        events: the events for the owner.
        activity: the activity of each tier; the tier is never busy.
    """

    def __init__(self, tiers: int) -> None:
        self.events = EventQueue()
        self.activity = [TierActivity(1) for _ in range(tiers)]
        self._stored: set[OffloadKey] = set()

    def submit(self, commands: Sequence[Command]) -> None:
        """Answer commands."""
        for command in commands:
            if isinstance(command, Put):
                self._stored.update(command.keys)
                self.events.append(PutEnded(command.id, (True,) * len(command.keys)))
            elif isinstance(command, Get):
                self.events.append(GetEnded(command.id, self._answers(command)))

    def _answers(self, fetch: Get) -> list[Answer]:
        stored, slots = self._stored, len(fetch.slots)
        answers = [Answer.LOCATED if key in stored else Answer.MISSING for key in fetch.keys]
        for index in range(slots):
            if answers[index] is Answer.MISSING:
                break
            answers[index] = Answer.COPIED
        return answers


@dataclass(frozen=True)
class Case:
    """One set of measurements.

    Attributes:
        tier: ``none``; ``memory``, which keeps only keys and answers at once; or ``fs``, which keeps files.
        slots: number of slots of the primary tier, more than 9,000.
        rounds: number of samples of each call; the figures are medians.
    """

    policy: str
    tier: str
    slots: int
    rounds: int


CASES = (
    Case("lru", "none", 50_000, 3),
    Case("lru", "memory", 50_000, 3),
    Case("arc", "memory", 50_000, 3),
    Case("lru", "fs", 16_384, 2),
)


def run() -> list[Cost | Machine]:
    """Measure ``CASES``."""
    costs: list[Cost | Machine] = []
    for case in CASES:
        costs += _measure_case(case)
    return [*costs, Machine.here()]


def _measure_case(case: Case) -> list[Cost]:
    with ExitStack() as stack:
        folder = stack.enter_context(open_folder(None))
        ours = _open_kvtier(case, stack)
        theirs = open_vllm(case.policy, case.tier, case.slots, CHUNK_BYTES, folder)
        stack.callback(theirs.close)
        subjects = [_Subject(driver, case) for driver in (ours, theirs)]
        for index in range(case.rounds):
            for subject in subjects[:: 1 if index % 2 else -1]:
                subject.fill()
        for index in range(case.rounds):
            for subject in subjects[:: 1 if index % 2 else -1]:
                subject.measure()
        return _costs(case, subjects)


def _costs(case: Case, subjects: Sequence[_Subject]) -> list[Cost]:
    costs = []
    for (call, unit), samples in subjects[0].samples.items():
        summary = max if unit == "ms, longest" else median
        ours = float(summary(samples))
        theirs = float(summary(subjects[1].samples[call, unit]))
        costs.append(Cost(case.policy, case.tier, call, unit, ours, theirs, ours / theirs))
    return costs


class _Subject:
    """A driver, the keys passed to it, and its figures."""

    def __init__(self, driver: ManagerDriver, case: Case) -> None:
        self.samples: dict[tuple[str, str], list[float]] = {}
        self._driver = driver
        self._case = case
        self._stored: deque[list[OffloadKey]] = deque()  # batches, the oldest first
        self._is_full = False

    def fill(self) -> None:
        """Store this round's share of batches, while slots are free."""
        # kvtier keeps some slots free for chunks in flight, so fill only 90 %.
        share = int(self._case.slots * 0.9) // self._case.rounds // BATCH
        self._store(share, "with space free")
        self._driver.end_step()

    def measure(self) -> None:
        """Take one sample of each call, on a full primary tier."""
        recent = [key for batch in list(self._stored)[-8:] for key in batch]
        for what, keys, answer in (("miss", _new_keys(PROMPT * 8), "miss"), ("primary hit", recent, "hit")):
            spent_s = self._resolve(keys, answer, loads=False)
            self._note(f"lookup, {what}, and the end of its step", "us", spent_s / len(keys) * 1e6)
        if not self._is_full:  # Fill the remaining slots, so that the next store has to evict.
            self._is_full = True
            self._store(self._case.slots // 6 // BATCH, None)
        self._store(64, "full")
        if self._case.tier != "none":
            self._secondary_hits()
        self._large_store()
        self._driver.collect()

    def _store(self, batches: int, when: str | None) -> None:
        """Store many batches and time the calls. Between batches the tiers may catch up."""
        driver, keep_up = self._driver, 8
        reserve_s = commit_s = step_s = 0.0
        for index in range(batches):
            keys, request = _new_keys(BATCH), driver.new_request()
            started = time.thread_time()
            assert driver.reserve(keys, request), "a batch has room"
            reserved = time.thread_time()
            driver.commit(keys, request)
            committed = time.thread_time()
            driver.finish(request)
            finished = time.thread_time()
            driver.end_step()
            step_s += time.thread_time() - finished
            commit_s += committed - reserved
            reserve_s += reserved - started
            self._stored.append(keys)
            if index % keep_up == keep_up - 1:
                self._quiesce()
        self._quiesce()
        whole_s = reserve_s + commit_s + step_s
        calls = {"reserve": reserve_s, "commit": commit_s, "both and end of step": whole_s}
        for call, spent_s in calls.items() if when is not None else ():
            self._note(f"store 64, {when}: {call}", "us", spent_s / batches / BATCH * 1e6)

    def _secondary_hits(self) -> None:
        """Load chunks that were evicted long ago."""
        spent_s = 0.0
        prompts = 16
        for _ in range(prompts):
            keys = self._stored.popleft()[:PROMPT]
            spent_s += self._resolve(keys, "hit", loads=True)
        self._note("secondary hit, until it is pinned for its load", "us", spent_s / prompts / PROMPT * 1e6)

    def _resolve(self, keys: Sequence[OffloadKey], expected: str, *, loads: bool) -> float:
        """Run steps until every key has its final answer; return this thread's processor seconds."""
        driver, request, spent_s = self._driver, self._driver.new_request(), 0.0
        lookup, final = driver.lookup, getattr(driver, expected)
        until_s = time.monotonic() + PATIENCE_S
        while True:
            started = time.thread_time()
            answers = [lookup(key, request) for key in keys]
            is_done = answers.count(final) == len(keys)
            if is_done and loads:
                driver.load(keys, request)
            driver.end_step()
            spent_s += time.thread_time() - started
            if is_done:
                break
            assert time.monotonic() < until_s, f"{len(keys) - answers.count(final)} keys are no {expected}"
            self._pause()
        if loads:
            driver.loaded(keys, request)
        driver.finish(request)
        return spent_s

    def _large_store(self) -> None:
        """Measure a request that stores more chunks than a real one is likely to."""
        driver, keys, request = self._driver, _new_keys(LARGE), self._driver.new_request()
        gc.collect()
        reserve_s = _timed(lambda: driver.reserve(keys, request))
        commit_s = _timed(lambda: driver.commit(keys, request))
        longest_s = max(reserve_s, commit_s, _timed(driver.end_step))
        self._note("reserve 8,192, full", "ms", reserve_s * 1e3)
        self._note("longest single call at 8,192 chunks", "ms, longest", longest_s * 1e3)
        driver.finish(request)
        self._stored.extend(keys[first : first + BATCH] for first in range(0, LARGE, BATCH))
        self._quiesce()

    def _quiesce(self) -> None:
        until_s = time.monotonic() + PATIENCE_S
        self._driver.end_step()
        while not self._driver.is_quiet():
            assert time.monotonic() < until_s, "transfers do not end"
            self._pause()
            self._driver.end_step()

    def _pause(self) -> None:
        if self._case.tier == "fs":
            time.sleep(ENGINE_STEP_S)

    def _note(self, call: str, unit: str, value: float) -> None:
        self.samples.setdefault((call, unit), []).append(value)


def _timed(call: Callable[[], object]) -> float:
    started = time.thread_time()
    call()
    return time.thread_time() - started


def _new_keys(count: int) -> list[OffloadKey]:
    return [OffloadKey(os.urandom(32) + b"\0\0\0\0") for _ in range(count)]


def _open_kvtier(case: Case, stack: ExitStack) -> ManagerDriver:
    core, executor = _open_parts(case, stack)
    events = executor.events
    ready = 0
    until_s = time.monotonic() + PATIENCE_S
    while ready < case.slots:
        assert time.monotonic() < until_s, "the slots do not become ready"
        while events:
            event = events.popleft()
            core.on_event(event, time.monotonic())
            ready += len(event.slots) if isinstance(event, SlotsReady) else 0
        time.sleep(0.001)
    return open_kvtier(core, executor)


def _open_parts(case: Case, stack: ExitStack) -> tuple[Tiering, MemoryTier | ExecutorThread]:
    tiers = [] if case.tier == "none" else [files_below(stack.enter_context(open_folder(None)))]
    config = TieringConfig.from_mapping(
        {
            "cpu_bytes_to_use": case.slots * CHUNK_BYTES,
            "eviction_policy": case.policy,
            "secondary_tiers": tiers,
        }
    )
    core = make_core(config, CHUNK_BYTES)
    if case.tier != "fs":
        memory = MemoryTier(len(tiers))
        memory.events.append(SlotsReady(range(case.slots)))
        return core, memory
    region = stack.enter_context(Region.anonymous(case.slots, CHUNK_BYTES))
    identity = Identity.make("bench", {})
    executor = ExecutorThread(partial(Executor, make_tiers(config), identity, region))
    executor.start()
    stack.callback(executor.close, 5.0)
    region.populate(lambda slots: executor.events.append(SlotsReady(slots)))
    return core, executor
