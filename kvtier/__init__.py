"""kvtier keeps the KV cache of an LLM engine in host memory and in slower, larger tiers behind it.

Operators of vLLM configure it by ``"spec_name": "KVTierOffloadingSpec"``. Engine authors use
``open_manager``. Authors of tiers subclass ``kvtier.tiers.SecondaryTier``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier._identity import Identity
from kvtier.errors import (
    AuditError,
    BlocksChangedError,
    ConfigError,
    DamagedSlotError,
    DeviceLostError,
    DeviceStuckError,
    IdentityError,
    IsolationError,
    KVTierError,
    RegionError,
    StateError,
    TierError,
    TransferError,
)
from kvtier.keys import OffloadKey, pack_key

if TYPE_CHECKING:
    from kvtier._build import open_manager
    from kvtier._config import TieringConfig
    from kvtier._device.base import KVCaches, PageMapping, PageRef
    from kvtier._manager.handles import Acquired, Written
    from kvtier._manager.manager import TieringManager
    from kvtier._manager.prometheus import prometheus_collector
    from kvtier._manager.statistics import Statistics, TierStatistics
    from kvtier._memory.region import HeapMemory

__all__ = [
    "Acquired",
    "AuditError",
    "BlocksChangedError",
    "ConfigError",
    "DamagedSlotError",
    "DeviceLostError",
    "DeviceStuckError",
    "HeapMemory",
    "Identity",
    "IdentityError",
    "IsolationError",
    "KVCaches",
    "KVTierError",
    "OffloadKey",
    "PageMapping",
    "PageRef",
    "RegionError",
    "StateError",
    "Statistics",
    "TierError",
    "TierStatistics",
    "TieringConfig",
    "TieringManager",
    "TransferError",
    "Written",
    "open_manager",
    "pack_key",
    "prometheus_collector",
]

_LAZY = {
    "Acquired": "kvtier._manager.handles",
    "HeapMemory": "kvtier._memory.region",
    "KVCaches": "kvtier._device.base",
    "PageMapping": "kvtier._device.base",
    "PageRef": "kvtier._device.base",
    "Statistics": "kvtier._manager.statistics",
    "TierStatistics": "kvtier._manager.statistics",
    "TieringConfig": "kvtier._config",
    "TieringManager": "kvtier._manager.manager",
    "Written": "kvtier._manager.handles",
    "open_manager": "kvtier._build",
    "prometheus_collector": "kvtier._manager.prometheus",
}
_EXTRAS = {"numpy": "torch", "prometheus_client": "prometheus", "torch": "torch"}


def __getattr__(name: str) -> object:
    """Import a public name at its first use, because some names need torch and others do not."""
    home = _LAZY.get(name)
    if home is None:
        raise AttributeError(f"module 'kvtier' has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(home), name)
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        from kvtier._plugins import install_command

        remedy = install_command("kvtier", _EXTRAS[error.name])
        message = f"kvtier.{name} needs {error.name}, which is not installed: {remedy}"
        raise ModuleNotFoundError(message, name=error.name) from error


def __dir__() -> list[str]:
    return sorted(__all__)
