"""The Mooncake tier of kvtier: KV cache chunks in Mooncake Store, memory that several hosts pool."""

from kvtier_mooncake.config import MooncakeConfig
from kvtier_mooncake.tier import MooncakeTier

__all__ = ["MooncakeConfig", "MooncakeTier"]
