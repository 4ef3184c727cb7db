"""The backend for KV caches in host memory: it copies with the interpreter lock released."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from kvtier import _native as native
from kvtier._device._runtime import Runtime, Stream
from kvtier._device.base import CopyQueue
from kvtier._device.plan import CopyPlan
from kvtier._memory import numa

CopyFunction = Callable[[CopyPlan], None]
"""Makes the copies of a plan and returns when they are done."""


def copy_batch(plan: CopyPlan) -> None:
    """Make the copies of ``plan`` in one foreign call."""
    native.copy_batch(plan.src.ctypes.data, plan.dst.ctypes.data, plan.sizes.ctypes.data, len(plan.sizes))


def copy_each(plan: CopyPlan) -> None:
    for src, dst, size in zip(plan.src.tolist(), plan.dst.tolist(), plan.sizes.tolist(), strict=True):
        ctypes.memmove(dst, src, size)


@dataclass(frozen=True, slots=True)
class HostEvent:
    """An event that has always completed, because work in host memory ends before its call returns."""

    at_s: float = field(default_factory=time.perf_counter)

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: HostEvent, /) -> float:
        """Return the milliseconds between both events."""
        return (end_event.at_s - self.at_s) * 1000


class HostStream(Stream):
    """A ``Stream`` whose copies have ended when ``copy`` returns."""

    def __init__(self, copy: CopyFunction) -> None:
        self._copy = copy

    def wait(self, event: HostEvent) -> None:
        """Return at once, because the event has completed."""

    def record(self) -> HostEvent:
        return HostEvent()

    def copy(self, plan: CopyPlan) -> None:
        self._copy(plan)


class CpuRuntime(Runtime):
    """Host memory, which needs no pinning."""

    transfers_at_once = 1
    starts_with_copies = True
    can_pin = False

    def record_compute(self) -> HostEvent:
        return HostEvent()

    def node(self) -> int | None:
        """Return the node of the CPUs that this process may run on."""
        return numa.node_of_cpus(os.sched_getaffinity(0))

    def open_stream(self, queue: CopyQueue, *, plain: bool = False) -> HostStream:  # noqa: ARG002
        return HostStream(copy_each if plain else copy_batch)


def open_runtime(tensors: Sequence[torch.Tensor]) -> CpuRuntime:  # noqa: ARG001
    return CpuRuntime()
