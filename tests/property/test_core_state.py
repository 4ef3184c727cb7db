"""The core against a plain model: random owners, tiers that answer late or wrongly, resets at any time.

The model knows the bytes in each slot (a key and the epoch of its store) and the current readers and writers.
After every step the test compares the core's answers with the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier._core.chunks import Chunk
from kvtier._core.limits import Limits
from kvtier._core.messages import (
    Answer,
    Get,
    GetEnded,
    Put,
    PutEnded,
    Removed,
    Reset,
    SlotsReady,
    TierDown,
    TierUp,
    Touch,
    TransferHealth,
)
from kvtier._core.promotion.waits import Wait
from kvtier._core.requests import Request, Terms
from kvtier._core.slot_trailers import SlotTrailers
from kvtier._core.states import BreakerState, ChunkState, Lookup, RequestState
from kvtier._core.tiers.tier_status import TierStatus
from kvtier._core.tiers.write_admission import WriteAdmission
from kvtier._core.transfers import Pinned, Reservation
from kvtier._telemetry.catalogue import COUNTERS
from kvtier.keys import OffloadKey, group_index, pack_key
from kvtier.policies import ARC, LHD, LRU, Auto, EvictionPolicy, Run
from kvtier_testing import invariants
from kvtier_testing.sim.efficiency import EfficiencyCheckedTiering
from tests.effort import effort

T = TypeVar("T")

REQUEST_DEADLINE_S = 5.0
TIER_DEADLINE_S = 3.0
GARBAGE = None
FINAL = (Lookup.HIT, Lookup.MISS)

Bytes = tuple[OffloadKey, int] | None  # a key and its epoch, or meaningless bytes


def _chain(name: str, length: int, group: int = 0) -> list[OffloadKey]:
    return [pack_key(f"{name}{index:02}".encode(), group) for index in range(length)]


# Two prompts share a prefix, one stands alone, one belongs to a group that may be windowed.
PROMPTS = [
    _chain("shared", 4) + _chain("left", 6),
    _chain("shared", 4) + _chain("right", 6),
    _chain("alone", 12),
    _chain("window", 6, group=1),
    _chain("shared", 4) + _chain("window", 6, group=1),
]
KEYS = sorted({key for prompt in PROMPTS for key in prompt})


def _wishes(seed: int) -> list[Answer]:
    return [Answer.COPIED] * 30 if seed < 10 else Random(seed).choices(list(Answer), k=30)


def _kept(seed: int) -> list[bool]:
    return [True] * 30 if seed < 10 else Random(seed).choices([True, False], k=30)


picks = st.integers(0, 255)
prompts = st.sampled_from(PROMPTS)
lengths = st.integers(1, 12)
steps_s = st.sampled_from([0.0, 0.0, 0.1, 0.1, 0.5, 1.0, 4.0])
# Names of claims, and their times after a request's end.
names = st.sampled_from("ab")
kept_s = st.sampled_from([0.0, 0.5, 4.0])
next_use_s = st.sampled_from([0.0, 0.5, 4.0])
# The tiers that may serve a request; most requests leave it open.
filters = st.sampled_from(
    [None, None, None, frozenset[int](), frozenset({0}), frozenset({1}), frozenset({0, 2})]
)
# The health in an answer; mostly good, or breakers would be open most of the time.
healths = st.sampled_from(
    [TransferHealth.NONE, *[TransferHealth.GOOD] * 6, TransferHealth.BAD, TransferHealth.LATE]
)
# The duration that a tier reports.
tooks_s = st.sampled_from([0.0, 0.001, 0.05, 0.5, 2.0])
# A tier's answer for each key that it has: always copied, or any answer.
wishes = st.integers(0, 30).map(_wishes)
limits = st.builds(
    Limits,
    request_deadline_s=st.just(REQUEST_DEADLINE_S),
    promotion_budget=st.sampled_from([0.1, 0.25, 1.0]),
    promotion_reserve=st.sampled_from([0.0, 0.1, 0.5]),
    put_backlog=st.sampled_from([0.25, 1.0]),
    pin_budget=st.sampled_from([0.0, 0.25, 0.9]),
    store_threshold=st.sampled_from([0, 0, 2]),
    max_tracker_size=st.just(20),
    max_announced=st.sampled_from([1, 5, 100, 100]),
    load_gate=st.sampled_from(["latency", "throughput", "off"]),
)


class Raising(LRU):
    """A policy that raises once, in one of its calls."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls

    def add_run(self, run: Run, keys: Sequence[OffloadKey], *, used: bool) -> None:
        self._count()
        super().add_run(run, keys, used=used)

    def pin(self, keys: Sequence[OffloadKey]) -> None:
        self._count()
        super().pin(keys)

    def evict(self, count: int) -> list[OffloadKey]:
        self._count()
        return super().evict(count)

    def _count(self) -> None:
        self.calls -= 1
        if not self.calls:
            raise RuntimeError("a fault of the policy")


class Entries(SlotTrailers):
    """The entries of slots that an earlier engine left; the bytes of ``verified`` ones were verified."""

    def __init__(self, verified: Iterable[int]) -> None:
        self.verified = set(verified)

    def fill(self, slots: Collection[int]) -> None:
        self.verified.difference_update(slots)

    drop = fill

    def use(self, slots: Collection[int]) -> None:
        pass

    def reset(self) -> None:
        self.verified.clear()

    def is_verified(self, slot: int) -> bool:
        return slot in self.verified


@dataclass(eq=False)
class Asker:
    """A request as the model sees it.

    Attributes:
        keys: the keys to look up, in prompt order.
        backwards: whether the last key is looked up first, as for a sliding window.
        scan: this round's answers in lookup order; None if there was no lookup.
        since_s: time when a key first stayed pending.
        expired: whether only final answers are allowed from now on.
        patience_s: longest time that a key may stay pending.
    """

    keys: list[OffloadKey]
    backwards: bool
    request: Request = field(default_factory=Request)
    scan: dict[OffloadKey, Lookup] | None = None
    since_s: float | None = None
    expired: bool = False
    patience_s: float = REQUEST_DEADLINE_S


@dataclass(eq=False)
class Job:
    """A command that a tier accepted, with its time, and the tier's epoch and chunks at that time.

    ``is_written`` is true if the tier has the chunks although the put has not ended.
    """

    command: Put | Get
    begun_s: float
    epoch: int
    stored: frozenset[OffloadKey]
    is_written: bool = False


NOTHING_ENDS: Mapping[int, tuple[Job, list[Answer]]] = {}


class CoreMachine(RuleBasedStateMachine):
    """Drives ``Tiering`` as an engine and its tiers may. It also checks that the core is frugal."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.epoch = 0
        self.contents: dict[int, Bytes] = {}
        self.writers: dict[int, object] = {}
        self.readers: dict[int, int] = {}
        self.askers: list[Asker] = []
        self.reservations: list[tuple[Reservation, int]] = []
        self.loads: list[Pinned] = []
        self.jobs: list[Job] = []
        self.stored: list[set[OffloadKey]] = []
        self.confirmed: set[OffloadKey] = set()  # a tier has reported them in this epoch
        self.announced: set[OffloadKey] = set()
        self.believed: list[set[OffloadKey]] = []  # a router's view of each tier
        self.untold: list[set[OffloadKey]] = []  # chunks that have left a tier, which has not reported it yet

    @initialize(
        policy=st.sampled_from([LRU, ARC, LHD, Auto]) | st.integers(1, 30),
        tiers=st.sampled_from([1, 2, 3, 1, 2, 0]),
        slots=st.sampled_from([12, 24, 6, 3, 17, 1]),
        limits=limits,
        windowed=st.sampled_from([frozenset[int](), frozenset({1})]),
        kept=st.lists(st.sampled_from([12, 12, 5, 2, 0]), min_size=15, max_size=15),
        adopted=st.just([]) | st.lists(st.sampled_from(KEYS), unique=True, max_size=12),
    )
    def start(
        self,
        policy: type[EvictionPolicy] | int,
        tiers: int,
        slots: int,
        limits: Limits,
        windowed: frozenset[int],
        kept: list[int],
        adopted: list[OffloadKey],
    ) -> None:
        gates = [
            TierStatus(
                f"tier{index}", TIER_DEADLINE_S, writes=WriteAdmission("reused" if index == 1 else "all")
            )
            for index in range(tiers)
        ]
        self.in_place = [TierStatus("adopted", TIER_DEADLINE_S, in_place=True)] if adopted else []
        self.windowed = windowed
        self.core = EfficiencyCheckedTiering(
            Raising(policy) if isinstance(policy, int) else policy(),
            [*self.in_place, *gates],
            limits,
            windowed_groups=windowed,
            track_kv_events=True,
        )
        invariants.watch_evictions(self.core)
        self._watch_released()
        self._watch_orders()
        for _ in range(tiers):  # another engine ran before
            self.stored.append({key for prompt in PROMPTS for key in prompt[: kept.pop()]})
        self.stored[:0] = [set()] * len(self.in_place)
        for _ in self.stored:
            self.believed.append(set())
            self.untold.append(set())
        slot_of = dict(zip(adopted, range(slots), strict=False))
        self.contents.update((slot, (key, self.epoch)) for key, slot in slot_of.items())
        if self.in_place:
            self.core.table.adopt(Entries([slot for slot in slot_of.values() if slot % 3 == 0]), slot_of)
        self.core.on_event(SlotsReady(range(slots)), self.now_s)

    def _watch_released(self) -> None:
        released = self.core.priorities.released

        def checked() -> list[Chunk]:
            chunks = released()
            for chunk in chunks:
                assert chunk.key in self.confirmed, "a tier has it"
                assert not chunk.pins, "nobody uses it"
                assert not any(chunk.key in (asker.scan or ()) for asker in self.askers), "nobody asks for it"
                assert all(chunk.key not in asker.request.own for asker in self.askers)
            return chunks

        setattr(self.core.priorities, "released", checked)  # noqa: B010

    def _watch_orders(self) -> None:
        """Check that the policy is called for visible chunks only; a replaced policy starts with those."""
        table, call = self.core.table, self.core.table._call_each

        def checked(keys: list[OffloadKey], act: Callable[..., object]) -> None:
            assert table.visible.keys() >= set(keys), "an order is told of visible chunks"
            call(keys, act)

        setattr(table, "_call_each", checked)  # noqa: B010

    # --- what an engine does ---------------------------------------------------------------------

    @precondition(lambda self: len(self.askers) < 4)
    @rule(
        prompt=prompts,
        length=st.sampled_from([12, 12, 7, 4, 1]),
        backwards=st.booleans(),
        allowed=filters,
        wait_s=st.sampled_from([0.0, 0.0, 1.0, 8.0]),
        priority=st.sampled_from([1, 1, 0, 0, 2, 3]),
        priority_s=st.sampled_from([inf, 0.0, 1.0, 8.0]),
        releases=st.booleans(),
        terms=st.none() | st.builds(Terms, names, kept_s, next_use_s, st.lists(names, max_size=2)),
    )
    def new_request(
        self,
        prompt: list[OffloadKey],
        length: int,
        backwards: bool,
        allowed: frozenset[int] | None,
        wait_s: float,
        priority: int,
        priority_s: float,
        releases: bool,
        terms: Terms | None,
    ) -> None:
        request = Request(tiers=allowed, wait=Wait(wait_s) if wait_s else None, priority=priority)
        request.releases = releases and priority == 0
        request.priority_s = priority_s
        if terms is not None:
            self.core.claims.start_request(request, terms)
        is_windowed = group_index(prompt[0]) in self.windowed
        patience_s = REQUEST_DEADLINE_S + wait_s
        self.askers.append(Asker(prompt[:length], backwards and is_windowed, request, patience_s=patience_s))

    @precondition(lambda self: self.askers)
    @rule(pick=picks)
    def scan(self, pick: int) -> None:
        self._scan(_pick(self.askers, pick))

    @precondition(lambda self: self.askers)
    @rule(step_s=steps_s, loads=st.integers(0, 15), stored=prompts, answers=wishes, ends=st.integers(0, 3))
    def engine_step(
        self, step_s: float, loads: int, stored: list[OffloadKey], answers: list[Answer], ends: int
    ) -> None:
        """Look up all requests; load some of those that wait for nothing; end the step.

        Between lookups and loads, tiers answer and a store reserves slots.
        """
        for asker in self.askers:
            self._scan(asker)
        fetches = [job for job in self.jobs if isinstance(job.command, Get)]
        for job in fetches[:ends]:
            self._end_fetch(job, answers)
        if ends:
            self._reserve(stored, 0, 4 * ends)
        for index, asker in enumerate(self.askers):
            assert asker.scan is not None
            if loads >> index & 1 and all(answer in FINAL for answer in asker.scan.values()):
                self._acquire(asker, alone=False)
        self.settle(step_s)

    @precondition(lambda self: self.askers and any(isinstance(job.command, Get) for job in self.jobs))
    @rule(pick=picks, number=st.integers(0, 4), answers=wishes)
    def scan_in_the_midst_of_which_a_tier_answers(
        self, pick: int, number: int, answers: list[Answer]
    ) -> None:
        """Queue a tier's answer, which the core processes at its next call."""
        fetches = [job for job in self.jobs if isinstance(job.command, Get)]
        self._scan(_pick(self.askers, pick), {number: (_pick(fetches, pick), answers)})

    def _scan(self, asker: Asker, ends: Mapping[int, tuple[Job, list[Answer]]] = NOTHING_ENDS) -> None:
        """Look up a request's keys; the jobs in ``ends`` end before the lookups of these numbers."""
        if asker.scan is None:
            asker.scan = {}
        for number, key in enumerate(reversed(asker.keys) if asker.backwards else asker.keys):
            if number in ends:
                self._end_fetch(*ends[number])
            answer = self.core.repeat_answer(key, asker.request) if asker.request.answers_stand else None
            answer = self.core.lookup(key, asker.request) if answer is None else answer
            assert not asker.expired or answer in FINAL
            if answer is Lookup.HIT:
                self._require_bytes(self.core.table.visible[key].slot, key)
            asker.scan[key] = answer
            if answer is Lookup.MISS:
                break

    @precondition(lambda self: any(asker.scan for asker in self.askers))
    @rule(pick=picks, alone=st.booleans())
    def acquire(self, pick: int, alone: bool) -> None:
        """Acquire a key that was a HIT in this round, regardless of later events."""
        self._acquire(_pick([asker for asker in self.askers if asker.scan], pick), alone)

    def _acquire(self, asker: Asker, alone: bool) -> None:
        assert asker.scan is not None
        hits = [key for key, answer in asker.scan.items() if answer is Lookup.HIT]
        pinned = self.core.acquire(hits, None if alone else asker.request)
        for chunk, key in zip(pinned.chunks, hits, strict=True):
            self._require_bytes(chunk.slot, key)
        self._read(pinned.slots)
        self.loads.append(pinned)
        if not alone:
            asker.scan, asker.since_s, asker.expired = None, None, False

    @precondition(lambda self: self.loads)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        pinned = _take(self.loads, pick)
        self._end_reading(pinned.slots)
        self.core.release(pinned)

    @precondition(lambda self: self.loads)
    @rule(pick=picks)
    def fail_load(self, pick: int) -> None:
        """Drop the load's chunks, regardless of other holders, puts, or hits reported in this round."""
        pinned = _take(self.loads, pick)
        dropped = {chunk.key for chunk in pinned.chunks}
        self._end_reading(pinned.slots)
        self.core.fail_load(pinned)
        for asker in self.askers:
            scan = asker.scan or {}
            for key in dropped:
                if scan.get(key) is Lookup.HIT:
                    del scan[key]
        assert not any(chunk in self.core.table.visible.values() for chunk in pinned.chunks)

    @precondition(lambda self: self.askers)
    @rule(pick=picks)
    def preempt(self, pick: int) -> None:
        """Look the request up again; hits reported in this round stay valid."""
        asker = _pick(self.askers, pick)
        self.core.restart(asker.request)
        asker.since_s, asker.expired = None, False

    @precondition(lambda self: self.askers)
    @rule(pick=picks)
    def close(self, pick: int) -> None:
        asker = _take(self.askers, pick)
        self.core.close(asker.request, self.now_s)

    @rule(prompt=prompts, start=st.sampled_from([0, 0, 2, 5]), length=lengths, at_once=st.booleans())
    def store(self, prompt: list[OffloadKey], start: int, length: int, at_once: bool) -> None:
        if self._reserve(prompt, start, length) and at_once:
            self._commit(*self.reservations.pop())

    @precondition(lambda self: self.askers)
    @rule(pick=picks, at_once=st.booleans())
    def store_computed(self, pick: int, at_once: bool) -> None:
        """Store the prompt that a request has computed."""
        asker = _pick(self.askers, pick)
        if self._reserve(asker.keys, 0, len(asker.keys), asker.request) and at_once:
            self._commit(*self.reservations.pop())

    def _reserve(
        self, prompt: list[OffloadKey], start: int, length: int, request: Request | None = None
    ) -> bool:
        offered = prompt[start : start + length]
        there = {key for key in offered if key in self.core.table.visible}
        reservation = self.core.reserve(offered, request)
        if reservation is None:
            return False
        new = [key for key in offered if key not in there]
        assert list(reservation.keys) == new[: len(reservation.keys)], "a prefix of what is new"
        assert there <= self.core.table.visible.keys(), "what a store continues is not evicted for it"
        for slot in reservation.slots:
            self._write(slot, reservation)
        self.reservations.append((reservation, self.epoch))
        return True

    @precondition(lambda self: self.reservations)
    @rule(pick=picks)
    def commit(self, pick: int) -> None:
        self._commit(*_take(self.reservations, pick))

    def _commit(self, reservation: Reservation, epoch: int) -> None:
        for key, slot in zip(reservation.keys, reservation.slots, strict=True):
            self._end_writing(slot, reservation, (key, epoch))
        self.core.commit(reservation, self.now_s)
        self._take_commands()

    @precondition(lambda self: self.reservations)
    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        reservation, _ = _take(self.reservations, pick)
        for slot in reservation.slots:
            self._end_writing(slot, reservation, GARBAGE)
        self.core.abort(reservation)

    @rule(step_s=steps_s)
    def settle(self, step_s: float) -> None:
        self.now_s += step_s
        self.core.settle(self.now_s)
        for asker in self.askers:
            self._end_round(asker)
        for tier, gate in enumerate(self.core.shared.tiers):
            begun_s = [job.begun_s for job in self.jobs if job.command.tier == tier]
            overdue = sum(when + TIER_DEADLINE_S <= self.now_s for when in begun_s)
            assert gate.puts.overdue + gate.gets.overdue == overdue
        self._take_commands()

    def _end_round(self, asker: Asker) -> None:
        if asker.scan is not None:
            if any(answer not in FINAL for answer in asker.scan.values()):
                asker.since_s = self.now_s if asker.since_s is None else asker.since_s
            elif not asker.expired:
                asker.since_s = None
        asker.scan = None
        if asker.since_s is not None and self.now_s >= asker.since_s + asker.patience_s:
            asker.expired = True
            assert asker.request.state is RequestState.EXPIRED
            assert not asker.request.held

    @rule(name=st.sampled_from("ab"))
    def release_claim(self, name: str) -> None:
        """Let a client release its conversation's chunks."""
        self.core.claims.release(name)

    @rule(place=st.sampled_from([0, 3, 20]), chunk_s=st.sampled_from([0.0001, 0.01, 10.0]))
    def compute(self, place: int, chunk_s: float) -> None:
        self.core.note_computed(place, 1, chunk_s)

    @rule(pick=picks)
    def reset(self, pick: int) -> None:
        if pick % 8:  # rarely: soon after a reset there are few hits
            return
        self.epoch += 1
        self.confirmed.clear()
        self.core.reset()
        assert self.core.epoch == self.epoch
        for asker in self.askers:
            asker.scan = None
        self._take_commands()
        probe = Request()
        assert all(self.core.lookup(key, probe) is not Lookup.HIT for key in KEYS)
        self.core.close(probe)

    @precondition(lambda self: len(self.core.table.all) < 30)
    @rule(count=st.integers(1, 4))
    def more_slots(self, count: int) -> None:
        first = len(self.core.table.all)
        self.core.on_event(SlotsReady(range(first, first + count)), self.now_s)

    # --- what tiers do ---------------------------------------------------------------------------

    @precondition(lambda self: any(isinstance(job.command, Put) for job in self.jobs))
    @rule(pick=picks, kept=st.integers(0, 30).map(_kept), health=healths, took_s=tooks_s)
    def put_ends(self, pick: int, kept: list[bool], health: TransferHealth, took_s: float) -> None:
        job = _pick([job for job in self.jobs if isinstance(job.command, Put)], pick)
        self._end_put(job, kept, health, took_s)

    @precondition(lambda self: any(isinstance(job.command, Get) for job in self.jobs))
    @rule(pick=picks, answers=wishes, health=healths, took_s=tooks_s)
    def fetch_ends(self, pick: int, answers: list[Answer], health: TransferHealth, took_s: float) -> None:
        """End a get with all the tier has, or less: any mix that the contract allows."""
        job = _pick([job for job in self.jobs if isinstance(job.command, Get)], pick)
        self._end_fetch(job, answers, health, took_s)

    @precondition(lambda self: self.stored)
    @rule(pick=picks)
    def tier_down(self, pick: int) -> None:
        if pick % 8 == 0:  # rarely: a machine whose tiers are all down tests little
            self.core.on_event(TierDown(pick // 8 % len(self.stored), "test"), self.now_s)

    @precondition(lambda self: any(gate.down for gate in self.core.shared.tiers))
    @rule(pick=picks)
    def tier_up(self, pick: int) -> None:
        down = [tier for tier, gate in enumerate(self.core.shared.tiers) if gate.down]
        self.core.on_event(TierUp(_pick(down, pick), self.epoch), self.now_s)

    @precondition(lambda self: self.stored)
    @rule(pick=picks, gone=st.sets(st.sampled_from(KEYS), max_size=6), told=st.booleans())
    def tier_evicts(self, pick: int, gone: set[OffloadKey], told: bool) -> None:
        """Remove chunks from a tier, which reports it at once or later."""
        tier = pick % len(self.stored)
        self.untold[tier] |= gone & self.stored[tier]
        self.stored[tier] -= gone
        if told:
            self.tier_tells(pick)

    @precondition(lambda self: any(self.untold))
    @rule(pick=picks)
    def tier_tells(self, pick: int) -> None:
        tier = pick % len(self.stored)
        keys, self.untold[tier] = sorted(self.untold[tier]), set()
        self.core.on_event(Removed(tier, keys), self.now_s)

    @precondition(lambda self: any(isinstance(job.command, Put) for job in self.jobs))
    @rule(pick=picks)
    def put_writes(self, pick: int) -> None:
        """Let a tier have the chunks of a put, which it may lose again before the put ends."""
        job = _pick([job for job in self.jobs if isinstance(job.command, Put)], pick)
        if job.epoch == self.epoch and not job.is_written:
            job.is_written = True
            self.stored[job.command.tier].update(job.command.keys)

    @rule(prompt=prompts, pick=picks)
    def tier_had_it_before(self, prompt: list[OffloadKey], pick: int) -> None:
        """Let another engine put chunks of a prompt into a tier."""
        if self.stored:
            _pick(self.stored, pick).update(prompt[: pick % 13])

    def _end_put(
        self, job: Job, kept: list[bool], health: TransferHealth = TransferHealth.GOOD, took_s: float = 0.001
    ) -> None:
        self.jobs.remove(job)
        command = job.command
        for key, slot in zip(command.keys, command.slots, strict=True):
            assert self.contents[slot] == (key, job.epoch), "what is being put stays as it was"
        self._end_reading(command.slots)
        kept = kept[: len(command.keys)]
        if job.epoch == self.epoch:
            self.confirmed.update(key for key, ok in zip(command.keys, kept, strict=True) if ok)
        if job.epoch == self.epoch and not job.is_written:
            self.stored[command.tier].update(key for key, ok in zip(command.keys, kept, strict=True) if ok)
        event = PutEnded(command.id, kept, {"error": kept.count(False)}, took_s, health, "helped")
        self.core.on_event(event, self.now_s)
        self._take_commands()

    def _end_fetch(
        self,
        job: Job,
        wishes: list[Answer],
        health: TransferHealth = TransferHealth.GOOD,
        took_s: float = 0.001,
    ) -> None:
        assert isinstance(job.command, Get)
        self.jobs.remove(job)
        command, answers = job.command, []
        for index, key in enumerate(command.keys):
            is_there = key in job.stored or self._is_in_place(command)
            answer = wishes[index] if is_there else Answer.MISSING
            if index < len(command.slots):
                landed = answer is Answer.COPIED
                self._end_writing(command.slots[index], job, (key, job.epoch) if landed else GARBAGE)
            elif answer is Answer.COPIED:
                answer = Answer.LOCATED
            if answer is Answer.COPIED and job.epoch == self.epoch:
                self.confirmed.add(key)
            answers.append(answer)
        event = GetEnded(command.id, answers, {"error": 1}, took_s, health, "no_time", took_s)
        self.core.on_event(event, self.now_s)
        self._take_commands()

    def _take_commands(self) -> None:
        for command in self.core.take_commands():
            if isinstance(command, Reset):
                assert command.epoch == self.epoch
                self.stored[command.tier].clear()
                self.untold[command.tier].clear()
                continue
            if isinstance(command, Touch):
                assert self.core.shared.tiers[command.tier].works
                continue
            self._require_given_work(command)
            job = Job(command, self.now_s, self.epoch, frozenset(self.stored[command.tier]))
            self.jobs.append(job)
            assert len(set(command.keys)) == len(command.keys)
            if isinstance(command, Put):
                for key, slot in zip(command.keys, command.slots, strict=True):
                    self._require_bytes(slot, key)
                self._read(command.slots)
            else:
                assert len(command.slots) <= len(command.keys)
                self._require_wanted(command)
                if self._is_in_place(command):
                    for key, slot in zip(command.keys, command.slots, strict=False):
                        self._require_bytes(slot, key)
                for slot in command.slots:
                    self._write(slot, job)

    def _is_in_place(self, command: Put | Get) -> bool:
        return self.core.shared.tiers[command.tier].in_place

    def _require_given_work(self, command: Put | Get) -> None:
        """Assert that a tier that is down gets no work, and a failing one gets one transfer per verb at a
        time."""
        gate = self.core.shared.tiers[command.tier]
        assert gate.down is None
        breaker = gate.puts if isinstance(command, Put) else gate.gets
        assert not breaker.overdue
        assert breaker.state is BreakerState.CLOSED or breaker.probe == command.id
        if breaker.probe == command.id and isinstance(command, Put):
            assert len(command.keys) == 1

    def _require_wanted(self, command: Get) -> None:
        """Assert that a tier is asked for a request only if it may serve the request."""
        transfer = self.core.shared.transfers[command.id]
        assert transfer.waiters or transfer.is_probe, "a probe of the load gate only measures"
        assert all(request.tiers is None or command.tier in request.tiers for request in transfer.waiters)

    # --- the slots -------------------------------------------------------------------------------

    def _require_bytes(self, slot: int, key: OffloadKey) -> None:
        assert slot not in self.writers
        assert self.contents[slot] == (key, self.epoch)

    def _write(self, slot: int, writer: object) -> None:
        assert slot not in self.writers, "one writer at a time"
        assert not self.readers.get(slot), "nobody reads what is written"
        self.writers[slot] = writer
        self.contents[slot] = GARBAGE

    def _end_writing(self, slot: int, writer: object, content: Bytes) -> None:
        assert self.writers.pop(slot) is writer
        self.contents[slot] = content

    def _read(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.readers[slot] = self.readers.get(slot, 0) + 1

    def _end_reading(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.readers[slot] -= 1

    # --- invariants ------------------------------------------------------------------------------

    @invariant()
    def is_consistent(self) -> None:
        invariants.check(self.core)

    @invariant()
    def keeps_the_budget(self) -> None:
        assert len(self.core.holds.promoting) <= self.core.holds.budget

    @invariant()
    def puts_leave_slots_to_others(self) -> None:
        core, tiers = self.core, len(self.core.shared.tiers)
        held = {chunk for job in self.core.shared.transfers.values() if job.is_put for chunk in job.chunks}
        most = max(1, int(len(core.table.all) * core.shared.limits.put_backlog))
        assert len(held) <= most + max(0, tiers - 1) * max(1, most // max(1, tiers))

    @invariant()
    def counts_what_metrics_are_declared_for(self) -> None:
        for what, *labels in self.core.take_counts():
            metric = COUNTERS[what]
            assert len(labels) == len(metric.labels)
            if "reason" in metric.labels:
                assert labels[-1] in metric.reasons

    @invariant()
    def announces_what_is_there(self) -> None:
        for change in self.core.shared.kv_events.take_events():
            believed = self.announced if change.tier is None else self.believed[change.tier]
            if change.removed:
                assert believed.issuperset(change.keys), "what was not announced is not taken back"
                believed.difference_update(change.keys)
            else:
                assert believed.isdisjoint(change.keys), "nothing is announced twice"
                believed.update(change.keys)
        for tier, gate in enumerate(self.core.shared.tiers):
            assert self.believed[tier] <= self.stored[tier] | self.untold[tier], "never more than there is"
            assert len(self.believed[tier]) <= self.core.shared.limits.max_announced
            assert not (gate.down and self.believed[tier])
        visible = self.core.table.visible.items()
        assert self.announced == {key for key, chunk in visible if chunk.state is ChunkState.READY}

    @invariant()
    def a_deadline_is_set_where_something_waits(self) -> None:
        waits = any(asker.request.state is RequestState.WAITING for asker in self.askers)
        assert not waits or self.core.next_deadline_s() is not None

    def teardown(self) -> None:
        """End everything; then nothing is pinned, and no slot is lost."""
        if not hasattr(self, "core"):
            return
        while self.loads:
            self.release(0)
        while self.reservations:
            self.abort(0)
        while self.askers:
            self.close(0)
        for name in "ab":
            self.core.claims.release(name)
        self.settle(0.0)
        while self.jobs:
            job = self.jobs[0]
            if isinstance(job.command, Put):
                self._end_put(job, [True] * 30)
            else:
                self._end_fetch(job, [Answer.COPIED] * 30)
            self.settle(0.0)  # some puts wait for an end
        table = self.core.table
        invariants.check(self.core)
        assert self.core.is_idle
        assert self.core.claims.is_empty
        assert self.core.next_deadline_s() is None
        assert not self.core.holds.promoting
        assert sum(chunk.pins for chunk in table.all) == 0
        assert table.room + len(table.visible) == len(table.all)
        assert table.evictable == len(table.visible)


def _pick(items: list[T], pick: int) -> T:
    return items[pick % len(items)]


def _take(items: list[T], pick: int) -> T:
    return items.pop(pick % len(items))


TestCore = pytest.mark.timeout(400)(CoreMachine.TestCase)
TestCore.settings = settings(
    max_examples=effort(120, 1200),
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
