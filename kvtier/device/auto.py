"""Choosing the device backend: by the device that the KV cache is on, or by name."""

from __future__ import annotations

from importlib import import_module

from kvtier.device.base import KVCaches, TransferEngine
from kvtier.errors import ConfigError
from kvtier.memory.layout import SlotLayout
from kvtier.memory.region import Region

BACKENDS = {"cpu": "CpuTransferEngine", "cuda": "CudaTransferEngine"}
"""The backends of this version: the module beside this one, which is named like the device type of
its tensors, and its class."""


def open_transfer_engine(
    kv_caches: KVCaches, layout: SlotLayout, region: Region, name: str | None = None
) -> TransferEngine:
    """Open the transfer engine for the tensors of ``kv_caches``.

    Args:
        kv_caches: tensors that are all on one type of device.
        layout: where the pages lie in a slot.
        region: the slots.
        name: a backend, instead of the one that the tensors' device type says.

    Raises:
        ConfigError: there is no such backend, or the tensors are on devices that this version
            cannot copy from.
    """
    if name is None:
        name = _device_type(kv_caches)
    elif name not in BACKENDS:
        raise ConfigError(f"there is no device backend named {name!r}; there are: {_names()}")
    module = import_module(f"kvtier.device.{name}")
    engine: TransferEngine = getattr(module, BACKENDS[name])(kv_caches, layout, region)
    return engine


def _device_type(kv_caches: KVCaches) -> str:
    types = sorted({tensor.device.type for tensor in kv_caches.tensors})
    if len(types) != 1:
        raise ConfigError(
            f"the KV cache is on devices of {len(types)} types ({', '.join(types)}); one is possible"
        )
    if types[0] not in BACKENDS:
        raise ConfigError(
            f"the KV cache is on a device of type {types[0]!r}; this version of kvtier supports: {_names()}"
        )
    return types[0]


def _names() -> str:
    return ", ".join(sorted(BACKENDS))
