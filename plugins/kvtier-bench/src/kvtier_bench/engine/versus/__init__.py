"""kvtier compared with vLLM's own tiering and LMCache: speed, and requests while the cache fails."""
