"""Choosing the device backend: by the device that the KV cache is on, or by name."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import torch

from kvtier._device._engine import StreamEngine
from kvtier._device.base import DEADLINE_S, BatchedCopy, KVCaches, TransferEngine
from kvtier._memory.layout import SlotLayout
from kvtier._memory.region import Region
from kvtier.errors import ConfigError

BACKENDS = ("cpu", "cuda", "rocm", "xpu")
"""The backends: modules beside this one, each with ``missing`` and ``open_runtime``."""


def open_transfer_engine(
    kv_caches: KVCaches,
    layout: SlotLayout,
    region: Region,
    name: str | None = None,
    *,
    deadline_s: float = DEADLINE_S,
    batched_copy: BatchedCopy | None = None,
) -> TransferEngine:
    """Return the transfer engine for the tensors of ``kv_caches``.

    Args:
        name: name of the backend. Default: chosen by the tensors' device.
        deadline_s: seconds after which a copy counts as hung and the device is disabled.
        batched_copy: the engine's own operation for many copies at once, where it has one.

    Raises:
        ConfigError: there is no such backend, it cannot be used on this machine, the tensors are on
            another device than its own, or on several.
    """
    device = _device_of(kv_caches)
    backend = usable(name or _backend_of(device))
    if device.type != _torch_type(backend):
        raise ConfigError(f"the device backend {backend!r} cannot copy tensors on {device.type}")
    runtime = _module(backend).open_runtime(kv_caches.tensors, batched_copy)
    return StreamEngine(kv_caches, layout, region, runtime, deadline_s=deadline_s)


def possible() -> str:
    """Return a sentence about which backends can be used here, and why the others cannot."""
    why = {name: _module(name).missing() for name in BACKENDS}
    usable = ", ".join(name for name, reason in why.items() if reason is None)
    others = "; ".join(f"{name}: {reason}" for name, reason in why.items() if reason is not None)
    return f"possible here: {usable} ({others})"


def usable(name: str | None = None) -> str:
    """Return the name of a backend that can be used here: ``name``, or by default an accelerator's.

    Raises ConfigError if there is no such backend, or it cannot be used here.
    """
    if name is None:
        return next((it for it in reversed(BACKENDS) if _module(it).missing() is None), "cpu")
    if name not in BACKENDS:
        raise ConfigError(f"there is no device backend named {name!r}; {possible()}")
    if (why := _module(name).missing()) is not None:
        raise ConfigError(f"the device backend {name!r} cannot be used: {why}; {possible()}")
    return name


def torch_device(name: str) -> torch.device:
    """Return the device that holds a backend's tensors: the current one, if the machine has several."""
    kind = _torch_type(name)
    return (
        torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
    )


def description(name: str) -> str:
    """Return the name of the device that a backend uses here, with the versions of its software."""
    device = torch_device(name)
    if device.type == "cpu":
        return f"{os.cpu_count()} CPUs, torch {torch.__version__}"
    it = torch.get_device_module(device).get_device_properties(device)
    version = torch.version.hip or torch.version.cuda or torch.version.xpu
    driver = getattr(it, "driver_version", None) or _module(name).open_library().version("Driver")
    return f"{it.name}, driver {driver}, runtime {version}, torch {torch.__version__}"


def _device_of(kv_caches: KVCaches) -> torch.device:
    devices = {tensor.device for tensor in kv_caches.tensors}
    if len(devices) != 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ConfigError(f"the KV cache of a worker is on several devices ({names}); put it on one")
    return devices.pop()


def _torch_type(name: str) -> str:
    return "cuda" if name == "rocm" else name  # torch's name for AMD's GPUs, too


def _backend_of(device: torch.device) -> str:
    if device.type == "cuda" and torch.version.hip is not None:  # torch's name for AMD's GPUs, too
        return "rocm"
    if device.type not in BACKENDS:
        raise ConfigError(f"the KV cache is on a device of type {device.type!r}; {possible()}")
    return device.type


def _module(name: str) -> Any:
    return import_module(f"kvtier._device.backends.{name}")
