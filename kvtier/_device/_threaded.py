"""The engine that all backends share: three queues of transfers, with one thread each."""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch

from kvtier._device._audit import Auditor, Check
from kvtier._device.base import (
    DEADLINE_S,
    Attempt,
    Audits,
    Blocks,
    CopyQueue,
    Finished,
    KVCaches,
    TransferEngine,
)
from kvtier._device.plan import CopyPlan, CopyPlanner
from kvtier._memory.layout import SlotLayout
from kvtier._memory.region import Region
from kvtier._memory.slot_checksums import SlotChecksums
from kvtier.errors import (
    AuditError,
    ConfigError,
    DamagedSlotError,
    DeviceLostError,
    DeviceStuckError,
    StateError,
)

logger = logging.getLogger("kvtier.device")

T = TypeVar("T")

LOST_AFTER = 5
"""So many transfers in a row that fail in every way, in all queues together, mean a lost device."""

_LOOKS = 8
"""The watchdog looks so often at a copy before it abandons it: a process that was stopped for long, and with
it the copy, has missed one look and not its deadline."""

_abandoned: list[object] = []
"""Memory that abandoned copies may still write to: it stays mapped for the rest of the process."""

Finish = Callable[[], float]
"""Waits for the end of a transfer's copies; returns the seconds they took. When it raises, they are over."""

Begin = Callable[[Attempt], Finish]
"""Begins the copies of one transfer, in the thread of its queue. None is in flight when it raises. It is
called again for the next attempt when it or what it has returned has raised."""

Prepare = Callable[[CopyPlan], Begin]
"""Takes a plan in the submitting thread, where the order against the caller's own work is known."""


def only_device(kv_caches: KVCaches, kind: str) -> torch.device:
    """Return the device that all tensors are on.

    Raises:
        ConfigError: they are on several devices, or on one of another type than ``kind``.
    """
    devices = {tensor.device for tensor in kv_caches.tensors}
    if others := {device.type for device in devices} - {kind}:
        raise ConfigError(f"the device backend {kind!r} cannot copy tensors on {', '.join(sorted(others))}")
    if len(devices) != 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ConfigError(f"the KV cache of one worker is on several GPUs ({names}); one is possible")
    return devices.pop()


_PLAIN = (Attempt.FIRST, Attempt.RETRY)
_WITH_STAGED = (*_PLAIN, Attempt.STAGED)


class ThreadedEngine(TransferEngine):
    """Runs transfers in three queues: stores, loads and expedited loads.

    The thread of a queue starts with its first transfer. Backends subclass this and define how it copies.

    Args:
        kv_caches: tensors on the backend's device.
        layout: where the pages lie in a slot.
        region: the slots; it stays mapped until ``close``.
        open_queue: called once for each queue.
        piece_slots: no copy crosses a multiple of so many slots; None where that does not matter.
        at_once: how many transfers a queue has begun at a time. With two the device continues with the next
            one while the host learns that the last has ended.
        deadline_s: seconds after which a copy that has not ended is abandoned, and the device with it. This
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
        self._transfers = _TransferTable()
        self._closed = False
        self._submitting = threading.Lock()  # so that nothing is submitted behind the end of the queues
        health = _Health()
        busy = threading.Event()
        self._queues = {
            queue: _QueueThread(queue, open_queue(queue), at_once, self._transfers, health, busy)
            for queue in CopyQueue
        }
        self._watchdog = _Watchdog(tuple(self._queues.values()), deadline_s, busy)

    def submit_store(self, transfer_id: int, blocks: Blocks, slots: Sequence[int]) -> None:
        plan = self._planner.store(blocks, slots)
        check = self._auditor.of_store(transfer_id, blocks, slots) if self._auditor else None
        self._submit(CopyQueue.STORE, transfer_id, plan, _PLAIN, check)

    def submit_load(
        self, transfer_id: int, slots: Sequence[int], blocks: Blocks, *, expedited: bool = False
    ) -> None:
        queue = CopyQueue.EXPEDITED if expedited else CopyQueue.LOAD
        attempts = _WITH_STAGED if self.stages_loads or expedited else _PLAIN
        plan = self._planner.load(slots, blocks)
        check = self._auditor.of_load(transfer_id, slots, blocks) if self._auditor else None
        self._submit(queue, transfer_id, plan, attempts, check)

    def begin_audits(self, slot_checksums: SlotChecksums) -> None:
        self._auditor = Auditor(slot_checksums, self._planner, self._layout, self._address, self.read)

    @property
    def audits(self) -> Audits:
        return self._auditor.audits if self._auditor is not None else Audits()

    @abstractmethod
    def read(self, plan: CopyPlan) -> None:
        """Copy from the device to any memory of this process, in the plainest way; return at the end of it.

        Called in the thread of a queue, when the work on what is read is over.
        """

    def finished(self) -> list[Finished]:
        return self._transfers.take()

    def wait(self, transfer_ids: Iterable[int]) -> None:
        self._transfers.wait(transfer_ids)

    def drain(self) -> None:
        self._transfers.drain()

    def set_wakeup(self, wakeup: Callable[[], object] | None) -> None:
        self._transfers.set_wakeup(wakeup)

    @property
    def is_stuck(self) -> bool:
        """Whether a copy was abandoned: its bytes may still move."""
        return any(queue.is_stuck for queue in self._queues.values())

    def close(self) -> None:
        with self._submitting:
            self._closed = True
        self.drain()
        for queue in self._queues.values():
            queue.stop()
        self._watchdog.stop()
        if self.is_stuck:
            _abandoned.append(self._memory)
        self._memory = ()

    def _submit(
        self,
        queue: CopyQueue,
        transfer_id: int,
        plan: CopyPlan,
        attempts: tuple[Attempt, ...],
        check: Check | None,
    ) -> None:
        with self._submitting:
            if self._closed:
                raise StateError("the transfer engine is closed")
            self._watchdog.start()
            self._queues[queue].submit(transfer_id, plan, attempts, check)


class _TransferTable:
    """The copies in flight and those that have ended; thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._in_flight: set[int] = set()
        self._ended: list[Finished] = []
        self._wakeup: Callable[[], object] | None = None

    def begin(self, transfer_id: int) -> None:
        """Record a transfer. Raise ValueError when one of that id is in flight."""
        with self._changed:
            if transfer_id in self._in_flight:
                raise ValueError(f"transfer {transfer_id} is in flight already")
            self._in_flight.add(transfer_id)

    def end(self, result: Finished) -> None:
        """Record how a transfer ended, and wake those who wait for it."""
        with self._changed:
            self._in_flight.discard(result.transfer_id)
            self._ended.append(result)
            self._changed.notify_all()
            wakeup = self._wakeup
        if wakeup is not None:
            try:
                wakeup()
            except Exception:  # a closed event loop, say; copies must go on
                logger.exception("the wake-up after transfer %d failed", result.transfer_id)

    def take(self) -> list[Finished]:
        """Return what ended since the last call, in the order of the ends."""
        with self._changed:
            ended, self._ended = self._ended, []
        return ended

    def wait(self, transfer_ids: Iterable[int]) -> None:
        """Block until none of these is in flight."""
        awaited = frozenset(transfer_ids)
        with self._changed:
            self._changed.wait_for(lambda: self._in_flight.isdisjoint(awaited))

    def drain(self) -> None:
        """Block until none of those is in flight that are now."""
        with self._changed:
            awaited = frozenset(self._in_flight)
        self.wait(awaited)

    def set_wakeup(self, wakeup: Callable[[], object] | None) -> None:
        """Call ``wakeup`` after each end, in the thread that reports it; and now, if some are untaken."""
        with self._changed:
            self._wakeup = wakeup
            waiting = bool(self._ended)
        if waiting and wakeup is not None:
            wakeup()


class _Health:
    """Whether the device still works, as far as the copies show. Shared by all queues."""

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
        """Disable the device, unless it is lost already; return the error that it was lost for."""
        if self.lost is None:
            self.lost = error
            logger.error("device disabled until the engine restarts (%s)", error)
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
        is_stuck: whether a transfer was abandoned. The thread reports nothing any more, and may never end.
    """

    def __init__(
        self,
        name: str,
        prepare: Prepare,
        at_once: int,
        transfers: _TransferTable,
        health: _Health,
        busy: threading.Event,
    ) -> None:
        self.is_stuck = False
        self._name = name
        self._prepare = prepare
        self._at_once = at_once
        self._begun: deque[_Job] = deque()
        self._outcomes: deque[Finish | BaseException | None] = deque()  # of their first attempts
        self._transfers = transfers
        self._health = health
        self._busy = busy
        self._lock = threading.Lock()  # of what is begun and queued, for the moment a copy is abandoned
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(
        self, transfer_id: int, plan: CopyPlan, attempts: tuple[Attempt, ...], check: Check | None
    ) -> None:
        self._transfers.begin(transfer_id)
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
            self._transfers.end(job.failed(self._health.lost))
        elif self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()

    @property
    def oldest(self) -> _Job | None:
        """What the thread has begun and waits for, or would wait for next."""
        with self._lock:
            return self._begun[0] if self._begun else None

    def stop(self) -> None:
        """End the thread after the jobs it was given. One that is stuck is left alone."""
        if self._thread is not None and not self.is_stuck:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def abandon(self, job: _Job, deadline_s: float) -> None:
        """Report ``job``, which the thread is stuck with, and all that come after it."""
        with self._lock:
            if not self._begun or self._begun[0] is not job:
                return
            self.is_stuck = True
            text = f"a copy of {job.nbytes} bytes has not ended within {deadline_s:g} s ({self._name})"
            lost = self._health.lose(DeviceLostError(text))
            begun, queued = list(self._begun), _take_all(self._jobs)
        for moving in begun:
            self._transfers.end(moving.failed(DeviceStuckError(text)))
        for waiting in queued:
            self._transfers.end(waiting.failed(lost))

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
        """Return whether the next transfer may begin: one that is to be repeated keeps its place."""
        is_repeated = bool(self._outcomes) and isinstance(self._outcomes[-1], BaseException)
        return len(self._begun) < self._at_once and not is_repeated

    def _begin(self, job: _Job) -> bool:
        """Make the first attempt; return whether to go on."""
        with self._lock:
            is_stuck = self.is_stuck
            if not is_stuck:
                self._begun.append(job)
        if is_stuck:  # abandoned since this job was taken, so nobody else reports it
            assert self._health.lost is not None
            self._transfers.end(job.failed(self._health.lost))
            return False
        self._busy.set()
        is_lost = self._health.lost is not None
        self._outcomes.append(None if is_lost else _try(partial(job.begin, job.attempts[0])))
        return True

    def _end_oldest(self) -> bool:
        """Wait for the first of those begun and report it; return whether to go on."""
        finished = self._finish(self._begun[0], self._outcomes.popleft())
        with self._lock:
            if self.is_stuck:
                return False  # too late: others were told that it has not ended
            self._begun.popleft()
        self._transfers.end(finished)
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
            logger.warning("transfer %d failed (%s); repeating it", job.transfer_id, ended)
        raise AssertionError("a transfer has one attempt at least")


class _Watchdog:
    """A thread that abandons hung copies. It sleeps while no copy runs.

    Args:
        queues: the queues to watch.
        deadline_s: longest time for a copy, retries included.
        busy: set by a queue when a copy starts.
    """

    def __init__(self, queues: Sequence[_QueueThread], deadline_s: float, busy: threading.Event) -> None:
        self._queues = queues
        self._deadline_s = deadline_s
        self._seen: dict[_QueueThread, tuple[_Job | None, int]] = {}  # the oldest job, and looks since then
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
            while any(queue.oldest and not queue.is_stuck for queue in self._queues):
                if self._stopping.wait(self._deadline_s / _LOOKS):
                    return
                self._look()

    def _look(self) -> None:
        for queue in self._queues:
            job = queue.oldest
            seen, looks = self._seen.get(queue, (None, 0))
            looks = looks + 1 if job is seen else 0
            self._seen[queue] = job, looks
            if job is not None and looks >= _LOOKS and not queue.is_stuck:
                queue.abandon(job, self._deadline_s)


def _take_all(queue: SimpleQueue[_Job | None]) -> list[_Job]:
    jobs: list[_Job] = []
    with suppress(Empty):
        while True:
            if (job := queue.get_nowait()) is not None:
                jobs.append(job)
    return jobs


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
