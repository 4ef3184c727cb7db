"""The queues of a transfer engine: each has a thread and a stream, and makes its transfers in order."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from kvtier._device._audit import Check
from kvtier._device._runtime import Event, Runtime, Stream
from kvtier._device.base import Attempt, CopyQueue, Finished
from kvtier._device.plan import CopyPlan
from kvtier._log import GuardedLogger
from kvtier.errors import AuditError, BlocksChangedError, DamagedSlotError, DeviceLostError, DeviceStuckError

logger = GuardedLogger("kvtier.device")

_FINAL = (DamagedSlotError, BlocksChangedError)  # a retry would hide them

LOST_AFTER = 5
"""This many failures of transfers in a row, in every attempt and over all queues, mean a lost device."""

HAND_OVER_S = 0.001
"""Each wait of ``TransferEngine.hand_over`` ends after this time."""

CHECKS_PER_DEADLINE = 8
"""A transfer is abandoned after this many checks. If a process was stopped for long, and its copy too, the
copy has missed one check and not its deadline."""


@dataclass(slots=True, eq=False)
class QueuedTransfer:
    """A transfer in a queue."""

    transfer_id: int
    plan: CopyPlan
    # From the plan. The queue's thread uses no arrays, because NumPy would release the interpreter lock.
    nbytes: int
    computed: Event | Exception  # The copies wait for this event. If recording it failed, this is the error.
    attempts: tuple[Attempt, ...]  # to make, in this order
    check: Check | None  # audits the copies
    # Start and end of the copies in flight, or the error of enqueueing them; None before that, and if the
    # device is lost.
    begun: tuple[Event, Event] | BaseException | None = None
    audit: Iterator[None] | None = None  # audit of the copies in flight

    def failed(self, error: BaseException, attempt: Attempt | None = None) -> Finished:
        """Return the result of a transfer that failed for good."""
        return Finished(self.transfer_id, self.nbytes, 0.0, error, attempt)


class DeviceHealth:
    """Tracks from the results of copies whether the device still works. Shared by all queues."""

    def __init__(self) -> None:
        self.lost: DeviceLostError | None = None
        self._failures = 0

    def succeeded(self) -> None:
        self._failures = 0

    def failed(self, error: BaseException) -> BaseException:
        """Record the final failure of a transfer; return the error to report."""
        if isinstance(error, (AuditError, BlocksChangedError)):
            return self.lost or error  # the device is not at fault
        self._failures += 1
        if isinstance(error, DeviceLostError):
            self.lose(error)
        elif self._failures >= LOST_AFTER:
            self.lose(DeviceLostError(f"{self._failures} transfers in a row failed, the last with: {error}"))
        return self.lost or error

    def lose(self, error: DeviceLostError) -> DeviceLostError:
        """Disable the device, unless it is lost already; return the error that disabled it."""
        if self.lost is None:
            self.lost = error
            logger.error("device disabled until the engine restarts (%s)", error)
        return self.lost


class QueueThread:
    """A thread that makes transfers in order and reports each, once it is started."""

    def __init__(
        self, queue: CopyQueue, runtime: Runtime, health: DeviceHealth, report: Callable[[Finished], None]
    ) -> None:
        # True if a transfer was abandoned. The thread then reports no more transfers, and may never end.
        self.is_stuck = False
        self._queue = queue
        self._runtime = runtime
        self._stream = runtime.open_stream(queue)
        self._is_attached = False  # Each thread that uses the device must be attached to it.
        self._health = health
        self._report = report
        self._changed = threading.Condition()
        self._waiting: deque[QueuedTransfer] = deque()
        self._begun: deque[QueuedTransfer] = deque()  # changed by the thread, with the lock held
        self._checked: tuple[QueuedTransfer | None, int] = (None, 0)  # the oldest, and the checks since
        self._is_idle = False  # the thread waits for a transfer
        self._stopping = False
        self._thread: threading.Thread | None = None

    def submit(
        self, transfer_id: int, plan: CopyPlan, attempts: tuple[Attempt, ...], check: Check | None
    ) -> None:
        """Queue a transfer after the work that the calling thread has enqueued on the device so far."""
        try:
            computed: Event | Exception = self._runtime.record_compute()
        except Exception as error:  # fails this transfer, not the engine's own work
            computed = error
        transfer = QueuedTransfer(transfer_id, plan, plan.nbytes, computed, attempts, check)
        with self._changed:
            if not self.is_stuck:
                self._waiting.append(transfer)
                self._changed.notify()
                return
        assert self._health.lost is not None
        self._report(transfer.failed(self._health.lost))

    def let_start(self) -> None:
        """Wait until the thread has dequeued a transfer, if it only has to wake up for that."""
        with self._changed:
            if self._is_idle and self._waiting:
                self._changed.wait(HAND_OVER_S)

    def ended_copy(self) -> int | None:
        """Return the oldest transfer if its copies may have ended and only its report is missing."""
        with self._changed:
            oldest = self._begun[0] if self._begun else None
        if oldest is None or oldest.check is not None or isinstance(oldest.begun, BaseException):
            return None
        try:
            is_over = self._runtime.starts_with_copies if oldest.begun is None else oldest.begun[1].query()
        except Exception:  # the thread reports it
            is_over = True
        return oldest.transfer_id if is_over else None

    def start(self) -> None:
        """Start the thread unless it runs. RuntimeError if the process may have no more threads."""
        if self._thread is None:
            thread = threading.Thread(target=self._work, name=self._queue, daemon=True)
            thread.start()
            self._thread = thread

    def stop(self) -> None:
        """End the thread after its transfers. A stuck thread is not stopped."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None and not self.is_stuck:
            self._thread.join()

    def check(self, deadline_s: float) -> None:
        """Abandon the oldest transfer and all later ones if it has not ended after a number of checks."""
        with self._changed:
            oldest = self._begun[0] if self._begun else None
            seen, checks = self._checked
            checks = checks + 1 if oldest is seen else 0
            self._checked = oldest, checks
            if oldest is None or checks < CHECKS_PER_DEADLINE or self.is_stuck:
                return
            self.is_stuck = True
            copy = f"a copy of {oldest.nbytes} bytes"
            text = f"{copy} has not ended within {deadline_s:g} s ({self._queue})"
            lost = self._health.lose(DeviceLostError(text))
            begun, waiting = list(self._begun), list(self._waiting)
            self._waiting.clear()
        for transfer in begun:
            self._report(transfer.failed(DeviceStuckError(text)))
        for transfer in waiting:
            self._report(transfer.failed(lost))

    def _work(self) -> None:
        while self._step():
            pass

    def _step(self) -> bool:
        """Start the next transfer, or end the oldest one; return whether to continue."""
        if (transfer := self._take()) is None:
            return bool(self._begun) and self._end_oldest()
        if self._health.lost is None:
            try:
                transfer.begun = self._enqueue(transfer, transfer.attempts[0])
            except BaseException as error:  # The thread must survive any exception of a copy.
                transfer.begun = error
        return True

    def _take(self) -> QueuedTransfer | None:
        """Return the next transfer to start; None if the oldest, or the thread, has to end first."""
        with self._changed:
            if not self._begun:
                self._is_idle = True
                self._changed.wait_for(lambda: self._waiting or self._stopping)
                self._is_idle = False
            # Later transfers wait for the retry.
            is_repeated = bool(self._begun) and isinstance(self._begun[-1].begun, BaseException)
            if not self._waiting or is_repeated or len(self._begun) >= self._runtime.transfers_at_once:
                return None
            self._begun.append(self._waiting.popleft())
            self._changed.notify()  # ``let_start``
            return self._begun[-1]

    def _end_oldest(self) -> bool:
        """Wait for the oldest transfer and report it; return whether to continue."""
        # Kept beyond the report, because freeing events releases the interpreter lock.
        transfer = self._begun[0]
        finished = self._finish(transfer)
        with self._changed:
            if self.is_stuck:
                return False  # Too late: the transfer was already reported as abandoned.
            self._begun.popleft()
        self._report(finished)
        return True

    def _finish(self, transfer: QueuedTransfer) -> Finished:
        if transfer.begun is None:
            assert self._health.lost is not None
            return transfer.failed(self._health.lost)
        for attempt in transfer.attempts:
            try:
                if attempt is not transfer.attempts[0]:
                    transfer.begun = self._enqueue(transfer, attempt)
                seconds = _wait_for(transfer)
            except BaseException as error:
                if attempt is transfer.attempts[-1] or isinstance(error, _FINAL):
                    return transfer.failed(self._health.failed(error), attempt)
                logger.warning("transfer %d failed (%s); repeating it", transfer.transfer_id, error)
            else:
                self._health.succeeded()
                return Finished(transfer.transfer_id, transfer.nbytes, seconds, None, attempt)
        raise AssertionError("a transfer has one attempt at least")

    def _enqueue(self, transfer: QueuedTransfer, attempt: Attempt) -> tuple[Event, Event]:
        """Enqueue the copies of a transfer; return their start and end. None is in flight when it raises."""
        if isinstance(transfer.computed, Exception):
            raise transfer.computed
        if not self._is_attached:
            self._runtime.attach()
            self._is_attached = True
        if attempt is not Attempt.FIRST:
            with suppress(Exception):  # Transfers started after the failed one keep their order.
                self._stream.record().synchronize()
            self._stream = self._runtime.open_stream(self._queue, plain=True)
        if transfer.check is not None:
            transfer.computed.synchronize()
            transfer.audit = transfer.check()
            next(transfer.audit)
        if attempt is Attempt.STAGED:
            return _start_staged(self._stream, transfer.computed, transfer.plan)
        return self._stream.start_transfer(transfer.computed, transfer.plan)


def _start_staged(stream: Stream, after: Event, plan: CopyPlan) -> tuple[Event, Event]:
    """Make the copies of a load one by one, from memory of this process that is neither shared nor pinned."""
    stream.wait(after)
    start = stream.record()
    memory = np.empty(int(plan.sizes.max(initial=1)), dtype=np.uint8)
    staging = np.array([memory.ctypes.data], dtype=np.uint64)
    for index, (source, nbytes) in enumerate(zip(plan.src.tolist(), plan.sizes.tolist(), strict=True)):
        ctypes.memmove(memory.ctypes.data, source, nbytes)
        here = slice(index, index + 1)
        piece = CopyPlan(staging, plan.dst[here], plan.sizes[here])
        stream.start_transfer(start, piece)[1].synchronize()
    return start, stream.record()


def _wait_for(transfer: QueuedTransfer) -> float:
    """Block until the copies have ended; return their seconds, or raise their error."""
    if isinstance(transfer.begun, BaseException):
        raise transfer.begun
    assert transfer.begun is not None
    start, end = transfer.begun
    end.synchronize()
    if transfer.audit is not None:
        next(transfer.audit, None)
    return start.elapsed_time(end) / 1000
