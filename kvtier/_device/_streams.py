"""The engine over a device that copies asynchronously: a stream for each queue, beside the engine's own.

The thread of a queue gives a transfer to its stream and sleeps until the event behind it; the end is then
reported through ``set_wakeup``. A function that the device calls at the end (``cudaLaunchHostFunc``) would
save that thread, but may not call the device, and would hold up the stream while it waits for the interpreter
lock.
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import numpy as np

from kvtier._device._pinning import PIECE_BYTES, PinnedSlots
from kvtier._device._threaded import Begin, Finish, Prepare, ThreadedEngine
from kvtier._device.base import DEADLINE_S, Attempt, CopyQueue, KVCaches, Pinning
from kvtier._device.plan import CopyPlan
from kvtier._memory.layout import SlotLayout
from kvtier._memory.region import Region


class Event(Protocol):
    """A place in the work of a stream."""

    def synchronize(self) -> None:
        """Block until the work before it is done, with the interpreter lock released."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Return the milliseconds from this event to a later one of a stream's ``record``; both are over."""


class Stream(Protocol):
    """Work of the device that happens in the order in which it was enqueued. Errors are raised."""

    def wait(self, event: Event) -> None:
        """Make what is enqueued from now on wait for ``event``."""

    def record(self) -> Event:
        """Return an event after all that was enqueued so far."""

    def copy(self, plan: CopyPlan) -> None:
        """Enqueue the copies of ``plan``, all or, when it raises, the first few.

        The caller keeps the plan until they are over. May block while the device cannot take more.
        """


class Runtime(Protocol):
    """What the engine needs from a device. Errors are raised."""

    def attach(self) -> None:
        """Prepare the calling thread for the calls below. May be called again."""

    def record_compute(self) -> Event:
        """Return an event after what the calling thread has enqueued; needs no ``attach``."""

    def node(self) -> int | None:
        """Return the NUMA node that the device is at, where that is known; needs no ``attach``."""

    def open_stream(self, queue: CopyQueue, *, plain: bool = False) -> Stream:
        """Return a new stream for a queue; needs no ``attach``.

        Args:
            queue: the queue.
            plain: copy one by one, because another way may be what has failed.
        """

    def host_register(self, address: int, nbytes: int) -> None:
        """Pin host memory, so that the device copies from it and to it directly."""

    def host_unregister(self, address: int) -> None:
        """Undo ``host_register``."""


class StreamEngine(ThreadedEngine):
    """Copies between tensors on one device and slots, with a stream and a thread for each queue.

    Stores and loads wait for the work that the submitting thread has enqueued on its current stream: a store
    for what computes the blocks, a load for what was to be written to them before. The device measures how
    long a copy took.

    The slots are pinned in the background, in pieces, from slot 0 on. Slots that are not pinned are
    copied all the same, slower: the device's library then stages the bytes and blocks the thread that makes
    the call, which is that of the queue and not the engine's.

    Args:
        kv_caches: tensors on one device.
        layout: where the pages lie in a slot.
        region: the slots; it stays mapped until ``close``.
        runtime: the device.
        piece_bytes: at most so many bytes are pinned at once, but at least one slot; None where the device
            cannot pin memory that it has not allocated.
        at_once, deadline_s: as for ``ThreadedEngine``.

    Raises:
        ValueError: region, layout and tensors do not fit each other.
    """

    def __init__(
        self,
        kv_caches: KVCaches,
        layout: SlotLayout,
        region: Region,
        runtime: Runtime,
        piece_bytes: int | None = PIECE_BYTES,
        at_once: int = 2,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        piece_slots = None if piece_bytes is None else max(1, piece_bytes // region.chunk_bytes)

        def open_queue(queue: CopyQueue) -> Prepare:
            return _QueueStream(runtime, queue).prepare

        super().__init__(kv_caches, layout, region, open_queue, piece_slots, at_once, deadline_s)
        self._runtime = runtime
        self._readers = threading.local()
        self._node = runtime.node()
        self._pinned = None if piece_slots is None else PinnedSlots(runtime, region, piece_slots)

    def read(self, plan: CopyPlan) -> None:
        """Copy on a stream that copies nothing else. See ``ThreadedEngine.read``."""
        self._runtime.attach()
        stream: Stream | None = getattr(self._readers, "stream", None)
        if stream is None:
            stream = self._readers.stream = self._runtime.open_stream(CopyQueue.STORE, plain=True)
        try:
            stream.copy(plan)
            stream.record().synchronize()
        except BaseException:
            del self._readers.stream
            raise

    @property
    def node(self) -> int | None:
        return self._node

    @property
    def pinning(self) -> Pinning:
        return Pinning() if self._pinned is None else Pinning(self._pinned.nbytes, self._pinned.failed)

    def close(self) -> None:
        """Drain, stop and unpin; what a copy is stuck with stays pinned. See ``TransferEngine.close``."""
        super().close()
        if self._pinned is not None and not self.is_stuck:
            self._pinned.close()


class _QueueStream:
    """The stream of a queue, replaced by a fresh one after each failure."""

    def __init__(self, runtime: Runtime, queue: CopyQueue) -> None:
        self._runtime = runtime
        self._queue = queue
        self._stream = runtime.open_stream(queue)

    def prepare(self, plan: CopyPlan) -> Begin:
        return partial(self._begin, plan, self._runtime.record_compute())

    def _begin(self, plan: CopyPlan, computed: Event, attempt: Attempt) -> Finish:
        self._runtime.attach()
        if attempt is not Attempt.FIRST:
            with suppress(Exception):  # what was begun after the one that failed keeps its place
                self._stream.record().synchronize()
            self._stream = self._runtime.open_stream(self._queue, plain=True)
        stream = self._stream
        stream.wait(computed)
        start = stream.record()
        try:
            _copy_staged(stream, plan) if attempt is Attempt.STAGED else stream.copy(plan)
        except BaseException:
            stream.record().synchronize()  # when one is refused, those before it are in flight
            raise
        return partial(self._finish, plan, computed, start, stream.record())

    def _finish(self, plan: CopyPlan, computed: Event, start: Event, end: Event) -> float:  # noqa: ARG002
        end.synchronize()  # the plan is kept until then
        return start.elapsed_time(end) / 1000


def _copy_staged(stream: Stream, plan: CopyPlan) -> None:
    """Make the copies of a load one by one, from memory of this process that is neither shared nor pinned."""
    memory = np.empty(int(plan.sizes.max(initial=1)), dtype=np.uint8)
    staging = np.array([memory.ctypes.data], dtype=np.uint64)
    for index, (source, nbytes) in enumerate(zip(plan.src.tolist(), plan.sizes.tolist(), strict=True)):
        ctypes.memmove(memory.ctypes.data, source, nbytes)
        here = slice(index, index + 1)
        stream.copy(CopyPlan(staging, plan.dst[here], plan.sizes[here], nbytes))
        stream.record().synchronize()
