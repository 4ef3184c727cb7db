"""The backend for KV caches on NVIDIA GPUs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from kvtier import _native as native
from kvtier._device.backends._cuda_runtime import RuntimeLibrary, TorchRuntime, find_library
from kvtier._device.plan import CopyPlan

_GROUP = 64
"""Copies of one batched call. The driver lets no other thread launch work until a call returns: with one call
for 4,096 pages of 16 KiB, a decode step of 1 ms took 36 ms on an H100, with these 1.1 ms."""

_IN_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream
_WITHOUT_FAILED_INDEX = 13000  # From this version on, the batched call has one argument fewer.


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
        self._tells_failed = self.version("Runtime") < _WITHOUT_FAILED_INDEX

    def copy_batch(self, plan: CopyPlan, stream: Any, around: native.Around = None) -> None:
        """Enqueue the copies of ``plan`` on a torch stream, up to the first group that is refused.

        One foreign call makes all groups. With one call per group and a busy engine thread, the waits for the
        interpreter lock took nine times as long as the copies. AttributeError if CUDA's library lacks the
        function.
        """
        function = self._address("MemcpyBatchAsync")
        arrays = (plan.src.ctypes.data, plan.dst.ctypes.data, plan.sizes.ctypes.data)
        attributes, count = ctypes.addressof(self._attributes), len(plan.sizes)
        code = native.copy_groups_async(
            function, self._tells_failed, attributes, arrays, count, _GROUP, stream.cuda_stream, around
        )
        self.check("MemcpyBatchAsync", code)


def open_library() -> Cudart:
    """Return the copy of CUDA's runtime library that torch calls. Raise ConfigError if torch has none."""
    return Cudart(find_library("libc10_cuda"))


def open_runtime(tensors: Sequence[torch.Tensor]) -> TorchRuntime:
    library = open_library()
    return TorchRuntime.open(tensors[0].device, library, library.copy_batch if native.available else None)
