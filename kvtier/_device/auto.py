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
        kv_caches: tensors, all on devices of one type.
        layout: the places of pages in a slot.
        region: the slots.
        name: name of the backend. Default: chosen by the tensors' device.
        deadline_s: seconds after which a copy counts as hung and the device is disabled.
        batched_copy: the engine's own operation for many copies at once, where it has one.

    Raises:
        ConfigError: there is no such backend, it cannot be used on this machine, or the tensors are on
            another device than its own.
    """
    backend = usable(name or _backend_of(kv_caches))
    _require_one_device(kv_caches, backend)
    runtime = _module(backend).open_runtime(kv_caches.tensors, batched_copy)
    return StreamEngine(kv_caches, layout, region, runtime, deadline_s=deadline_s)


def possible() -> str:
    """Return a sentence about which backends can be used here, and why the others cannot."""
    why = {name: _module(name).missing() for name in BACKENDS}
    usable = ", ".join(name for name, reason in why.items() if reason is None)
    others = "; ".join(f"{name}: {reason}" for name, reason in why.items() if reason is not None)
    return f"possible here: {usable} ({others})"


def usable(name: str | None = None) -> str:
    """Return the name of a backend that can be used here: the one that is asked for, or an accelerator's.

    Raises:
        ConfigError: there is no such backend, or it cannot be used here.
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
    driver = getattr(it, "driver_version", None) or _module(name).open_library().driver_version
    return f"{it.name}, driver {driver}, runtime {version}, torch {torch.__version__}"


def _require_one_device(kv_caches: KVCaches, name: str) -> None:
    devices = {tensor.device for tensor in kv_caches.tensors}
    if others := {device.type for device in devices} - {_torch_type(name)}:
        raise ConfigError(f"the device backend {name!r} cannot copy tensors on {', '.join(sorted(others))}")
    if len(devices) != 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ConfigError(f"the KV cache of a worker is on several GPUs ({names}); put it on one")


def _torch_type(name: str) -> str:
    return "cuda" if name == "rocm" else name  # torch's name for AMD's GPUs, too


def _backend_of(kv_caches: KVCaches) -> str:
    types = sorted({tensor.device.type for tensor in kv_caches.tensors})
    if len(types) != 1:
        raise ConfigError(
            f"the KV cache is on devices of several types ({', '.join(types)}); put it on one device"
        )
    (name,) = types
    if name == "cuda" and torch.version.hip is not None:  # torch's name for AMD's GPUs, too
        return "rocm"
    if name not in BACKENDS:
        raise ConfigError(f"the KV cache is on a device of type {name!r}; {possible()}")
    return name


def _module(name: str) -> Any:
    return import_module(f"kvtier._device.backends.{name}")
