"""Comparison of kvtier, vLLM's own tiering and LMCache: speed, and requests while the cache fails."""
