"""Slots for tests and benchmarks, on private memory of this process."""

from __future__ import annotations

import ctypes
import mmap


class HeapMemory:
    """Page-aligned slots in private memory, to test a tier without a primary tier.

    Args:
        slots: number of slots.
        chunk_bytes: size of a slot; a multiple of the page size keeps all slots aligned.

    Attributes:
        address: address of slot 0 in this process.
    """

    def __init__(self, slots: int, chunk_bytes: int) -> None:
        self.slots = slots
        self.chunk_bytes = chunk_bytes
        self._bytes = memoryview(mmap.mmap(-1, slots * chunk_bytes))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._bytes))

    def view(self, slot: int) -> memoryview:
        """Return the bytes of one slot: writable, one-dimensional, format ``B``."""
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} of {self.slots}")
        start = slot * self.chunk_bytes
        return self._bytes[start : start + self.chunk_bytes]
