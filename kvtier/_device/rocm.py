"""The backend for KV caches on AMD GPUs: torch's classes for CUDA, over HIP's runtime library.

What differs from CUDA: the names in the library, and no call for many copies at once: HIP's is new, and takes
no attributes.
"""

from __future__ import annotations

import torch

from kvtier._device._cuda_runtime import RuntimeLibrary, TorchRuntime, find_library, first_right
from kvtier._device._methods import engine_method
from kvtier._device._streams import StreamEngine
from kvtier._device._threaded import only_device
from kvtier._device.base import DEADLINE_S, BatchedCopy, KVCaches
from kvtier._memory.layout import SlotLayout
from kvtier._memory.region import Region


def missing() -> str | None:
    """Return why AMD GPUs cannot be used here; None where they can."""
    if torch.version.hip is None:
        return "torch is not built for ROCm"
    return None if torch.cuda.is_available() else "torch finds no AMD GPU"


def open_library() -> RuntimeLibrary:
    """Return HIP's runtime library, as torch has loaded it. Raise ConfigError where it has not."""
    return RuntimeLibrary(find_library("libamdhip64"), "hip")


def open_engine(
    kv_caches: KVCaches,
    layout: SlotLayout,
    region: Region,
    *,
    deadline_s: float = DEADLINE_S,
    batched_copy: BatchedCopy | None = None,
) -> StreamEngine:
    """Open the engine for tensors on one AMD GPU. See ``kvtier._device.auto.open_transfer_engine``."""
    device = only_device(kv_caches, "cuda")  # torch's name for AMD's GPUs, too
    library = open_library()
    methods = {} if batched_copy is None else {"the engine's": engine_method(batched_copy)}
    runtime = TorchRuntime(device, library, first_right(device, methods))
    return StreamEngine(kv_caches, layout, region, runtime, deadline_s=deadline_s)
