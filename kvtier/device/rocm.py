"""The backend for KV caches on AMD GPUs: torch's classes for CUDA, over HIP's runtime library.

What differs from CUDA: the names in the library, no call for many copies at once (HIP's is new, and takes no
attributes), and no kernel that reads the host's memory.
"""

from __future__ import annotations

import torch

from kvtier.device._cuda_runtime import RuntimeLibrary, TorchRuntime, find_library, only_device
from kvtier.device._methods import BatchedCopy, Method
from kvtier.device._streams import StreamEngine
from kvtier.device._threaded import require_device
from kvtier.device.base import DEADLINE_S, KVCaches
from kvtier.device.cuda import choice_for, common_methods
from kvtier.memory.layout import SlotLayout
from kvtier.memory.region import Region


def missing() -> str | None:
    """Say why AMD GPUs cannot be used here; None where they can."""
    if torch.version.hip is None:
        return "torch is not built for ROCm"
    return None if torch.cuda.is_available() else "torch finds no AMD GPU"


def open_library() -> RuntimeLibrary:
    """Return HIP's runtime library, as torch has loaded it. Raise ConfigError where it has not."""
    return RuntimeLibrary(find_library("libamdhip64"), "hip")


def methods_for(
    library: RuntimeLibrary,
    device: torch.device,  # noqa: ARG001
    batched_copy: BatchedCopy | None = None,
) -> dict[str, Method]:
    """Return all ways to copy, by name. See ``kvtier.device.cuda.methods_for``."""
    return common_methods(library, batched_copy)


def open_runtime(kv_caches: KVCaches, batched_copy: BatchedCopy | None = None) -> TorchRuntime:
    """Return the runtime of the GPU that all tensors are on. See ``kvtier.device.cuda.open_runtime``."""
    require_device(kv_caches, "cuda")  # torch's name for AMD's GPUs, too
    device = only_device(kv_caches)
    library = open_library()
    methods = methods_for(library, device, batched_copy)
    return TorchRuntime(device, library, methods, choice_for(device, library, methods))


def open_engine(
    kv_caches: KVCaches,
    layout: SlotLayout,
    region: Region,
    *,
    deadline_s: float = DEADLINE_S,
    batched_copy: BatchedCopy | None = None,
) -> StreamEngine:
    """Open the engine for tensors on one AMD GPU. See ``kvtier.device.auto.open_transfer_engine``."""
    runtime = open_runtime(kv_caches, batched_copy)
    return StreamEngine(kv_caches, layout, region, runtime, deadline_s=deadline_s)
