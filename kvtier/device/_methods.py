"""The ways to give a device many copies at once, and which one is taken for a plan.

Neighbours are joined by the plan before. What is best for the rest depends on the device, its driver and
the sizes: it is measured (``kvtier.device._probe``), never assumed. Memory that is not pinned is copied one
by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvtier.device._threaded import CopyQueue
from kvtier.device.plan import Addresses, CopyPlan

_Integers = npt.NDArray[np.int64]

BatchedCopy = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
"""An engine's own operation. It takes sources, destinations and sizes as int64 tensors in host memory, shape
(copies,), and gives the copies to the current stream of the device."""

EACH, BATCH, STRIDED, ENGINE, GATHER = "each", "batch", "strided", "engine", "gather"

_ROWS_A_CALL = 4
"""A plan is regular when a strided call makes at least so many of its copies on average."""

_MAX_PITCH = 2**31 - 1  # cudaDevAttrMaxPitch


class Method(Protocol):
    """One way to give a plan's copies to a stream."""

    def copy(self, plan: CopyPlan, stream: Any) -> None:
        """Give the copies to torch's ``stream``. Raise where one is refused; those before are under way."""


class Library(Protocol):
    """What methods need of the device's runtime library; streams are handles. Errors are raised."""

    def copy(self, plan: CopyPlan, stream: int) -> None:
        """Give the copies one by one."""

    def copy_rows(self, rows: Rows, stream: int) -> None:
        """Give equally long copies at equal distances in one call."""


class BatchLibrary(Protocol):
    """What ``BatchCopy`` needs of it."""

    def copy_batch(self, plan: CopyPlan, stream: int) -> None:
        """Give all copies in one call."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Equally long copies at equal distances: row ``i`` begins ``i`` pitches from the start."""

    src: int
    dst: int
    src_pitch: int
    dst_pitch: int
    nbytes: int
    count: int


class EachCopy:
    """A call of the device's library for each copy, in one foreign call."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def copy(self, plan: CopyPlan, stream: Any) -> None:
        """See ``Method.copy``."""
        self._library.copy(plan, stream.cuda_stream)


class BatchCopy:
    """One call of the device's library for all copies."""

    def __init__(self, library: BatchLibrary) -> None:
        self._library = library

    def copy(self, plan: CopyPlan, stream: Any) -> None:
        """See ``Method.copy``."""
        if len(plan.sizes):
            self._library.copy_batch(plan, stream.cuda_stream)


class StridedCopy:
    """A call for each run of equally long copies at equal distances: for plans that are regular."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def copy(self, plan: CopyPlan, stream: Any) -> None:
        """See ``Method.copy``."""
        for rows in find_rows(plan):
            self._library.copy_rows(rows, stream.cuda_stream)


class EngineCopy:
    """The engine's own batched operation."""

    def __init__(self, operation: BatchedCopy) -> None:
        self._operation = operation

    def copy(self, plan: CopyPlan, stream: Any) -> None:
        """See ``Method.copy``."""
        if len(plan.sizes):
            with torch.cuda.stream(stream):
                self._operation(*(as_tensor(numbers) for numbers in (plan.src, plan.dst, plan.sizes)))


def as_tensor(numbers: Addresses) -> torch.Tensor:
    """Return the same memory as an int64 tensor."""
    return torch.from_numpy(numbers.view(np.int64))


def find_rows(plan: CopyPlan) -> list[Rows]:
    """Split a plan into runs of equally long copies at equal distances; a run can be of one copy."""
    src, dst, sizes = (numbers.view(np.int64) for numbers in (plan.src, plan.dst, plan.sizes))
    steps = np.column_stack((np.diff(src), np.diff(dst)))
    joins = (sizes[1:] == sizes[:-1]) & np.all((steps >= sizes[1:, None]) & (steps <= _MAX_PITCH), axis=1)
    # Copies i to i + 1 are the last of a run where the step after them is another one, or none that joins.
    ends = np.append(np.flatnonzero(np.any(steps[1:] != steps[:-1], axis=1) | ~joins[1:]), len(steps) - 1)
    rows, start = [], 0
    while start < len(sizes):
        count = 1
        pitches = (int(sizes[start]), int(sizes[start]))
        if start < len(joins) and joins[start]:
            count = int(ends[np.searchsorted(ends, start)]) + 2 - start
            pitches = (int(steps[start, 0]), int(steps[start, 1]))
        rows.append(Rows(int(src[start]), int(dst[start]), pitches[0], pitches[1], int(sizes[start]), count))
        start += count
    return rows


def is_regular(plan: CopyPlan) -> bool:
    """Say whether ``find_rows`` finds few runs of many copies."""
    if len(plan.sizes) < _ROWS_A_CALL:
        return False
    breaks = np.zeros(len(plan.sizes) - 2, dtype=np.bool_)
    for numbers in (plan.src, plan.dst):
        steps = np.diff(numbers)
        breaks |= steps[1:] != steps[:-1]
    breaks |= plan.sizes[2:] != plan.sizes[1:-1]
    # A run that ends in the middle of a plan breaks the steps twice: to the next run, and within it.
    return int(np.count_nonzero(breaks)) // 2 + 1 <= len(plan.sizes) // _ROWS_A_CALL


class Size(StrEnum):
    """Classes of the mean length of a plan's copies. The value names the largest length that is in it."""

    TINY = "4KiB"
    SMALL = "32KiB"
    MIDDLE = "256KiB"
    LARGE = "any"


_BOUNDS = ((4 * 2**10, Size.TINY), (32 * 2**10, Size.SMALL), (256 * 2**10, Size.MIDDLE))


@dataclass(frozen=True, slots=True)
class Case:
    """Plans that one method is chosen for.

    Attributes:
        is_store: whether the copies go to the host.
        size: how long they are.
        is_regular: whether they lie at equal distances.
    """

    is_store: bool
    size: Size
    is_regular: bool

    def __str__(self) -> str:
        way = "store" if self.is_store else "load"
        return f"{way} {self.size.value} {'regular' if self.is_regular else 'scattered'}"


CASES = tuple(
    Case(is_store, size, regular) for is_store in (True, False) for size in Size for regular in (True, False)
)

Choice = Mapping[str, str]
"""The name of the method for each case, by ``str(case)``."""


def case_of(plan: CopyPlan, is_store: bool) -> Case:
    """Return the case of a plan that is not empty."""
    mean = plan.nbytes // len(plan.sizes)
    size = next((size for bound, size in _BOUNDS if mean <= bound), Size.LARGE)
    return Case(is_store, size, is_regular(plan))


class PinnedMemory:
    """The pieces of host memory that are pinned. One thread adds and removes them, any thread may ask."""

    def __init__(self) -> None:
        self._pieces: dict[int, int] = {}
        self._span = (0, 0)  # what is pinned without a gap, from the first piece on

    def add(self, address: int, nbytes: int) -> None:
        """Note a piece that is pinned now."""
        start, end = self._span
        if start == end:
            self._span = (address, address + nbytes)
        elif address == end:
            self._span = (start, end + nbytes)
        self._pieces = {**self._pieces, address: address + nbytes}

    def remove(self, address: int) -> None:
        """Note that a piece is not pinned any more. The others are taken for not pinned, too."""
        self._span = (0, 0)
        self._pieces = {start: end for start, end in self._pieces.items() if start != address}

    def holds(self, addresses: Addresses, sizes: Addresses) -> bool:
        """Say whether all these ranges are pinned."""
        start, end = self._span
        return int(addresses.min()) >= start and int((addresses + sizes).max()) <= end

    def holds_in_one(self, addresses: Addresses, sizes: Addresses) -> bool:
        """Say whether all these ranges lie in one piece."""
        first, last = int(addresses.min()), int((addresses + sizes).max())
        return any(start <= first and last <= end for start, end in self._pieces.items())


class Chooser:
    """Gives a lane's plans to the method that was chosen for them.

    Args:
        methods: by name; one of them is ``EACH``, which can copy everything.
        choice: the name for each case; what is missing there is ``EACH``.
        way: the lane.
        pinned: what the device reaches on the host by itself.
    """

    def __init__(
        self, methods: Mapping[str, Method], choice: Choice, way: CopyQueue, pinned: PinnedMemory
    ) -> None:
        self._methods = methods
        self._choice = choice
        self._is_store = way is CopyQueue.STORE
        self._pinned = pinned

    def copy(self, plan: CopyPlan, stream: Any) -> None:
        """See ``Method.copy``."""
        self._methods[self.name(plan)].copy(plan, stream)

    def name(self, plan: CopyPlan) -> str:
        """Return the name of the method for a plan."""
        if len(plan.sizes) < 2 or not self._choice:
            return EACH
        host = plan.dst if self._is_store else plan.src
        if not self._pinned.holds(host, plan.sizes):
            return EACH
        name = self._choice.get(str(case_of(plan, self._is_store)), EACH)
        if name == STRIDED and not self._pinned.holds_in_one(host, plan.sizes):
            return EACH  # a call that touches two pieces is refused
        return name if name in self._methods else EACH
