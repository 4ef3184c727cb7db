"""Measurements of tiers beside the bare disk, vLLM's files or the client library that they use."""
