"""Lanes: a thread for each direction of copies, the part of an engine that all backends share."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

from kvtier.device.base import Attempt, Blocks, Finished, KVCaches, TransferEngine
from kvtier.device.ledger import Ledger
from kvtier.device.plan import CopyPlan, CopyPlanner
from kvtier.errors import ConfigError, DeviceLostError, StateError
from kvtier.memory.layout import SlotLayout
from kvtier.memory.region import Region

logger = logging.getLogger("kvtier.device")

LOST_AFTER = 5
"""So many transfers in a row that fail in every way, in all lanes together, mean a lost device."""

Copy = Callable[[Attempt], float]
"""Makes the copies of one transfer, in a lane's thread. Returns, when they are done, the seconds they
took. It is called for the next attempt when it raises; by then none of its copies may be under way."""

Prepare = Callable[[CopyPlan], Copy]
"""Takes a plan in the submitting thread, where the order against the caller's own work is known."""


def require_device(kv_caches: KVCaches, name: str) -> None:
    """Raise ConfigError unless all tensors are on devices of the type ``name``."""
    types = {tensor.device.type for tensor in kv_caches.tensors}
    if types - {name}:
        raise ConfigError(f"the device backend {name!r} cannot copy tensors on {', '.join(sorted(types))}")


_PLAIN = (Attempt.FIRST, Attempt.AGAIN)
_WITH_STAGED = (*_PLAIN, Attempt.STAGED)


class LaneEngine(TransferEngine):
    """Runs transfers in three lanes: stores, loads and expedited loads.

    A lane's thread starts with the first transfer that needs it. Backends subclass this and say how
    a lane copies.

    Args:
        kv_caches: tensors on the backend's device.
        layout: where the pages lie in a slot.
        region: the slots; it stays mapped until ``close``.
        open_lane: called once for each lane.
        piece_slots: no copy crosses a multiple of so many slots; None where that does not matter.

    Raises:
        ValueError: region, layout and tensors do not fit each other.
    """

    def __init__(
        self,
        kv_caches: KVCaches,
        layout: SlotLayout,
        region: Region,
        open_lane: Callable[[], Prepare],
        piece_slots: int | None = None,
    ) -> None:
        if layout.chunk_bytes != region.chunk_bytes:
            raise ValueError(f"slots have {region.chunk_bytes} bytes, but the layout {layout.chunk_bytes}")
        self._planner = CopyPlanner(kv_caches, layout, region.address, region.slots, piece_slots)
        self._memory: tuple[object, ...] = (kv_caches, region.view(0))  # keeps what the copies touch mapped
        self._ledger = Ledger()
        self._closed = False
        health = _Health()
        self._stores = _Lane("kvtier-store", open_lane(), self._ledger, health)
        self._loads = _Lane("kvtier-load", open_lane(), self._ledger, health)
        self._expedited = _Lane("kvtier-expedited", open_lane(), self._ledger, health)

    def submit_store(self, transfer_id: int, blocks: Blocks, slots: Sequence[int]) -> None:
        """See ``TransferEngine.submit_store``."""
        self._require_open()
        self._stores.submit(transfer_id, self._planner.store(blocks, slots), _PLAIN)

    def submit_load(
        self, transfer_id: int, slots: Sequence[int], blocks: Blocks, *, expedited: bool = False
    ) -> None:
        """See ``TransferEngine.submit_load``."""
        self._require_open()
        lane = self._expedited if expedited else self._loads
        attempts = _WITH_STAGED if self.stages_loads or expedited else _PLAIN
        lane.submit(transfer_id, self._planner.load(slots, blocks), attempts)

    def finished(self) -> list[Finished]:
        """See ``TransferEngine.finished``."""
        return self._ledger.take()

    def wait(self, transfer_ids: Iterable[int]) -> None:
        """See ``TransferEngine.wait``."""
        self._ledger.wait(transfer_ids)

    def drain(self) -> None:
        """See ``TransferEngine.drain``."""
        self._ledger.drain()

    def set_wakeup(self, wakeup: Callable[[], object] | None) -> None:
        """See ``TransferEngine.set_wakeup``."""
        self._ledger.set_wakeup(wakeup)

    def close(self) -> None:
        """See ``TransferEngine.close``."""
        self._closed = True
        self.drain()
        for lane in (self._stores, self._loads, self._expedited):
            lane.stop()
        self._memory = ()

    def _require_open(self) -> None:
        if self._closed:
            raise StateError("the transfer engine is closed")


class _Health:
    """Whether the device still works, as far as the copies tell. Shared by all lanes."""

    def __init__(self) -> None:
        self.lost: DeviceLostError | None = None
        self._failures = 0

    def worked(self) -> None:
        self._failures = 0

    def failed(self, error: BaseException) -> BaseException:
        """Take note of a transfer that failed for good; return what to report."""
        self._failures += 1
        if self.lost is None and isinstance(error, DeviceLostError):
            self._lose(error)
        elif self.lost is None and self._failures >= LOST_AFTER:
            self._lose(DeviceLostError(f"{self._failures} transfers in a row failed, the last with: {error}"))
        return self.lost or error

    def _lose(self, error: DeviceLostError) -> None:
        self.lost = error
        logger.error("the device is given up, nothing is copied from or to it any more: %s", error)


@dataclass(frozen=True, slots=True)
class _Job:
    transfer_id: int
    nbytes: int
    copy: Copy
    attempts: tuple[Attempt, ...]


class _Lane:
    """A thread that makes transfers in order; it starts with the first one."""

    def __init__(self, name: str, prepare: Prepare, ledger: Ledger, health: _Health) -> None:
        self._name = name
        self._prepare = prepare
        self._ledger = ledger
        self._health = health
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, transfer_id: int, plan: CopyPlan, attempts: tuple[Attempt, ...]) -> None:
        self._ledger.begin(transfer_id)
        try:
            copy = self._prepare(plan)
        except Exception as error:  # a device that has failed must not fail the caller's own work
            copy = partial(_raise, error)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put(_Job(transfer_id, plan.nbytes, copy, attempts))

    def stop(self) -> None:
        """End the thread after the jobs it was given."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._ledger.end(self._finish(job))
            del job  # or the last plan stays in memory while the thread waits

    def _finish(self, job: _Job) -> Finished:
        if self._health.lost is not None:
            return Finished(job.transfer_id, job.nbytes, 0.0, self._health.lost, None)
        *earlier, last = job.attempts
        for attempt in earlier:
            outcome = _try(job.copy, attempt)
            if not isinstance(outcome, BaseException):
                self._health.worked()
                return Finished(job.transfer_id, job.nbytes, outcome, None, attempt)
            logger.warning("transfer %d failed and is repeated: %s", job.transfer_id, outcome)
        outcome = _try(job.copy, last)
        if isinstance(outcome, BaseException):
            return Finished(job.transfer_id, job.nbytes, 0.0, self._health.failed(outcome), last)
        self._health.worked()
        return Finished(job.transfer_id, job.nbytes, outcome, None, last)


def _try(copy: Copy, attempt: Attempt) -> float | BaseException:
    try:
        return copy(attempt)
    except BaseException as error:  # the thread must live, whatever a copy raises
        return error


def _raise(error: Exception, attempt: Attempt) -> float:  # noqa: ARG001
    raise error
