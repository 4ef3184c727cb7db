"""The backend for KV caches on NVIDIA GPUs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from kvtier._device.backends._cuda_runtime import RuntimeLibrary, TorchRuntime, find_library
from kvtier._device.base import BatchedCopy
from kvtier._device.plan import CopyPlan

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
    """CUDA's runtime library, with ``cudaMemcpyBatchAsync`` if it is new enough.

    It is called here and not through cuda-python, which takes the addresses as Python lists.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._attributes = _Attributes(_IN_STREAM_ORDER)
        self._first = ctypes.c_size_t(0)
        self._tells_failed = self.version("Runtime") < _WITHOUT_FAILED_INDEX

    def copy_batch(self, plan: CopyPlan, stream: Any) -> None:
        """Give all copies of ``plan`` in one call, or none. The library has read the plan when this returns.

        AttributeError if the library lacks the call.
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
    """Return why NVIDIA GPUs cannot be used here; None if they can."""
    if torch.version.hip is not None:
        return "torch is built for ROCm"
    if torch.version.cuda is None:
        return "torch is built without CUDA"
    return None if torch.cuda.is_available() else "torch finds no NVIDIA GPU"


def open_library() -> Cudart:
    """Return the copy of CUDA's runtime library that torch calls. Raise ConfigError if torch has none."""
    return Cudart(find_library("libc10_cuda"))


def open_runtime(tensors: Sequence[torch.Tensor], batched_copy: BatchedCopy | None) -> TorchRuntime:
    """Return the runtime of the NVIDIA GPU that the tensors are on."""
    library = open_library()
    return TorchRuntime.open(
        tensors[0].device, library, batched_copy, {"cudaMemcpyBatchAsync": library.copy_batch}
    )
