"""The backend for KV caches on Intel GPUs, through torch alone.

torch cannot pin memory there that it has not allocated, such as the slots: copies go through pinned buffers
of torch's, two for each queue, one of which the host fills or empties while the device copies the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from kvtier import _native as native
from kvtier._device._runtime import Runtime
from kvtier._device.base import BatchedCopy, CopyQueue
from kvtier._device.plan import Addresses, CopyPlan
from kvtier.errors import TransferError

BUFFER_BYTES = 8 * 2**20


def missing() -> str | None:
    """Return why Intel GPUs cannot be used here; None where they can."""
    return None if torch.xpu.is_available() else "torch finds no Intel GPU, or is not built for them"


class DeviceBytes:
    """The bytes of the engine's tensors, found by their addresses."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        ordered = sorted(tensors, key=lambda tensor: tensor.data_ptr())
        self._starts = np.array([tensor.data_ptr() for tensor in ordered], dtype=np.uint64)
        self._flat = [_flat(tensor) for tensor in ordered]

    def find(self, addresses: Addresses, sizes: Addresses) -> Iterator[torch.Tensor]:
        """Yield each range as a view of its tensor's bytes. Raise TransferError for one that is not there."""
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
    """Pinned memory, and the event after the last copy that the device makes with it."""

    def __init__(self, nbytes: int, pinned: bool) -> None:
        self.bytes = torch.empty(nbytes, dtype=torch.int8, pin_memory=pinned)
        self.used: Any = None

    @property
    def address(self) -> int:
        """Where it begins."""
        return self.bytes.data_ptr()

    def wait(self) -> None:
        """Block until the device is through with it."""
        if self.used is not None:
            self.used.synchronize()


class XpuStream:
    """A ``Stream`` of torch's, with buffers.

    Args:
        api: ``torch.xpu``.
        stream: torch's.
        memory: the engine's tensors.
        is_store: which way it copies.
        buffer_bytes: length of a buffer.
    """

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
        with self._api.stream(self._stream):
            self._store(plan) if self._is_store else self._load(plan)

    def _load(self, plan: CopyPlan) -> None:
        for number, piece in enumerate(_pieces(plan, self._buffer_bytes)):
            buffer = self._buffers[number % 2]
            buffer.wait()
            places, offsets = self._laid_out(buffer, piece)
            _copy_on_host(piece.src, places, piece.sizes)
            targets = self._memory.find(piece.dst, piece.sizes)
            for target, start in zip(targets, offsets, strict=True):
                target.copy_(buffer.bytes[start : start + len(target)], non_blocking=True)
            self._mark(buffer)

    def _store(self, plan: CopyPlan) -> None:
        arrived: tuple[_Buffer, Addresses, CopyPlan] | None = None
        for number, piece in enumerate(_pieces(plan, self._buffer_bytes)):
            buffer = self._buffers[number % 2]
            places, offsets = self._laid_out(buffer, piece)
            sources = self._memory.find(piece.src, piece.sizes)
            for source, start in zip(sources, offsets, strict=True):
                buffer.bytes[start : start + len(source)].copy_(source, non_blocking=True)
            self._mark(buffer)
            if arrived is not None:
                _empty(*arrived)
            arrived = (buffer, places, piece)
        if arrived is not None:
            _empty(*arrived)

    def _laid_out(self, buffer: _Buffer, piece: CopyPlan) -> tuple[Addresses, list[int]]:
        """Return where each copy's bytes are in the buffer, as addresses and as offsets."""
        offsets = np.cumsum(piece.sizes) - piece.sizes
        return offsets + np.uint64(buffer.address), offsets.tolist()

    def _mark(self, buffer: _Buffer) -> None:
        buffer.used = self.record()


def _empty(buffer: _Buffer, places: Addresses, piece: CopyPlan) -> None:
    """Copy what the device has brought to the slots."""
    buffer.wait()
    _copy_on_host(places, piece.dst, piece.sizes)


def _copy_on_host(src: Addresses, dst: Addresses, sizes: Addresses) -> None:
    native.copy_batch(src.ctypes.data, dst.ctypes.data, sizes.ctypes.data, len(sizes))


def _pieces(plan: CopyPlan, nbytes: int) -> Iterator[CopyPlan]:
    """Split a plan into plans of at most so many bytes; a copy that is longer is split as well."""
    src, dst, sizes = plan.src, plan.dst, plan.sizes
    if len(sizes) and int(sizes.max()) > nbytes:
        src, dst, sizes = _split(plan, nbytes)
    ends = np.cumsum(sizes)
    start, done = 0, 0
    while start < len(sizes):
        stop = int(np.searchsorted(ends, done + nbytes, side="right"))
        here = slice(start, stop)
        yield CopyPlan(src[here], dst[here], sizes[here], int(ends[stop - 1]) - done)
        start, done = stop, int(ends[stop - 1])


def _split(plan: CopyPlan, nbytes: int) -> tuple[Addresses, Addresses, Addresses]:
    step = np.uint64(nbytes)
    counts = -(-plan.sizes.astype(np.int64) // nbytes)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    offsets = (np.arange(int(counts.sum())) - first).astype(np.uint64) * step
    rest = np.repeat(plan.sizes, counts) - offsets
    return (
        np.repeat(plan.src, counts) + offsets,
        np.repeat(plan.dst, counts) + offsets,
        np.minimum(rest, step),
    )


class XpuRuntime(Runtime):
    """One Intel GPU.

    Args:
        tensors: the engine's, all on one device.
        api: ``torch.xpu``.
        buffer_bytes: length of each pinned buffer.
    """

    transfers_at_once = 1  # beginning one is work of the host, which would delay the end of the one before
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
        is_store = queue is CopyQueue.STORE
        stream = self._api.Stream(self._device)
        return XpuStream(self._api, stream, self._memory, is_store, self._buffer_bytes)


def open_runtime(tensors: Sequence[torch.Tensor], batched_copy: BatchedCopy | None) -> XpuRuntime:  # noqa: ARG001
    """Return the runtime of the Intel GPU that the tensors are on."""
    return XpuRuntime(tensors)
