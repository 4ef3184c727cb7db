"""Measurements of tiers, compared with the bare disk, vLLM's files or their client library."""
