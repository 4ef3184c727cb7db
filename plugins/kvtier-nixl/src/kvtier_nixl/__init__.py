"""The NIXL tier of kvtier: KV cache chunks from the host memory of other engines."""

from kvtier_nixl.config import NixlConfig
from kvtier_nixl.tier import NixlTier

__all__ = ["NixlConfig", "NixlTier"]
