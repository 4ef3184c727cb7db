"""Slots for tests and benchmarks, on private memory of this process."""

from __future__ import annotations

from kvtier._memory.region import Region


class HeapMemory(Region):
    """Page-aligned slots in private memory, to test a tier without a primary tier.

    Args:
        slots: number of slots.
        chunk_bytes: size of a slot; a multiple of the page size keeps all slots aligned.
    """

    def __init__(self, slots: int, chunk_bytes: int) -> None:
        super().__init__(slots, chunk_bytes)
