"""The backend for KV caches on AMD GPUs: torch's classes for CUDA, over HIP's runtime library.

The library's function names differ from CUDA's. No call makes many copies at once, because HIP's batched call
is new and accepts no attributes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier._device.backends._cuda_runtime import RuntimeLibrary, TorchRuntime, find_library


def open_library() -> RuntimeLibrary:
    """Return the copy of HIP's runtime library that torch calls. Raise ConfigError if torch has none."""
    return RuntimeLibrary(find_library("libc10_hip"), "hip")


def open_runtime(tensors: Sequence[torch.Tensor]) -> TorchRuntime:
    return TorchRuntime.open(tensors[0].device, open_library())
