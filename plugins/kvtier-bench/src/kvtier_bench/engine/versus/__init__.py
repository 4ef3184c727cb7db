"""kvtier beside vLLM's own tiering and LMCache: speed, and what becomes of requests when the cache fails."""
