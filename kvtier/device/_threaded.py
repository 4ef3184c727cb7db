"""Lanes: a thread for each direction of copies, the part of an engine that all backends share."""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

from kvtier.device._audit import Auditor, Check
from kvtier.device.base import DEADLINE_S, Attempt, Audits, Blocks, Finished, KVCaches, TransferEngine
from kvtier.device.copies import CopyTable
from kvtier.device.plan import CopyPlan, CopyPlanner
from kvtier.errors import (
    AuditError,
    ConfigError,
    DamagedSlotError,
    DeviceLostError,
    DeviceStuckError,
    StateError,
)
from kvtier.memory.layout import SlotLayout
from kvtier.memory.region import Region
from kvtier.memory.slot_checksums import SlotChecksums

logger = logging.getLogger("kvtier.device")

T = TypeVar("T")

LOST_AFTER = 5
"""So many transfers in a row that fail in every way, in all lanes together, mean a lost device."""

_LOOKS = 8
"""So often a copy is looked at before it is given up: a process that was stopped for long, and with it the
copy, has missed one look and not its deadline."""

_left_behind: list[object] = []
"""Memory that copies which were given up may still write to: it stays mapped for the rest of the process."""

Finish = Callable[[], float]
"""Waits for the end of a transfer's copies; returns the seconds they took. When it raises, they are over."""

Begin = Callable[[Attempt], Finish]
"""Begins with the copies of one transfer, in a lane's thread. None is under way when it raises. It is called
again for the next attempt when it or what it has returned has raised."""

Prepare = Callable[[CopyPlan], Begin]
"""Takes a plan in the submitting thread, where the order against the caller's own work is known."""


class CopyQueue(StrEnum):
    """The lanes; the value is the name of the thread."""

    STORE = "kvtier-store"
    LOAD = "kvtier-load"
    EXPEDITED = "kvtier-expedited"


def require_device(kv_caches: KVCaches, name: str) -> None:
    """Raise ConfigError unless all tensors are on devices of the type ``name``."""
    types = {tensor.device.type for tensor in kv_caches.tensors}
    if types - {name}:
        raise ConfigError(f"the device backend {name!r} cannot copy tensors on {', '.join(sorted(types))}")


_PLAIN = (Attempt.FIRST, Attempt.RETRY)
_WITH_STAGED = (*_PLAIN, Attempt.STAGED)


class ThreadedEngine(TransferEngine):
    """Runs transfers in three lanes: stores, loads and expedited loads.

    A lane's thread starts with the first transfer that needs it. Backends subclass this and say how
    a lane copies.

    Args:
        kv_caches: tensors on the backend's device.
        layout: where the pages lie in a slot.
        region: the slots; it stays mapped until ``close``.
        open_queue: called once for each lane.
        piece_slots: no copy crosses a multiple of so many slots; None where that does not matter.
        at_once: how many transfers a lane has begun at a time. With two the device goes on with the next
            one while the host hears of the last.
        deadline_s: seconds after which a copy that has not ended is given up, and the device with it. It
            is noticed within a quarter more.

    Raises:
        ValueError: region, layout and tensors do not fit each other.
    """

    def __init__(
        self,
        kv_caches: KVCaches,
        layout: SlotLayout,
        region: Region,
        open_queue: Callable[[CopyQueue], Prepare],
        piece_slots: int | None = None,
        at_once: int = 1,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        if layout.chunk_bytes != region.chunk_bytes:
            raise ValueError(f"slots have {region.chunk_bytes} bytes, but the layout {layout.chunk_bytes}")
        self._planner = CopyPlanner(kv_caches, layout, region.address, region.slots, piece_slots)
        self._layout = layout
        self._address = region.address
        self._auditor: Auditor | None = None
        self._memory: tuple[object, ...] = (kv_caches, region.view(0))  # keeps what the copies touch mapped
        self._copies = CopyTable()
        self._closed = False
        self._submitting = threading.Lock()  # so that nothing is submitted behind the end of the lanes
        health = _Health()
        busy = threading.Event()
        self._queues = {
            way: _QueueThread(way, open_queue(way), at_once, self._copies, health, busy) for way in CopyQueue
        }
        self._watch = _Watch(tuple(self._queues.values()), deadline_s, busy)

    def submit_store(self, transfer_id: int, blocks: Blocks, slots: Sequence[int]) -> None:
        """See ``TransferEngine.submit_store``."""
        plan = self._planner.store(blocks, slots)
        check = self._auditor.of_store(transfer_id, blocks, slots) if self._auditor else None
        self._submit(CopyQueue.STORE, transfer_id, plan, _PLAIN, check)

    def submit_load(
        self, transfer_id: int, slots: Sequence[int], blocks: Blocks, *, expedited: bool = False
    ) -> None:
        """See ``TransferEngine.submit_load``."""
        way = CopyQueue.EXPEDITED if expedited else CopyQueue.LOAD
        attempts = _WITH_STAGED if self.stages_loads or expedited else _PLAIN
        plan = self._planner.load(slots, blocks)
        check = self._auditor.of_load(transfer_id, slots, blocks) if self._auditor else None
        self._submit(way, transfer_id, plan, attempts, check)

    def begin_audits(self, slot_checksums: SlotChecksums) -> None:
        """See ``TransferEngine.begin_audits``."""
        self._auditor = Auditor(slot_checksums, self._planner, self._layout, self._address, self.read)

    @property
    def audits(self) -> Audits:
        """See ``TransferEngine.audits``."""
        return self._auditor.audits if self._auditor is not None else Audits()

    @abstractmethod
    def read(self, plan: CopyPlan) -> None:
        """Copy from the device to any memory of this process, in the plainest way; return at the end of it.

        Called in a lane's thread, when the work on what is read is over.
        """

    def finished(self) -> list[Finished]:
        """See ``TransferEngine.finished``."""
        return self._copies.take()

    def wait(self, transfer_ids: Iterable[int]) -> None:
        """See ``TransferEngine.wait``."""
        self._copies.wait(transfer_ids)

    def drain(self) -> None:
        """See ``TransferEngine.drain``."""
        self._copies.drain()

    def set_wakeup(self, wakeup: Callable[[], object] | None) -> None:
        """See ``TransferEngine.set_wakeup``."""
        self._copies.set_wakeup(wakeup)

    @property
    def is_stuck(self) -> bool:
        """Whether a copy was given up: its bytes may still move."""
        return any(lane.is_stuck for lane in self._queues.values())

    def close(self) -> None:
        """See ``TransferEngine.close``."""
        with self._submitting:
            self._closed = True
        self.drain()
        for lane in self._queues.values():
            lane.stop()
        self._watch.stop()
        if self.is_stuck:
            _left_behind.append(self._memory)
        self._memory = ()

    def _submit(
        self,
        way: CopyQueue,
        transfer_id: int,
        plan: CopyPlan,
        attempts: tuple[Attempt, ...],
        check: Check | None,
    ) -> None:
        with self._submitting:
            if self._closed:
                raise StateError("the transfer engine is closed")
            self._watch.start()
            self._queues[way].submit(transfer_id, plan, attempts, check)


class _Health:
    """Whether the device still works, as far as the copies tell. Shared by all lanes."""

    def __init__(self) -> None:
        self.lost: DeviceLostError | None = None
        self._failures = 0

    def worked(self) -> None:
        self._failures = 0

    def failed(self, error: BaseException) -> BaseException:
        """Take note of a transfer that failed for good; return what to report."""
        if isinstance(error, AuditError):
            return self.lost or error  # the device has done as it was told
        self._failures += 1
        if isinstance(error, DeviceLostError):
            self.lose(error)
        elif self._failures >= LOST_AFTER:
            self.lose(DeviceLostError(f"{self._failures} transfers in a row failed, the last with: {error}"))
        return self.lost or error

    def lose(self, error: DeviceLostError) -> DeviceLostError:
        """Give the device up, unless it was before; return the error that it was given up for."""
        if self.lost is None:
            self.lost = error
            logger.error("the device is given up, nothing is copied from or to it any more: %s", error)
        return self.lost


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    transfer_id: int
    nbytes: int
    begin: Begin
    attempts: tuple[Attempt, ...]
    check: Check | None

    def failed(self, error: BaseException, attempt: Attempt | None = None) -> Finished:
        return Finished(self.transfer_id, self.nbytes, 0.0, error, attempt)


class _QueueThread:
    """A thread that makes transfers in order; it starts with the first one.

    Attributes:
        is_stuck: whether a transfer was given up. The thread reports nothing any more, and may never end.
    """

    def __init__(
        self,
        name: str,
        prepare: Prepare,
        at_once: int,
        copies: CopyTable,
        health: _Health,
        busy: threading.Event,
    ) -> None:
        self.is_stuck = False
        self._name = name
        self._prepare = prepare
        self._at_once = at_once
        self._begun: deque[_Job] = deque()
        self._outcomes: deque[Finish | BaseException | None] = deque()  # of their first attempts
        self._copies = copies
        self._health = health
        self._busy = busy
        self._lock = threading.Lock()  # of what is begun and queued, for the moment a copy is given up
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(
        self, transfer_id: int, plan: CopyPlan, attempts: tuple[Attempt, ...], check: Check | None
    ) -> None:
        self._copies.begin(transfer_id)
        try:
            begin = self._prepare(plan)
        except Exception as error:  # a device that has failed must not fail the caller's own work
            begin = partial(_raise, error)
        job = _Job(transfer_id, plan.nbytes, begin, attempts, check)
        with self._lock:
            is_stuck = self.is_stuck
            if not is_stuck:
                self._jobs.put(job)
        if is_stuck:
            assert self._health.lost is not None
            self._copies.end(job.failed(self._health.lost))
        elif self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()

    @property
    def oldest(self) -> _Job | None:
        """What the thread has begun and waits for, or would wait for next."""
        with self._lock:
            return self._begun[0] if self._begun else None

    def stop(self) -> None:
        """End the thread after the jobs it was given. One that is stuck is left to itself."""
        if self._thread is not None and not self.is_stuck:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def give_up(self, job: _Job, deadline_s: float) -> None:
        """Report ``job``, which the thread is stuck with, and all that come after it."""
        with self._lock:
            if not self._begun or self._begun[0] is not job:
                return
            self.is_stuck = True
            begun, behind = list(self._begun), _empty(self._jobs)
        text = f"a copy of {job.nbytes} bytes has not ended within {deadline_s:g} s ({self._name})"
        lost = self._health.lose(DeviceLostError(text))
        for moving in begun:
            self._copies.end(moving.failed(DeviceStuckError(text)))
        for waiting in behind:
            self._copies.end(waiting.failed(lost))

    def _work(self) -> None:
        is_ending = False
        while self._begun or not is_ending:
            if not is_ending and self._may_begin():
                try:
                    job = self._jobs.get(block=not self._begun)
                except Empty:
                    pass
                else:
                    is_ending = job is None or not self._begin(job)
                    del job  # or the last plan stays in memory while the thread waits
                    continue
            if not self._end_oldest():
                return

    def _may_begin(self) -> bool:
        """A transfer that is to be repeated keeps its place: what comes after it has to wait."""
        is_repeated = bool(self._outcomes) and isinstance(self._outcomes[-1], BaseException)
        return len(self._begun) < self._at_once and not is_repeated

    def _begin(self, job: _Job) -> bool:
        """Make the first attempt; say whether to go on."""
        with self._lock:
            if self.is_stuck:
                return False
            self._begun.append(job)
        self._busy.set()
        is_lost = self._health.lost is not None
        self._outcomes.append(None if is_lost else _try(partial(job.begin, job.attempts[0])))
        return True

    def _end_oldest(self) -> bool:
        """Wait for the first of those begun and report it; say whether to go on."""
        finished = self._finish(self._begun[0], self._outcomes.popleft())
        with self._lock:
            if self.is_stuck:
                return False  # too late: others were told that it has not ended
            self._begun.popleft()
        self._copies.end(finished)
        return True

    def _finish(self, job: _Job, begun: Finish | BaseException | None) -> Finished:
        if begun is None:
            assert self._health.lost is not None
            return job.failed(self._health.lost)
        for attempt in job.attempts:
            if attempt is not job.attempts[0]:
                begun = _try(partial(job.begin, attempt))
            ended = begun if isinstance(begun, BaseException) else _try(partial(_end, begun, job.check))
            if not isinstance(ended, BaseException):
                self._health.worked()
                return Finished(job.transfer_id, job.nbytes, ended, None, attempt)
            if attempt is job.attempts[-1] or isinstance(ended, DamagedSlotError):
                return job.failed(self._health.failed(ended), attempt)
            logger.warning("transfer %d failed and is repeated: %s", job.transfer_id, ended)
        raise AssertionError("a transfer has one attempt at least")


class _Watch:
    """A thread that gives copies up which do not end. It sleeps while nothing is copied.

    Args:
        lanes: whose copies.
        deadline_s: how long one may take, all its attempts together.
        busy: set by a lane that begins with a copy.
    """

    def __init__(self, lanes: Sequence[_QueueThread], deadline_s: float, busy: threading.Event) -> None:
        self._deadline_s = deadline_s
        self._seen = {lane: _Seen() for lane in lanes}
        self._busy = busy
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="kvtier-watch", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._busy.set()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while not self._stopping.is_set():
            self._busy.wait()
            self._busy.clear()  # before looking, so that what begins meanwhile is not overlooked
            while any(lane.oldest and not lane.is_stuck for lane in self._seen):
                if self._stopping.wait(self._deadline_s / _LOOKS):
                    return
                self._look()

    def _look(self) -> None:
        for lane, seen in self._seen.items():
            job = lane.oldest
            seen.looks = seen.looks + 1 if job is seen.job else 0
            seen.job = job
            if job is not None and seen.looks >= _LOOKS and not lane.is_stuck:
                lane.give_up(job, self._deadline_s)


@dataclass(slots=True)
class _Seen:
    """The oldest job of a lane at the last look, and at how many looks before that it was so."""

    job: _Job | None = None
    looks: int = 0


def _empty(queue: SimpleQueue[_Job | None]) -> list[_Job]:
    jobs: list[_Job] = []
    while True:
        try:
            job = queue.get_nowait()
        except Empty:
            return jobs
        if job is not None:
            jobs.append(job)


def _end(finish: Finish, check: Check | None) -> float:
    seconds = finish()
    if check is not None:
        check()
    return seconds


def _try(work: Callable[[], T]) -> T | BaseException:
    try:
        return work()
    except BaseException as error:  # the thread must live, whatever a copy raises
        return error


def _raise(error: Exception, attempt: Attempt) -> Finish:  # noqa: ARG001
    raise error
