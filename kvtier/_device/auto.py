"""Selection of the device backend by the KV cache's device."""

from __future__ import annotations

from importlib import import_module

import torch

from kvtier._device._engine import TransferEngine
from kvtier._device.base import DEADLINE_S, KVCaches
from kvtier._memory.layout import SlotLayout
from kvtier._memory.region import Region
from kvtier.errors import ConfigError

BACKENDS = ("cpu", "cuda", "rocm", "xpu")
"""The backends: modules of the package ``backends``, each with ``open_runtime``."""


def open_transfer_engine(
    kv_caches: KVCaches, layout: SlotLayout, region: Region, *, deadline_s: float = DEADLINE_S
) -> TransferEngine:
    """Return the transfer engine for these tensors.

    ConfigError if they are on several devices, or on a device without a backend.
    """
    module = import_module(f"kvtier._device.backends.{_backend_of(kv_caches)}")
    runtime = module.open_runtime(kv_caches.tensors)
    return TransferEngine(kv_caches, layout, region, runtime, deadline_s=deadline_s)


def _backend_of(kv_caches: KVCaches) -> str:
    devices = {tensor.device for tensor in kv_caches.tensors}
    if len(devices) != 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ConfigError(f"the KV cache of a worker is on several devices ({names}); put it on one")
    kind = devices.pop().type
    if kind == "cuda" and torch.version.hip is not None:  # torch uses this name for AMD's GPUs, too
        return "rocm"
    if kind not in BACKENDS:
        raise ConfigError(f"the KV cache is on a device of type {kind!r}; possible are {', '.join(BACKENDS)}")
    return kind
