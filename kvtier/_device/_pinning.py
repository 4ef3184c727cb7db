"""Pinning of the slots, in pieces and in the background, while the engine already uses them."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

from kvtier._device._runtime import Runtime
from kvtier._device.base import Pinning
from kvtier._log import GuardedLogger
from kvtier._memory import numa
from kvtier._memory.region import Region
from kvtier.errors import StateError

logger = GuardedLogger("kvtier.device")

PIECE_BYTES = 32 * 2**20
"""Bytes pinned in one call: no other thread can launch work on the device during the call.
On an H100 a call takes 1.5 ms if the memory is populated, else ten times as long."""

THREAD_NAME = "kvtier-pin"
"""The name of a thread that ends when everything is pinned, or nothing more can be."""


class PinnedSlots:
    """Pins the slots in a thread, piece by piece, and keeps them mapped until it has unpinned them.

    CUDA refuses a copy that touches two pieces: the copy plans keep to the same ``piece_slots``.
    """

    def __init__(self, runtime: Runtime, region: Region, piece_slots: int) -> None:
        self.state = Pinning()
        self._runtime = runtime
        self._piece_slots = piece_slots
        self._region = region
        self._mapped: memoryview | None = region.view(0)
        self._pieces: list[int] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Unpin. No copy may be in flight. May be called again."""
        self._stopping.set()
        self._thread.join()
        if self._pieces:  # In a new thread, so that the caller's thread is not attached to the device.
            thread = threading.Thread(target=self._unpin, name="kvtier-unpin", daemon=True)
            thread.start()
            thread.join()
        self._mapped = None

    def _work(self) -> None:
        try:
            self._runtime.attach()
            with numa.preferring(self._runtime.node()):  # for memory that pinning populates
                self._pin()
        except StateError:
            pass  # the region is closed, so nothing needs pinning
        except Exception as error:
            self.state = replace(self.state, failed=True)
            logger.warning(
                "%d of %d bytes of the primary tier are pinned, the rest cannot be (%s): copies to and "
                "from the rest are slower",
                self.state.nbytes,
                self._region.nbytes,
                error,
            )

    def _pin(self) -> None:
        region = self._region
        for first in range(0, region.slots, self._piece_slots):
            if self._stopping.is_set():
                return
            slots = range(first, min(first + self._piece_slots, region.slots))
            region.back(slots)
            began_s = time.monotonic()
            address, nbytes = region.address + first * region.chunk_bytes, len(slots) * region.chunk_bytes
            self._runtime.host_register(address, nbytes)
            self._pieces.append(address)
            self.state = replace(self.state, nbytes=self.state.nbytes + nbytes)
            # Otherwise this thread would win the lock again at each turn.
            self._stopping.wait(time.monotonic() - began_s)

    def _unpin(self) -> None:
        self.state = replace(self.state, nbytes=0)
        self._runtime.attach()
        while self._pieces:
            try:
                self._runtime.host_unregister(self._pieces.pop(0))
            except Exception:  # the remaining pieces must be unpinned, too
                logger.exception("a piece of the primary tier cannot be unpinned")
