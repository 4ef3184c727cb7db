"""kvtier's tiers as the storage of SGLang's HiCache: ``--hicache-storage-backend dynamic`` loads it."""

from kvtier_sglang.storage import KVTierStorage

__all__ = ["KVTierStorage"]
