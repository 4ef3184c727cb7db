"""Eviction policies of the primary tier. Others are found through entry points in ``kvtier.policies``."""

from kvtier.policies._arc import ARC
from kvtier.policies._auto import Auto
from kvtier.policies._base import EvictionPolicy, Run
from kvtier.policies._lhd import LHD
from kvtier.policies._lru import LRU

__all__ = ["ARC", "LHD", "LRU", "Auto", "EvictionPolicy", "Run"]
