"""The transfer engine of all backends: three queues of transfers, each with a thread and a stream.

A queue's thread enqueues a transfer on its stream and sleeps until the event after it. The end is then
reported through ``set_wakeup``. A function that the device calls at the end (``cudaLaunchHostFunc``) would
save that thread, but may not call the device, and would block the stream while it waits for the interpreter
lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from kvtier._device._audit import Auditor, Check
from kvtier._device._pinning import PIECE_BYTES, PinnedSlots
from kvtier._device._queues import CHECKS_PER_DEADLINE, HAND_OVER_S, DeviceHealth, QueueThread
from kvtier._device._runtime import Runtime, Stream
from kvtier._device.base import DEADLINE_S, Attempt, Audits, Blocks, CopyQueue, Finished, KVCaches, Pinning
from kvtier._device.plan import CopyPlan, CopyPlanner
from kvtier._log import GuardedLogger
from kvtier._memory.layout import SlotLayout
from kvtier._memory.region import Region
from kvtier._memory.slot_checksums import SlotChecksums
from kvtier.errors import StateError

logger = GuardedLogger("kvtier.device")

_NOT_PINNED = Pinning()
_PLAIN = (Attempt.FIRST, Attempt.RETRY)
_WITH_STAGED = (*_PLAIN, Attempt.STAGED)

_abandoned: list[object] = []
"""Memory that abandoned copies may still write to: it stays mapped for the rest of the process."""


class TransferEngine:
    """Copies blocks of one device to slots and back, while the engine computes.

    Stores run in the order of their submission, and so do loads. A store and a load have no order between
    them, and an expedited load does not wait for other loads. All wait for the work that the submitting
    thread has enqueued on its current stream: a store for the computation of its blocks, a load for earlier
    writes to them. The caller ensures that no other code writes to the blocks and slots of a transfer until
    it has ended. Submissions come from one thread; other calls may come from any.

    A copy that fails is repeated once on a fresh stream. A load that fails again is tried in a third way,
    unless ``stages_loads`` is false and it is not expedited. A final failure is reported with its error; the
    copying threads raise nothing. When the device is lost, this transfer and all later ones end with a
    ``DeviceLostError``. A copy that has not ended by a deadline, or a quarter later, is abandoned, and the
    device counts as lost: no call below blocks for longer. The transfer's error is a ``DeviceStuckError``:
    its bytes may still move, and its blocks and slots must not be reused. The engine keeps its memory mapped
    and pinned. A transfer that fails its audit has failed, and is repeated like others. Its error is an
    ``AuditError``.

    Copies of slots that are not pinned yet are slower: the device's library stages the bytes, and blocks the
    queue's thread. ValueError if region, layout and tensors do not fit each other.
    """

    stages_loads: bool = True
    """Whether ordinary loads fall back to a staging buffer when other methods have failed. False if the
    caller can recompute instead. Expedited loads always do: a request waits for them."""

    def __init__(
        self,
        kv_caches: KVCaches,
        layout: SlotLayout,
        region: Region,
        runtime: Runtime,
        *,
        piece_bytes: int = PIECE_BYTES,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        if layout.chunk_bytes != region.chunk_bytes:
            raise ValueError(f"slots have {region.chunk_bytes} bytes, but the layout {layout.chunk_bytes}")
        piece_slots = max(1, piece_bytes // region.chunk_bytes) if runtime.can_pin else None
        self._planner = CopyPlanner(kv_caches, layout, region.address, region.slots, piece_slots)
        self._layout = layout
        self._runtime = runtime
        self._auditor: Auditor | None = None
        self._readers = threading.local()
        self._memory: tuple[object, ...] = (kv_caches, region.view(0))  # keeps memory of copies mapped
        self._submitting = threading.Lock()  # No submission may follow the end of the queues.
        self._changed = threading.Condition()
        self._in_flight: set[int] = set()
        self._ended: list[Finished] = []
        self._wakeup: Callable[[], object] | None = None
        health = DeviceHealth()
        self._queues = {queue: QueueThread(queue, runtime, health, self._end) for queue in CopyQueue}
        self._pinned = None if piece_slots is None else PinnedSlots(runtime, region, piece_slots)
        self._deadline_s = deadline_s
        self._closed = False
        self._stopping = threading.Event()
        self._watchdog: threading.Thread | None = None

    def submit_store(self, transfer_id: int, blocks: Blocks, slots: Sequence[int]) -> None:
        """Copy ``blocks`` to ``slots``, after the caller's earlier work for the device.

        ``slots`` are as many as ``Blocks.slots_needed`` adds up to, group after group. ValueError if they are
        not, a chunk lacks blocks, a block or slot is out of range, or a transfer of this id is in flight;
        StateError after ``close``.
        """
        plan = self._planner.store(blocks, slots)
        check = self._auditor.of_store(transfer_id, blocks, slots) if self._auditor else None
        self._submit(CopyQueue.STORE, transfer_id, plan, _PLAIN, check)

    def submit_load(
        self, transfer_id: int, slots: Sequence[int], blocks: Blocks, *, expedited: bool = False
    ) -> None:
        """Copy ``slots`` to ``blocks``; ``expedited``: do not wait for earlier loads. Raises as above.

        Chunks may lack blocks at their start and end: a load copies only the blocks given.
        """
        plan = self._planner.load(slots, blocks)
        check = self._auditor.of_load(transfer_id, slots, blocks) if self._auditor else None
        attempts = _WITH_STAGED if self.stages_loads or expedited else _PLAIN
        queue = CopyQueue.EXPEDITED if expedited else CopyQueue.LOAD
        self._submit(queue, transfer_id, plan, attempts, check)

    def begin_audits(self, slot_checksums: SlotChecksums) -> None:
        """Audit later submissions."""
        self._auditor = Auditor(slot_checksums, self._planner, self._layout, self._read)

    @property
    def audits(self) -> Audits:
        """The audits so far. Those of a transfer are counted before it is reported."""
        return self._auditor.audits if self._auditor is not None else Audits()

    def finished(self) -> list[Finished]:
        """Return the transfers that ended since the last call, in the order of their ends."""
        if not self._ended:
            return []
        with self._changed:
            ended, self._ended = self._ended, []
        return ended

    def hand_over(self) -> None:
        """Yield the interpreter lock if a thread may need it to start a load or to report its end.

        A caller that runs Python without a pause would keep the lock for 5 ms (``sys.getswitchinterval``).
        Blocks for at most 2 ms, and raises nothing.
        """
        if not self._in_flight:
            return
        loads = self._queues[CopyQueue.LOAD]
        loads.let_start()
        if (copied := loads.ended_copy()) is not None:
            with self._changed:
                self._changed.wait_for(lambda: copied not in self._in_flight, HAND_OVER_S)

    def wait(self, transfer_ids: Iterable[int]) -> None:
        """Block until these transfers have ended or were abandoned. Unknown and ended ids are ignored."""
        awaited = frozenset(transfer_ids)
        with self._changed:
            self._changed.wait_for(lambda: self._in_flight.isdisjoint(awaited))

    def drain(self) -> None:
        """Block until every transfer submitted so far has ended or was abandoned."""
        with self._changed:
            awaited = frozenset(self._in_flight)
        self.wait(awaited)

    def set_wakeup(self, wakeup: Callable[[], object] | None) -> None:
        """Call ``wakeup`` from a copying thread after each transfer; it must not block.

        It is also called at once if some ended transfers were not collected yet.
        """
        with self._changed:
            self._wakeup = wakeup
            has_ended = bool(self._ended)
        if has_ended and wakeup is not None:
            wakeup()

    @property
    def node(self) -> int | None:
        """The device's NUMA node; None if unknown."""
        return self._runtime.node()

    @property
    def pinning(self) -> Pinning:
        """The amount of the region that is pinned so far; zero on a device that needs no pinning."""
        return _NOT_PINNED if self._pinned is None else self._pinned.state

    def close(self) -> None:
        """Drain, stop and unpin; memory of a stuck copy stays pinned. May be called again.

        ``finished`` and ``wait`` go on working.
        """
        with self._submitting:
            self._closed = True
        self.drain()
        for queue in self._queues.values():
            queue.stop()
        self._stopping.set()
        if self._watchdog is not None:
            self._watchdog.join()
        if any(queue.is_stuck for queue in self._queues.values()):
            _abandoned.append(self._memory)
        elif self._pinned is not None:
            self._pinned.close()
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
            with self._changed:
                if transfer_id in self._in_flight:
                    raise ValueError(f"transfer {transfer_id} is in flight already")
                self._in_flight.add(transfer_id)
            try:
                self._start_threads(queue)
            # The process may have reached its thread limit. The next submission tries again.
            except RuntimeError as error:
                self._end(Finished(transfer_id, plan.nbytes, 0.0, error, None))
            else:
                self._queues[queue].submit(transfer_id, plan, attempts, check)

    def _start_threads(self, queue: CopyQueue) -> None:
        """Start the threads of a transfer. An engine that was never used keeps nothing alive."""
        if self._watchdog is None:
            watchdog = threading.Thread(target=self._watch, name="kvtier-watch", daemon=True)
            watchdog.start()
            self._watchdog = watchdog
        self._queues[queue].start()

    def _end(self, result: Finished) -> None:
        """Record how a transfer ended, and wake the waiting threads."""
        with self._changed:
            self._in_flight.discard(result.transfer_id)
            self._ended.append(result)
            self._changed.notify_all()
            wakeup = self._wakeup
        if wakeup is not None:
            try:
                wakeup()
            except Exception:  # An error in the callback, such as a closed event loop, must not stop copies.
                logger.exception("the wake-up after transfer %d failed", result.transfer_id)

    def _watch(self) -> None:
        """Abandon hanging copies, which would block waiting threads for ever."""
        while not self._stopping.wait(self._deadline_s / CHECKS_PER_DEADLINE):
            for queue in self._queues.values():
                queue.check(self._deadline_s)

    def _read(self, plan: CopyPlan) -> None:
        """Copy from the device to any memory of this process, one by one; return when that has ended.

        Called in the attached threads of the queues, each with a stream for this purpose alone.
        """
        stream: Stream | None = getattr(self._readers, "stream", None)
        if stream is None:
            stream = self._readers.stream = self._runtime.open_stream(CopyQueue.STORE, plain=True)
        try:
            stream.copy(plan)
            stream.record().synchronize()
        except BaseException:
            del self._readers.stream
            raise
