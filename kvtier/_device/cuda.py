"""The backend for KV caches on NVIDIA GPUs."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from kvtier._device._cuda_runtime import RuntimeLibrary, TorchRuntime, find_library, first_right
from kvtier._device._methods import Method, engine_method
from kvtier._device._streams import StreamEngine
from kvtier._device._threaded import only_device
from kvtier._device.base import DEADLINE_S, BatchedCopy, KVCaches
from kvtier._device.plan import CopyPlan
from kvtier._memory.layout import SlotLayout
from kvtier._memory.region import Region

_IN_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream
_WITHOUT_FAILED_INDEX = 13000  # from this version on the batched call has one argument less


class _Attributes(ctypes.Structure):
    """cudaMemcpyAttributes: how sources are accessed; hints for memory that CUDA manages; flags."""

    _fields_ = [
        ("source_access_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("destination_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    ]


class Cudart(RuntimeLibrary):
    """CUDA's runtime library, with ``cudaMemcpyBatchAsync`` where it is new enough.

    That is called here and not through cuda-python, which takes the addresses as Python lists.

    Args:
        path: of the library.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._attributes = _Attributes(_IN_STREAM_ORDER)
        self._first = ctypes.c_size_t(0)
        self._tells_failed = self.runtime_version < _WITHOUT_FAILED_INDEX

    def copy_batch(self, plan: CopyPlan, stream: Any) -> None:
        """Give all copies of ``plan`` in one call, or none. The library has read the plan when this returns.

        Raises:
            AttributeError: the library is older than the call.
        """
        failed = (ctypes.byref(ctypes.c_size_t()),) if self._tells_failed else ()
        arrays = (plan.dst.ctypes.data, plan.src.ctypes.data, plan.sizes.ctypes.data)
        self.call(
            "MemcpyBatchAsync",
            *map(ctypes.c_void_p, arrays),
            ctypes.c_size_t(len(plan.sizes)),
            *(ctypes.byref(self._attributes), ctypes.byref(self._first), ctypes.c_size_t(1)),
            *failed,
            ctypes.c_void_p(stream.cuda_stream),
        )


def missing() -> str | None:
    """Return why NVIDIA GPUs cannot be used here; None where they can."""
    if torch.version.hip is not None:
        return "torch is built for ROCm"
    if torch.version.cuda is None:
        return "torch is built without CUDA"
    return None if torch.cuda.is_available() else "torch finds no NVIDIA GPU"


def open_library() -> Cudart:
    """Return CUDA's runtime library, as torch has loaded it. Raise ConfigError where it has not."""
    return Cudart(find_library("libcudart"))


def methods_for(library: Cudart, batched_copy: BatchedCopy | None = None) -> dict[str, Method]:
    """Return the ways to make many copies in one call, by name, the best first.

    Args:
        library: CUDA's.
        batched_copy: the engine's own operation.
    """
    own = {} if batched_copy is None else {"the engine's": engine_method(batched_copy)}
    return {**own, "cudaMemcpyBatchAsync": library.copy_batch}


def open_engine(
    kv_caches: KVCaches,
    layout: SlotLayout,
    region: Region,
    *,
    deadline_s: float = DEADLINE_S,
    batched_copy: BatchedCopy | None = None,
) -> StreamEngine:
    """Open the engine for tensors on one NVIDIA GPU. See ``kvtier._device.auto.open_transfer_engine``."""
    device = only_device(kv_caches, "cuda")
    library = open_library()
    batched = first_right(device, methods_for(library, batched_copy))
    runtime = TorchRuntime(device, library, batched)
    return StreamEngine(kv_caches, layout, region, runtime, deadline_s=deadline_s)
