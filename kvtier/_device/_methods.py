"""The ways to give a device many copies at once, and which one is used for a plan.

The plan has joined neighbours before. What is best for the rest depends on the device, its driver and the
sizes: it is measured (``kvtier._device._probe``), never assumed. Memory that is not pinned is copied with one
call for each copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import torch

from kvtier._device.base import BatchedCopy, CopyQueue
from kvtier._device.plan import Addresses, CopyPlan

Method = Callable[[CopyPlan, Any], None]
"""Gives the copies of a plan, at least one, to a stream of torch's. Raises where one is refused: those before
it are in flight then."""

EACH, BATCH, ENGINE, GATHER = "each", "batch", "engine", "gather"


def engine_method(operation: BatchedCopy) -> Method:
    """Return the method that uses the engine's own batched operation."""

    def copy(plan: CopyPlan, stream: Any) -> None:
        with torch.cuda.stream(stream):
            operation(*(torch.from_numpy(it.view(np.int64)) for it in (plan.src, plan.dst, plan.sizes)))

    return copy


class Size(StrEnum):
    """Classes of the mean length of a plan's copies. The value names the largest length of the class."""

    TINY = "4KiB"
    SMALL = "32KiB"
    MIDDLE = "256KiB"
    LARGE = "any"


_BOUNDS = ((4 * 2**10, Size.TINY), (32 * 2**10, Size.SMALL), (256 * 2**10, Size.MIDDLE))


@dataclass(frozen=True, slots=True)
class Case:
    """Plans that one method is chosen for: copies to the host or to the device, of one class of lengths."""

    is_store: bool
    size: Size

    def __str__(self) -> str:
        return f"{'store' if self.is_store else 'load'} {self.size.value}"


CASES = tuple(Case(is_store, size) for is_store in (True, False) for size in Size)

Choice = Mapping[str, str]
"""The name of the method for each case, by ``str(case)``."""


def case_of(plan: CopyPlan, is_store: bool) -> Case:
    """Return the case of a plan that is not empty."""
    mean = plan.nbytes // len(plan.sizes)
    return Case(is_store, next((size for bound, size in _BOUNDS if mean <= bound), Size.LARGE))


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


class Chooser:
    """Gives the plans of one queue to the method that was chosen for them.

    Args:
        methods: by name; one of them is ``EACH``, which can copy everything.
        choice: the name for each case; ``EACH`` where one is missing.
        queue: whose plans.
        pinned: the host memory that the device can access directly.
    """

    def __init__(
        self, methods: Mapping[str, Method], choice: Choice, queue: CopyQueue, pinned: PinnedMemory
    ) -> None:
        self._methods = methods
        self._choice = choice
        self._is_store = queue is CopyQueue.STORE
        self._pinned = pinned

    def copy(self, plan: CopyPlan, stream: Any) -> None:
        """Give the copies to a stream. See ``Method``."""
        self._methods[self.name(plan)](plan, stream)

    def name(self, plan: CopyPlan) -> str:
        """Return the name of the method for a plan."""
        if len(plan.sizes) < 2 or not self._choice:
            return EACH
        if not self._pinned.holds(plan.dst if self._is_store else plan.src, plan.sizes):
            return EACH
        name = self._choice.get(str(case_of(plan, self._is_store)), EACH)
        return name if name in self._methods else EACH
