"""kvtier keeps the KV cache of an LLM engine in host memory and in slower, larger tiers behind it.

Operators of vLLM configure it by ``"spec_name": "KVTierOffloadingSpec"``. Engine authors use
``open_manager``. Authors of tiers subclass ``kvtier.tiers.base.SecondaryTier``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.build import open_manager as open_manager
    from kvtier.config import TieringConfig as TieringConfig
    from kvtier.device.base import KVCaches as KVCaches
    from kvtier.device.base import PageRef as PageRef
    from kvtier.errors import KVTierError as KVTierError
    from kvtier.identity import Identity as Identity
    from kvtier.keys import OffloadKey as OffloadKey
    from kvtier.keys import pack_key as pack_key
    from kvtier.manager import TieringManager as TieringManager

_HOMES = {
    "Identity": "kvtier.identity",
    "KVCaches": "kvtier.device.base",
    "KVTierError": "kvtier.errors",
    "OffloadKey": "kvtier.keys",
    "PageRef": "kvtier.device.base",
    "TieringConfig": "kvtier.config",
    "TieringManager": "kvtier.manager",
    "open_manager": "kvtier.build",
    "pack_key": "kvtier.keys",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: some need torch, which others do without."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kvtier' has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(home), name)
    except ModuleNotFoundError as error:
        if error.name not in ("numpy", "torch"):
            raise
        message = f"kvtier.{name} needs {error.name}, which is not installed: pip install 'kvtier[torch]'"
        raise ModuleNotFoundError(message, name=error.name) from error


def __dir__() -> list[str]:
    return sorted(__all__)
