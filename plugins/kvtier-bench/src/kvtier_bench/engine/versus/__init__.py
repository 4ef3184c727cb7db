"""kvtier beside vLLM's own tiering and LMCache: speed, and how requests fare when the cache fails."""
