"""The backend for KV caches on AMD GPUs: torch's classes for CUDA, over HIP's runtime library.

The names in the library differ from CUDA's, and no call makes many copies at once: HIP's is new and takes no
attributes.
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
