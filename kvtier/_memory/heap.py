"""Slots for tests and benchmarks, on private memory of this process."""

from __future__ import annotations

import ctypes
import mmap


class HeapMemory:
    """Page-aligned slots on anonymous memory: a ``SlotMemory`` without a primary tier.

    Args:
        slots: how many.
        chunk_bytes: bytes of one; a multiple of the page size keeps all of them aligned.

    Attributes:
        slots, chunk_bytes: as above.
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
