"""Bytes that a root may hold: the ledger that all its writers share, and their reservations in it.

``accounts`` is the arithmetic, ``ledger`` its file and the liveness of writers, ``quota`` one writer's puts.
"""
