"""The file tier: chunks as files below one directory."""

from kvtier.tiers.fs._config import FsConfig
from kvtier.tiers.fs._tier import FsStatistics, FsTier

__all__ = ["FsConfig", "FsStatistics", "FsTier"]
