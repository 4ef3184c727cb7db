"""Selection of the device backend: by the KV cache's device, or by name."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from kvtier._device._engine import TransferEngine
from kvtier._device.base import DEADLINE_S, KVCaches
from kvtier._memory.layout import SlotLayout
from kvtier._memory.region import Region
from kvtier.errors import ConfigError

BACKENDS = ("cpu", "cuda", "rocm", "xpu")
"""The backends: modules of the package ``backends``, each with ``missing`` and ``open_runtime``."""


def open_transfer_engine(
    kv_caches: KVCaches,
    layout: SlotLayout,
    region: Region,
    name: str | None = None,
    *,
    deadline_s: float = DEADLINE_S,
) -> TransferEngine:
    """Return the transfer engine for these tensors, of the backend ``name`` or by their device.

    ConfigError if the backend does not exist or is unusable on this machine, or if the tensors are on several
    devices or on one of another backend.
    """
    device = _device_of(kv_caches)
    backend = usable(name or _backend_of(device))
    if device.type != torch_type(backend):
        raise ConfigError(f"the device backend {backend!r} cannot copy tensors on {device.type}")
    runtime = backend_module(backend).open_runtime(kv_caches.tensors)
    return TransferEngine(kv_caches, layout, region, runtime, deadline_s=deadline_s)


def possible() -> str:
    """Return a sentence that lists the usable backends, and why the others are unusable."""
    why = {name: backend_module(name).missing() for name in BACKENDS}
    usable = ", ".join(name for name, reason in why.items() if reason is None)
    others = "; ".join(f"{name}: {reason}" for name, reason in why.items() if reason is not None)
    return f"possible here: {usable} ({others})"


def usable(name: str) -> str:
    """Return the name of a backend; ConfigError if it does not exist, or is unusable here."""
    if name not in BACKENDS:
        raise ConfigError(f"there is no device backend named {name!r}; {possible()}")
    if (why := backend_module(name).missing()) is not None:
        raise ConfigError(f"the device backend {name!r} cannot be used: {why}; {possible()}")
    return name


def _device_of(kv_caches: KVCaches) -> torch.device:
    devices = {tensor.device for tensor in kv_caches.tensors}
    if len(devices) != 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ConfigError(f"the KV cache of a worker is on several devices ({names}); put it on one")
    return devices.pop()


def torch_type(name: str) -> str:
    """Return torch's name for the devices of a backend."""
    return "cuda" if name == "rocm" else name


def _backend_of(device: torch.device) -> str:
    if device.type == "cuda" and torch.version.hip is not None:  # torch's name for AMD's GPUs, too
        return "rocm"
    if device.type not in BACKENDS:
        raise ConfigError(f"the KV cache is on a device of type {device.type!r}; {possible()}")
    return device.type


def backend_module(name: str) -> Any:
    return import_module(f"kvtier._device.backends.{name}")
