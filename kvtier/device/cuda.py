"""The backend for KV caches on NVIDIA GPUs: a stream of copies for each direction, over pinned slots."""

from __future__ import annotations

import ctypes
import logging
import threading
from functools import partial
from typing import Any, Protocol

import numpy as np

from kvtier.device import cuda_runtime
from kvtier.device.base import Attempt, KVCaches, Pinning
from kvtier.device.lanes import Copy, LaneEngine
from kvtier.device.plan import CopyPlan
from kvtier.memory import numa
from kvtier.memory.layout import SlotLayout
from kvtier.memory.region import Region

logger = logging.getLogger("kvtier.device")

PIECE_BYTES = 256 * 2**20
"""Bytes that are pinned at once. Other threads' calls can wait in the driver meanwhile: not too many."""


class Event(Protocol):
    """A place in the work of a stream."""

    def synchronize(self) -> None:
        """Block until the work before it is done, with the interpreter lock released."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Return the milliseconds from this event to a later one of a stream's ``record``; both are over."""


class Stream(Protocol):
    """Work of the device that happens in the order in which it was given. Errors are raised."""

    def wait(self, event: Event) -> None:
        """Have what is given from now on wait for ``event``."""

    def record(self) -> Event:
        """Return an event after all that was given so far."""

    def copy(self, plan: CopyPlan) -> None:
        """Give the copies of ``plan`` to the stream, all or, when it raises, the first few."""


class CudaRuntime(Protocol):
    """What the engine needs of a device. Errors are raised."""

    def attach(self) -> None:
        """Prepare the calling thread for the calls below. May be called again."""

    def record_compute(self) -> Event:
        """Return an event after what the calling thread has given the device; needs no ``attach``."""

    def node(self) -> int | None:
        """Return the NUMA node that the device is at, where that is known; needs no ``attach``."""

    def open_stream(self) -> Stream:
        """Return a stream of its own; needs no ``attach``."""

    def host_register(self, address: int, nbytes: int) -> None:
        """Pin host memory, so that the device copies from it and to it directly."""

    def host_unregister(self, address: int) -> None:
        """Undo ``host_register``."""


class CudaTransferEngine(LaneEngine):
    """Copies between tensors on one GPU and slots, with a stream and a thread for each direction.

    Stores and loads wait for the work that the submitting thread has given its current stream: a
    store for what computes the blocks, a load for what was to be written to them before. How long a
    copy took is measured by the device.

    The slots are pinned in the background, in pieces, from slot 0 on. Slots that are not pinned, or
    cannot be, are copied all the same, slower: CUDA then stages the bytes and holds up the thread
    that gives it the copy, which is the lane's and not the engine's.

    Args:
        kv_caches: tensors on one GPU.
        layout: where the pages lie in a slot.
        region: the slots; it stays mapped until ``close``.
        runtime: the device; None for that of the tensors.
        piece_bytes: at most so many bytes are pinned at once, but at least one slot.

    Raises:
        ConfigError: the tensors are on another device or on several, or CUDA cannot be used.
        ValueError: region, layout and tensors do not fit each other.
    """

    def __init__(
        self,
        kv_caches: KVCaches,
        layout: SlotLayout,
        region: Region,
        runtime: CudaRuntime | None = None,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        device = runtime or cuda_runtime.open_runtime(kv_caches)
        piece_slots = max(1, piece_bytes // region.chunk_bytes)
        super().__init__(kv_caches, layout, region, lambda: _StreamLane(device).prepare, piece_slots)
        self._node = device.node()
        self._pinned = _PinnedSlots(device, region, piece_slots)

    @property
    def node(self) -> int | None:
        """See ``TransferEngine.node``."""
        return self._node

    @property
    def pinning(self) -> Pinning:
        """See ``TransferEngine.pinning``."""
        return Pinning(self._pinned.nbytes, self._pinned.failed)

    def close(self) -> None:
        """See ``TransferEngine.close``."""
        super().close()
        self._pinned.close()


class _StreamLane:
    """What a lane copies with: a stream, and a fresh one after each failure."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._stream = runtime.open_stream()

    def prepare(self, plan: CopyPlan) -> Copy:
        return partial(self._copy, plan, self._runtime.record_compute())

    def _copy(self, plan: CopyPlan, computed: Event, attempt: Attempt) -> float:
        self._runtime.attach()
        if attempt is not Attempt.FIRST:
            self._stream = self._runtime.open_stream()
        stream = self._stream
        stream.wait(computed)
        start = stream.record()
        try:
            _give_staged(stream, plan) if attempt is Attempt.STAGED else stream.copy(plan)
        finally:  # when one is refused, those before it are under way
            end = stream.record()
            end.synchronize()
        return start.elapsed_time(end) / 1000


def _give_staged(stream: Stream, plan: CopyPlan) -> None:
    """Make the copies of a load one by one, from memory of this process that nothing else has touched."""
    memory = np.empty(int(plan.sizes.max(initial=1)), dtype=np.uint8)
    staging = np.array([memory.ctypes.data], dtype=np.uint64)
    for index, (source, nbytes) in enumerate(zip(plan.src.tolist(), plan.sizes.tolist(), strict=True)):
        ctypes.memmove(memory.ctypes.data, source, nbytes)
        here = slice(index, index + 1)
        stream.copy(CopyPlan(staging, plan.dst[here], plan.sizes[here], nbytes))
        stream.record().synchronize()


class _PinnedSlots:
    """Pins the slots in a thread, piece after piece, and keeps them mapped until it has unpinned them.

    CUDA refuses a copy that touches two pieces: the copy plans keep to the same ``piece_slots``.
    """

    def __init__(self, runtime: CudaRuntime, region: Region, piece_slots: int) -> None:
        self.nbytes = 0
        self.failed = False
        self._runtime = runtime
        self._address = region.address
        self._total_bytes = region.nbytes
        self._piece_bytes = piece_slots * region.chunk_bytes
        self._mapped: memoryview | None = region.view(0)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="kvtier-pin", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Unpin. No copy may be under way. May be called again."""
        self._stopping.set()
        self._thread.join()
        self._mapped = None

    def _work(self) -> None:
        pieces: list[int] = []
        try:
            self._runtime.attach()
            with numa.preferring(self._runtime.node()):  # pinning touches what nobody has touched yet
                self._pin(pieces)
        except Exception as error:
            self.failed = True
            logger.warning(
                "%d of %d bytes of the primary tier are pinned, and no more can be (%s): copies to and "
                "from the rest are slower",
                self.nbytes,
                self._total_bytes,
                error,
            )
        self._stopping.wait()
        self._unpin(pieces)

    def _pin(self, pieces: list[int]) -> None:
        for start in range(0, self._total_bytes, self._piece_bytes):
            if self._stopping.is_set():
                return
            size = min(self._piece_bytes, self._total_bytes - start)
            self._runtime.host_register(self._address + start, size)
            pieces.append(self._address + start)
            self.nbytes += size

    def _unpin(self, pieces: list[int]) -> None:
        self.nbytes = 0
        for address in pieces:
            try:
                self._runtime.host_unregister(address)
            except Exception:  # the others must be unpinned too
                logger.exception("a piece of the primary tier cannot be unpinned")
