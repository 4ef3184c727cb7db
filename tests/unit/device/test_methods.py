"""Which way of copying is used for a plan, and which ways are not used at all."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from kvtier._device._methods import PinnedMemory, require_right
from kvtier._device.plan import CopyPlan

HOST = 1 << 40


class OverHostMemory:
    """A method that does what its name says, with all but the last of its faults in the bytes."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    def __call__(self, plan: CopyPlan, stream: Any) -> None:
        if self.fault == "refuses":
            raise OSError("the driver is too old")
        copies = list(zip(plan.src.tolist(), plan.dst.tolist(), plan.sizes.tolist(), strict=True))
        for source, target, size in copies[1:] if self.fault == "leaves one out" else copies:
            ctypes.memmove(target, source, size + (8 if self.fault == "copies too much" else 0))


@pytest.mark.parametrize("fault", ["", "leaves one out", "copies too much", "refuses"])
def test_a_method_that_copies_wrongly_or_is_refused_is_found_out(fault: str, played_torch: Any) -> None:
    def check() -> None:
        require_right(OverHostMemory(fault), torch.device("cpu"), played_torch.Stream())

    if not fault:
        check()
        return
    with pytest.raises((ValueError, OSError), match=r"wrong bytes|too old"):
        check()


@pytest.mark.parametrize(
    ("pieces", "all_pinned"),
    [
        ([], False),
        ([(HOST, 2**30)], True),
        ([(HOST, 2**14), (HOST + 2**14, 2**20)], True),
        ([(HOST, 2**14)], False),
        ([(HOST + 512, 2**30)], False),
        ([(HOST, 2**14), (HOST + 2**15, 2**20)], False),
    ],
)
def test_only_what_is_pinned_without_a_gap_counts(pieces: list[tuple[int, int]], all_pinned: bool) -> None:
    memory = PinnedMemory()
    for address, nbytes in pieces:
        memory.add(address, nbytes)
    addresses = np.arange(64, dtype=np.uint64) * np.uint64(1024) + np.uint64(HOST)
    sizes = np.full(64, 512, dtype=np.uint64)
    assert memory.holds(addresses, sizes) is all_pinned
    memory.clear()  # once a piece is unpinned
    assert not memory.holds(addresses, sizes)
