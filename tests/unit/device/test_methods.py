"""Which way of copying is chosen for a plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvtier._device._methods import (
    BATCH,
    CASES,
    EACH,
    GATHER,
    Case,
    Chooser,
    Method,
    PinnedMemory,
    Size,
    case_of,
)
from kvtier._device.base import CopyQueue
from kvtier._device.plan import CopyPlan

HOST = 1 << 40
DEVICE = 1 << 44


def scattered(count: int, nbytes: int, host: int = HOST) -> CopyPlan:
    """A load of so many copies."""
    places = np.arange(count, dtype=np.uint64) * np.uint64(2 * nbytes)
    sizes = np.full(count, nbytes, dtype=np.uint64)
    targets = np.random.default_rng(3).permutation(places)
    return CopyPlan(places + np.uint64(host), targets + np.uint64(DEVICE), sizes, count * nbytes)


@pytest.mark.parametrize(
    ("nbytes", "size"),
    [
        (8, Size.TINY),
        (4096, Size.TINY),
        (4104, Size.SMALL),
        (32768, Size.SMALL),
        (65536, Size.MIDDLE),
        (2**18 + 8, Size.LARGE),
        (2**23, Size.LARGE),
    ],
)
def test_a_case_depends_on_direction_and_mean_length(nbytes: int, size: Size) -> None:
    assert case_of(scattered(8, nbytes), is_store=False) == Case(False, size)
    assert case_of(scattered(8, nbytes), is_store=True) == Case(True, size)


def pinned(*pieces: tuple[int, int]) -> PinnedMemory:
    memory = PinnedMemory()
    for address, nbytes in pieces:
        memory.add(address, nbytes)
    return memory


def chooser(memory: PinnedMemory, chosen: str, queue: CopyQueue = CopyQueue.LOAD) -> Chooser:
    """Choose one method in every case."""
    unused: Any = object()
    methods: dict[str, Method] = {EACH: unused, BATCH: unused}
    return Chooser(methods, {str(case): chosen for case in CASES}, queue, memory)


@pytest.mark.parametrize(
    ("chosen", "count", "name"), [(BATCH, 64, BATCH), (GATHER, 64, EACH), (BATCH, 1, EACH), (BATCH, 0, EACH)]
)
def test_the_chosen_method_is_used_where_it_exists_and_there_are_several_copies(
    chosen: str, count: int, name: str
) -> None:
    assert chooser(pinned((HOST, 2**30)), chosen).name(scattered(count, 512)) == name


@pytest.mark.parametrize(
    ("pieces", "name"),
    [
        ([], EACH),
        ([(HOST, 2**30)], BATCH),
        ([(HOST, 2**14), (HOST + 2**14, 2**20)], BATCH),
        ([(HOST, 2**14)], EACH),
        ([(HOST + 512, 2**30)], EACH),
        ([(HOST, 2**14), (HOST + 2**15, 2**20)], EACH),
    ],
)
@pytest.mark.parametrize("queue", [CopyQueue.LOAD, CopyQueue.STORE])
def test_memory_that_is_not_all_pinned_is_copied_one_by_one(
    pieces: list[tuple[int, int]], name: str, queue: CopyQueue
) -> None:
    it, memory = scattered(64, 512), pinned(*pieces)
    plan = it if queue is CopyQueue.LOAD else CopyPlan(it.dst, it.src, it.sizes, it.nbytes)
    assert chooser(memory, BATCH, queue).name(plan) == name
    memory.clear()  # once a piece is unpinned
    assert chooser(memory, BATCH, queue).name(plan) == EACH
