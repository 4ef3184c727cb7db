"""The quota of a root: the ledger that all its writers share, and their leases in it.

``accounts`` is the arithmetic, ``ledger`` its file and the liveness of writers, ``quota`` one writer's puts.
"""
