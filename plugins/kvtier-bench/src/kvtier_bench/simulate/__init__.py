"""``kvtier simulate``: what an eviction policy would have kept of a recorded or generated trace."""
