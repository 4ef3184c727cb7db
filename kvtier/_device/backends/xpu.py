"""The backend for KV caches on Intel GPUs, through torch alone.

On Intel GPUs torch cannot pin memory that it has not allocated, such as the slots. So each queue copies
through two pinned buffers of torch's: the host fills or empties one while the device copies the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kvtier._device._runtime import Runtime, Stream
from kvtier._device.backends.cpu import copy_batch
from kvtier._device.base import CopyQueue
from kvtier._device.plan import Addresses, CopyPlan, split
from kvtier.errors import TransferError

BUFFER_BYTES = 8 * 2**20


class DeviceBytes:
    """The bytes of the engine's tensors, found by their addresses."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        ordered = sorted(tensors, key=lambda tensor: tensor.data_ptr())
        self._starts = np.array([tensor.data_ptr() for tensor in ordered], dtype=np.uint64)
        self._flat = [_flat(tensor) for tensor in ordered]

    def find(self, addresses: Addresses, sizes: Addresses) -> Iterator[torch.Tensor]:
        """Yield each range as a view of its tensor's bytes. Raise TransferError for an unknown range."""
        owners = np.searchsorted(self._starts, addresses, side="right") - 1
        offsets = addresses - self._starts[owners]
        for owner, start, size in zip(owners.tolist(), offsets.tolist(), sizes.tolist(), strict=True):
            view = self._flat[owner][start : start + size]
            if owner < 0 or len(view) != size:
                raise TransferError("a page is not in the engine's tensors")
            yield view


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    rows, width = tensor.shape
    return tensor.as_strided(((rows - 1) * tensor.stride(0) + width,), (1,)) if rows else tensor.reshape(-1)


class _Buffer:
    """Pinned memory through which copies are staged."""

    def __init__(self, nbytes: int, pinned: bool) -> None:
        self.bytes = torch.empty(nbytes, dtype=torch.int8, pin_memory=pinned)
        self.used: Any = None  # the event after the device's last copies with it
        # copies of a store to the slots, made after the device's copies
        self.arriving: CopyPlan | None = None

    def finish(self) -> None:
        """Block until the device has ended its copies, and copy arrived bytes to the slots."""
        if self.used is not None:
            self.used.synchronize()
        if self.arriving is not None:
            copy_batch(self.arriving)
            self.arriving = None


class XpuStream(Stream):
    """A torch ``Stream`` with two buffers of ``buffer_bytes`` each; ``api`` is ``torch.xpu``."""

    def __init__(self, api: Any, stream: Any, memory: DeviceBytes, is_store: bool, buffer_bytes: int) -> None:
        self._api = api
        self._stream = stream
        self._memory = memory
        self._is_store = is_store
        pinned = bool(api.is_available())
        self._buffers = (_Buffer(buffer_bytes, pinned), _Buffer(buffer_bytes, pinned))
        self._buffer_bytes = buffer_bytes

    def wait(self, event: Any) -> None:
        self._stream.wait_event(event)

    def record(self) -> Any:
        return self._stream.record_event(self._api.Event(enable_timing=True))

    def copy(self, plan: CopyPlan) -> None:
        """Enqueue the copies; the calling thread makes the host's part. See ``Stream.copy``."""
        for buffer in self._buffers:
            # Left by a copy that raised. Its slots may belong to another chunk by now.
            buffer.arriving = None
        with self._api.stream(self._stream):
            for number, part in enumerate(_parts(plan, self._buffer_bytes)):
                buffer = self._buffers[number % 2]
                buffer.finish()
                self._copy_through(buffer, part)
            if self._is_store:
                for buffer in self._buffers:
                    buffer.finish()

    def _copy_through(self, buffer: _Buffer, part: CopyPlan) -> None:
        offsets = np.cumsum(part.sizes) - part.sizes
        staged = offsets + np.uint64(buffer.bytes.data_ptr())
        pages = self._memory.find(part.src if self._is_store else part.dst, part.sizes)
        if not self._is_store:
            copy_batch(replace(part, dst=staged))
        for page, start in zip(pages, offsets.tolist(), strict=True):
            there = buffer.bytes[start : start + len(page)]
            source, target = (page, there) if self._is_store else (there, page)
            target.copy_(source, non_blocking=True)
        buffer.used = self.record()
        if self._is_store:
            buffer.arriving = replace(part, src=staged)


def _parts(plan: CopyPlan, nbytes: int) -> Iterator[CopyPlan]:
    """Split a plan, and copies that are too long, into plans of at most ``nbytes`` bytes."""
    plan = split(plan, nbytes)
    ends = np.cumsum(plan.sizes)
    start, done = 0, 0
    while start < len(ends):
        stop = int(np.searchsorted(ends, done + nbytes, side="right"))
        here = slice(start, stop)
        yield CopyPlan(plan.src[here], plan.dst[here], plan.sizes[here])
        start, done = stop, int(ends[stop - 1])


class XpuRuntime(Runtime):
    """The Intel GPU that the engine's tensors are on."""

    transfers_at_once = 1  # Starting a transfer is host work, which would delay the end of the previous one.
    can_pin = False

    def __init__(
        self, tensors: Sequence[torch.Tensor], api: Any = torch.xpu, buffer_bytes: int = BUFFER_BYTES
    ) -> None:
        self._device = tensors[0].device
        self._memory = DeviceBytes(tensors)
        self._api = api
        self._buffer_bytes = buffer_bytes

    def attach(self) -> None:
        self._api.set_device(self._device)

    def record_compute(self) -> Any:
        return self._api.current_stream(self._device).record_event(self._api.Event(enable_timing=True))

    def open_stream(self, queue: CopyQueue, *, plain: bool = False) -> XpuStream:  # noqa: ARG002
        stream, is_store = self._api.Stream(self._device), queue is CopyQueue.STORE
        return XpuStream(self._api, stream, self._memory, is_store, self._buffer_bytes)


def open_runtime(tensors: Sequence[torch.Tensor]) -> XpuRuntime:
    return XpuRuntime(tensors)
