"""The backend for KV caches in host memory: threads that copy with the interpreter lock released."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue

from kvtier import native
from kvtier.device.base import Blocks, Finished, KVCaches, TransferEngine
from kvtier.device.ledger import Ledger
from kvtier.device.plan import CopyPlan, CopyPlanner
from kvtier.errors import ConfigError, StateError
from kvtier.memory.layout import SlotLayout
from kvtier.memory.region import Region

logger = logging.getLogger("kvtier.device")


def copy_plan(plan: CopyPlan) -> None:
    """Make the copies of ``plan`` in one foreign call."""
    native.copy_batch(plan.src.ctypes.data, plan.dst.ctypes.data, plan.sizes.ctypes.data, len(plan.sizes))


class CpuTransferEngine(TransferEngine):
    """Copies between tensors in host memory and slots, one thread for each direction.

    Expedited loads have a thread of their own. Threads start with the first transfer that needs them.

    Args:
        kv_caches: tensors on the CPU.
        layout: where the pages lie in a slot.
        region: the slots; it stays mapped until ``close``.
        copy: makes the copies of one plan and returns when they are done.

    Raises:
        ConfigError: a tensor is on another device.
        ValueError: region, layout and tensors do not fit each other.
    """

    def __init__(
        self,
        kv_caches: KVCaches,
        layout: SlotLayout,
        region: Region,
        copy: Callable[[CopyPlan], None] = copy_plan,
    ) -> None:
        devices = {tensor.device.type for tensor in kv_caches.tensors}
        if devices - {"cpu"}:
            raise ConfigError(f"the device backend 'cpu' cannot copy tensors on {', '.join(sorted(devices))}")
        if layout.chunk_bytes != region.chunk_bytes:
            raise ValueError(f"slots have {region.chunk_bytes} bytes, but the layout {layout.chunk_bytes}")
        self._planner = CopyPlanner(kv_caches, layout, region.address, region.slots)
        self._memory: tuple[object, ...] = (kv_caches, region.view(0))  # keeps what the copies touch mapped
        self._copy = copy
        self._ledger = Ledger()
        self._closed = False
        self._stores = _Lane("kvtier-store", self._run)
        self._loads = _Lane("kvtier-load", self._run)
        self._expedited = _Lane("kvtier-expedited", self._run)

    def submit_store(self, transfer_id: int, blocks: Blocks, slots: Sequence[int]) -> None:
        """See ``TransferEngine.submit_store``."""
        self._require_open()
        self._submit(self._stores, transfer_id, self._planner.store(blocks, slots))

    def submit_load(
        self, transfer_id: int, slots: Sequence[int], blocks: Blocks, *, expedited: bool = False
    ) -> None:
        """See ``TransferEngine.submit_load``."""
        self._require_open()
        lane = self._expedited if expedited else self._loads
        self._submit(lane, transfer_id, self._planner.load(slots, blocks))

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

    def _submit(self, lane: _Lane, transfer_id: int, plan: CopyPlan) -> None:
        self._ledger.begin(transfer_id)
        lane.put(transfer_id, plan)

    def _run(self, transfer_id: int, plan: CopyPlan) -> None:
        """Make one transfer, in a lane's thread."""
        start = time.perf_counter()
        error = self._attempt(plan)
        if error is not None:
            logger.warning("transfer %d failed and is repeated: %s", transfer_id, error)
            error = self._attempt(plan)
        self._ledger.end(Finished(transfer_id, plan.nbytes, time.perf_counter() - start, error))

    def _attempt(self, plan: CopyPlan) -> BaseException | None:
        try:
            self._copy(plan)
        except BaseException as error:  # the thread must live, whatever a copy raises
            return error
        return None


class _Lane:
    """A thread that runs jobs in order; it starts with the first one."""

    def __init__(self, name: str, run: Callable[[int, CopyPlan], None]) -> None:
        self._name = name
        self._run = run
        self._jobs: SimpleQueue[tuple[int, CopyPlan] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, transfer_id: int, plan: CopyPlan) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put((transfer_id, plan))

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
