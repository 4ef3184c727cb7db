"""The tiers in their own process, over shared memory: a crash there costs the engine only misses.

``process`` is the engine's side, ``child`` the program of the tier process, ``remote`` the engine's side for
an owner on an event loop.
"""
