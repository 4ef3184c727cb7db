"""The backend for KV caches on NVIDIA GPUs: a stream of copies for each direction, over pinned slots."""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import Any, Protocol

from kvtier.device import cuda_runtime
from kvtier.device.base import KVCaches
from kvtier.device.lanes import Copy, LaneEngine, Prepare
from kvtier.device.plan import CopyPlan
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
        super().__init__(kv_caches, layout, region, lambda: _prepare_on_stream(device), piece_slots)
        self._pinned = _PinnedSlots(device, region, piece_slots)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the region that are pinned so far."""
        return self._pinned.nbytes

    def close(self) -> None:
        """See ``TransferEngine.close``."""
        super().close()
        self._pinned.close()


def _prepare_on_stream(runtime: CudaRuntime) -> Prepare:
    stream = runtime.open_stream()

    def prepare(plan: CopyPlan) -> Copy:
        return partial(_copy, runtime, stream, plan, runtime.record_compute())

    return prepare


def _copy(runtime: CudaRuntime, stream: Stream, plan: CopyPlan, computed: Event) -> float:
    runtime.attach()
    stream.wait(computed)
    start = stream.record()
    try:
        stream.copy(plan)
    finally:  # when one is refused, those before it are under way
        end = stream.record()
        end.synchronize()
    return start.elapsed_time(end) / 1000


class _PinnedSlots:
    """Pins the slots in a thread, piece after piece, and keeps them mapped until it has unpinned them.

    CUDA refuses a copy that touches two pieces: the copy plans keep to the same ``piece_slots``.
    """

    def __init__(self, runtime: CudaRuntime, region: Region, piece_slots: int) -> None:
        self.nbytes = 0
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
            self._pin(pieces)
        except Exception as error:
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
