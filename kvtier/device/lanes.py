"""Lanes: a thread for each direction of copies, the part of an engine that all backends share."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue

from kvtier.device.base import Blocks, Finished, KVCaches, TransferEngine
from kvtier.device.ledger import Ledger
from kvtier.device.plan import CopyPlan, CopyPlanner
from kvtier.errors import ConfigError, StateError
from kvtier.memory.layout import SlotLayout
from kvtier.memory.region import Region

logger = logging.getLogger("kvtier.device")

Copy = Callable[[], float]
"""Makes the copies of one transfer, in a lane's thread. Returns, when they are done, the seconds they
took. It is called once more when it raises; by then none of its copies may be under way."""

Prepare = Callable[[CopyPlan], Copy]
"""Takes a plan in the submitting thread, where the order against the caller's own work is known."""


def require_device(kv_caches: KVCaches, name: str) -> None:
    """Raise ConfigError unless all tensors are on devices of the type ``name``."""
    types = {tensor.device.type for tensor in kv_caches.tensors}
    if types - {name}:
        raise ConfigError(f"the device backend {name!r} cannot copy tensors on {', '.join(sorted(types))}")


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
        self._stores = _Lane("kvtier-store", open_lane(), self._ledger)
        self._loads = _Lane("kvtier-load", open_lane(), self._ledger)
        self._expedited = _Lane("kvtier-expedited", open_lane(), self._ledger)

    def submit_store(self, transfer_id: int, blocks: Blocks, slots: Sequence[int]) -> None:
        """See ``TransferEngine.submit_store``."""
        self._require_open()
        self._stores.submit(transfer_id, self._planner.store(blocks, slots))

    def submit_load(
        self, transfer_id: int, slots: Sequence[int], blocks: Blocks, *, expedited: bool = False
    ) -> None:
        """See ``TransferEngine.submit_load``."""
        self._require_open()
        lane = self._expedited if expedited else self._loads
        lane.submit(transfer_id, self._planner.load(slots, blocks))

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


class _Lane:
    """A thread that makes transfers in order; it starts with the first one."""

    def __init__(self, name: str, prepare: Prepare, ledger: Ledger) -> None:
        self._name = name
        self._prepare = prepare
        self._ledger = ledger
        self._jobs: SimpleQueue[tuple[int, int, Copy] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, transfer_id: int, plan: CopyPlan) -> None:
        copy = self._prepare(plan)
        self._ledger.begin(transfer_id)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put((transfer_id, plan.nbytes, copy))

    def stop(self) -> None:
        """End the thread after the jobs it was given."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._run(*job)
            del job  # or the last plan stays in memory while the thread waits

    def _run(self, transfer_id: int, nbytes: int, copy: Copy) -> None:
        outcome = _attempt(copy)
        if isinstance(outcome, BaseException):
            logger.warning("transfer %d failed and is repeated: %s", transfer_id, outcome)
            outcome = _attempt(copy)
        if isinstance(outcome, BaseException):
            self._ledger.end(Finished(transfer_id, nbytes, 0.0, outcome))
        else:
            self._ledger.end(Finished(transfer_id, nbytes, outcome))


def _attempt(copy: Copy) -> float | BaseException:
    try:
        return copy()
    except BaseException as error:  # the thread must live, whatever a copy raises
        return error
