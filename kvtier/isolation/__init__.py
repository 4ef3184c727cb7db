"""The tiers in a process of their own, over the primary tier's memory: nothing they do can end the engine.

``process`` is the engine's side of it, ``child`` the program of that process, ``remote`` the same for an
owner on an event loop.
"""
