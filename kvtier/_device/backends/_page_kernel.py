"""Copies of many small pages with a kernel: the device's processors read page-locked host memory.

A GPU's copy engine starts a copy every few microseconds, however small, so small pages reach a tenth of the
link's speed. The kernel takes a few processors from computation, for a tenth of the time. ``docs/devices.md``
has the figures. Importing this module needs Triton, which comes with torch for GPUs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from kvtier._device.plan import CopyPlan, split

_PROGRAMS = 16  # each takes one of the GPU's processors; with fewer, 4 KiB pages are slower on an H100
_WARPS = 16
_WORDS = _WARPS * 32 * 8  # of 8 bytes, per step of a program: four times 16 bytes for each thread

_FEWEST_COPIES = 16  # with fewer copies, starting a kernel takes longer than the copies
_LARGEST_MEAN = 32 * 1024  # Above this size, the copy engine is as fast, and takes nothing from computation.
_ALIGNMENT = 16


def suits(plan: CopyPlan) -> bool:
    """Return whether the kernel can make these copies, and is likely to be faster than the copy engine."""
    count = len(plan.sizes)
    if count < _FEWEST_COPIES or plan.nbytes > count * _LARGEST_MEAN:
        return False
    return not int(np.bitwise_or.reduce(plan.src | plan.dst | plan.sizes)) % _ALIGNMENT


def copy(plan: CopyPlan, stream: Any, around: object = None) -> None:  # noqa: ARG001
    """Enqueue the copies of ``plan``, as one kernel, on a torch stream, without events.

    All addresses are valid on the device.
    """
    steps = split(plan, 8 * _WORDS)
    table = torch.from_numpy(np.stack((steps.src, steps.dst, steps.sizes)).view(np.int64)).pin_memory()
    count = len(steps.sizes)
    with torch.cuda.stream(stream):  # torch keeps both tables until the stream no longer uses them.
        on_device = table.to(stream.device, non_blocking=True)
        _copy_steps[(min(_PROGRAMS, count),)](on_device, count, WORDS=_WORDS, num_warps=_WARPS)


@triton.jit(do_not_specialize=["count"])  # compiled once, when it is tried first
def _copy_steps(table, count, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Make the copies in ``table`` (int64, shape (3, count): sources, destinations, bytes)."""
    for step in range(tl.program_id(0), count, tl.num_programs(0)):
        words = tl.arange(0, WORDS)
        source = tl.multiple_of(tl.load(table + step).to(tl.pointer_type(tl.int64)), 16)
        target = tl.multiple_of(tl.load(table + count + step).to(tl.pointer_type(tl.int64)), 16)
        mask = words < tl.multiple_of(tl.load(table + 2 * count + step) // 8, 2)
        content = tl.load(source + words, mask=mask, cache_modifier=".cg")
        tl.store(target + words, content, mask=mask, cache_modifier=".cs")
