"""The ways to give a device many copies at once.

The plan has joined neighbours before. The rest goes to the device in one call: the engine's own batched
operation where it has one, else that of the device's library. A way that does not copy a scratch buffer
right is not used. Memory that is not pinned is copied with one call for each copy.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from kvtier._device.base import BatchedCopy
from kvtier._device.plan import Addresses, CopyPlan

Method = Callable[[CopyPlan, Any], None]
"""Gives the copies of a plan, at least one, to a stream of torch's. Raises where one is refused: those before
it are in flight then."""

_COPIES, _COPY_BYTES = 64, 4096


def engine_method(operation: BatchedCopy) -> Method:
    """Return the method that uses the engine's own batched operation."""

    def copy(plan: CopyPlan, stream: Any) -> None:
        with torch.cuda.stream(stream):
            operation(*(torch.from_numpy(it.view(np.int64)) for it in (plan.src, plan.dst, plan.sizes)))

    return copy


def require_right(method: Method, device: torch.device, stream: Any) -> None:
    """Copy scattered ranges of a scratch buffer to the device and back.

    Raises:
        ValueError: wrong bytes were copied, or others were changed. Else whatever the method raises.
    """
    random, pinned = np.random.default_rng(1), device.type != "cpu"
    nbytes = 2 * _COPIES * _COPY_BYTES
    content = random.integers(0, 256, nbytes, np.uint8)
    source, there, back = (
        torch.from_numpy(content).pin_memory() if pinned else torch.from_numpy(content),
        torch.zeros(nbytes, dtype=torch.uint8, device=device),
        torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned),
    )
    places = [random.permutation(_COPIES) * 2 * _COPY_BYTES for _ in range(3)]
    addresses = [
        at.astype(np.uint64) + np.uint64(buffer.data_ptr())
        for at, buffer in zip(places, (source, there, back), strict=True)
    ]
    if pinned:  # the filling is work of another stream than the copies
        torch.accelerator.synchronize(device)
    sizes = np.full(_COPIES, _COPY_BYTES, dtype=np.uint64)
    for start, end in pairwise(addresses):
        method(CopyPlan(start, end, sizes, _COPIES * _COPY_BYTES), stream)
    stream.synchronize()
    for buffer, targets in ((there, places[1]), (back, places[2])):
        expected = np.zeros(nbytes, dtype=np.uint8)
        for origin, target in zip(places[0].tolist(), targets.tolist(), strict=True):
            expected[target : target + _COPY_BYTES] = content[origin : origin + _COPY_BYTES]
        if not np.array_equal(buffer.cpu().numpy(), expected):
            raise ValueError("it copied wrong bytes")


class PinnedMemory:
    """The host memory that is pinned without a gap, from the first piece on. One thread changes it."""

    def __init__(self) -> None:
        self._range = (0, 0)

    def add(self, address: int, nbytes: int) -> None:
        """Note a piece that is pinned now; one that leaves a gap is treated as not pinned."""
        start, end = self._range
        if start == end:
            self._range = (address, address + nbytes)
        elif address == end:
            self._range = (start, end + nbytes)

    def clear(self) -> None:
        """Treat all memory as not pinned from now on."""
        self._range = (0, 0)

    def holds(self, addresses: Addresses, sizes: Addresses) -> bool:
        """Return whether all these ranges are pinned."""
        start, end = self._range
        return int(addresses.min()) >= start and int((addresses + sizes).max()) <= end
