"""The rest of SGLang's older interface, which makes an additional copy and is not used."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage


class V1Only(HiCacheStorage):
    """A storage that SGLang uses through ``batch_get_v1`` and ``batch_set_v1``."""

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Return None. SGLang does not call this with ``interface_v1``, which is required."""
        return None

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Return None for each key, as ``get`` does."""
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Return False. Nothing is stored through this method; see ``get``."""
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Return False, as ``set`` does."""
        return False
