"""Background work on a root: owns counting, eviction, sweeping, recency and the quarantine.

``maintenance`` schedules it in two threads. ``evict``, ``sweep`` and ``quarantine`` need no engine, and
``kvtier gc`` uses them too; ``ages`` decides what leaves.
"""
