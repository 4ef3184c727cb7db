"""A Triton kernel for tiny copies: the device's cores move what its copy engine is too slow to start.

It reads and writes the host's memory directly, which must be pinned. It takes cores from the engine's own
kernels, so it is one method among others, used where it measures faster.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from kvtier._device._methods import Method
from kvtier._device.plan import CopyPlan

_PROGRAMS = 16
"""Instances of the kernel: a fraction of a GPU's cores, enough to keep a link to the host busy."""

_WORD_BYTES = 8
_STEP_WORDS = 512


@triton.jit(do_not_specialize=["count", "programs"])  # compiled once, not again in the middle of work
def _copy_ranges(table, count, programs, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy range after range: ``table`` has the sources, then the destinations, then the lengths in words."""
    index = tl.program_id(0)
    lane = tl.arange(0, STEP)
    while index < count:
        source = tl.load(table + index).to(tl.pointer_type(tl.int64))
        target = tl.load(table + count + index).to(tl.pointer_type(tl.int64))
        words = tl.load(table + 2 * count + index)
        done = words * 0
        while done < words:
            inside = done + lane < words
            values = tl.load(source + done + lane, mask=inside, other=0)
            tl.store(target + done + lane, values, mask=inside)
            done += STEP
        index += programs


def gather_method(other: Method) -> Method:
    """Return the method that copies with one kernel.

    Args:
        other: is given plans with addresses or lengths that are no multiple of 8.
    """

    def copy(plan: CopyPlan, stream: Any) -> None:
        if np.any((plan.src | plan.dst | plan.sizes) % np.uint64(_WORD_BYTES)):
            other(plan, stream)
        else:
            with torch.cuda.stream(stream):
                launch(plan, stream.device)

    return copy


def launch(plan: CopyPlan, device: torch.device) -> None:
    """Start the kernel on the current stream of ``device``. All numbers of the plan are multiples of 8."""
    count = len(plan.sizes)
    table = torch.empty((3, count), dtype=torch.int64, pin_memory=device.type != "cpu")
    words = plan.sizes // np.uint64(_WORD_BYTES)
    for row, numbers in zip(table.numpy(), (plan.src, plan.dst, words), strict=True):
        row[:] = numbers.view(np.int64)
    programs = min(count, _PROGRAMS)
    _copy_ranges[(programs,)](table.to(device, non_blocking=True), count, programs, STEP=_STEP_WORDS)
