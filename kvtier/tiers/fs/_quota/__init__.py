"""Bytes that a root may hold: owns the ledger that all its writers share, the leases in it, and reservations.

``accounts`` is the arithmetic, ``ledger`` its file and the liveness of writers, ``quota`` one writer's lease
and the room that its puts reserve of it.
"""
