"""The file tier: chunks as files below one directory."""

from kvtier.tiers.fs.config import FsConfig
from kvtier.tiers.fs.tier import FsStatistics, FsTier

__all__ = ["FsConfig", "FsStatistics", "FsTier"]
