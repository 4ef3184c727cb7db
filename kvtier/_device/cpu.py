"""The backend for KV caches in host memory: threads that copy with the interpreter lock released."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from functools import partial

from kvtier import _native as native
from kvtier._device._threaded import Begin, ThreadedEngine, only_device
from kvtier._device.base import DEADLINE_S, Attempt, BatchedCopy, KVCaches
from kvtier._device.plan import CopyPlan
from kvtier._memory import numa
from kvtier._memory.layout import SlotLayout
from kvtier._memory.region import Region


def copy_plan(plan: CopyPlan) -> None:
    """Make the copies of ``plan`` in one foreign call."""
    native.copy_batch(plan.src.ctypes.data, plan.dst.ctypes.data, plan.sizes.ctypes.data, len(plan.sizes))


def copy_staged(plan: CopyPlan) -> None:
    """Make the copies of ``plan`` one by one, each through memory of its own."""
    for src, dst, size in zip(plan.src.tolist(), plan.dst.tolist(), plan.sizes.tolist(), strict=True):
        ctypes.memmove(dst, ctypes.string_at(src, size), size)


def copy_each(plan: CopyPlan) -> None:
    """Make the copies of ``plan`` one by one."""
    for src, dst, size in zip(plan.src.tolist(), plan.dst.tolist(), plan.sizes.tolist(), strict=True):
        ctypes.memmove(dst, src, size)


class CpuTransferEngine(ThreadedEngine):
    """Copies between tensors in host memory and slots.

    Args:
        kv_caches: tensors on the CPU.
        layout: where the pages lie in a slot.
        region: the slots; it stays mapped until ``close``.
        copy: makes the copies of one plan and returns when they are done.
        staged: the same in another way, where ``copy`` fails again and again.
        deadline_s: as for ``ThreadedEngine``.

    Raises:
        ConfigError: a tensor is on another device.
        ValueError: region, layout and tensors do not fit each other.
    """

    def __init__(
        self,
        kv_caches: KVCaches,
        layout: SlotLayout,
        region: Region,
        copy: Callable[[CopyPlan], None] = copy_plan,
        staged: Callable[[CopyPlan], None] = copy_staged,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        only_device(kv_caches, "cpu")

        def prepare(plan: CopyPlan) -> Begin:
            return lambda attempt: partial(_timed, staged if attempt is Attempt.STAGED else copy, plan)

        super().__init__(kv_caches, layout, region, lambda _: prepare, deadline_s=deadline_s)

    def read(self, plan: CopyPlan) -> None:
        copy_each(plan)

    @property
    def node(self) -> int | None:
        """The node of the CPUs that this process may run on."""
        return numa.node_of_cpus(os.sched_getaffinity(0))


def missing() -> str | None:
    """Return None: host memory can always be copied."""
    return None


def open_engine(
    kv_caches: KVCaches,
    layout: SlotLayout,
    region: Region,
    *,
    deadline_s: float = DEADLINE_S,
    batched_copy: BatchedCopy | None = None,  # noqa: ARG001
) -> CpuTransferEngine:
    """Open the engine for tensors in host memory. See ``kvtier._device.auto.open_transfer_engine``."""
    return CpuTransferEngine(kv_caches, layout, region, deadline_s=deadline_s)


def _timed(copy: Callable[[CopyPlan], None], plan: CopyPlan) -> float:
    start = time.perf_counter()
    copy(plan)
    return time.perf_counter() - start
