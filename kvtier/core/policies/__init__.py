"""Eviction policies of the primary tier. Others are found through entry points in ``kvtier.policies``."""
