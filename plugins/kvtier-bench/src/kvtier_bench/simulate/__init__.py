"""``kvtier simulate``: the hits of eviction policies on a recorded or generated trace."""
