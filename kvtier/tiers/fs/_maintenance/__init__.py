"""Background work on a root: counting, eviction, sweeping, recency and the quarantine.

``maintenance`` schedules it in two threads. ``evict``, ``sweep`` and ``quarantine`` need no engine, so
``kvtier gc`` uses them too. ``ages`` plans evictions.
"""
