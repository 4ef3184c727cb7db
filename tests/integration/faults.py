"""Copies that fail when they are told to, in the process of an engine and in its workers."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

_WORD_BYTES = 8
_QUEUES = {"kvtier-store": 0, "kvtier-load": 1, "kvtier-expedited": 1}
_STAGED = 2
_RANK = 3


_FILE = "KVTIER_TEST_FAULTS"


def install(llm: Any, file: str) -> dict[str, Any]:
    """Make ``fail`` possible for the engine that is started next. Called in its process, as ``fail`` is."""
    Faults(file).install()
    return {}


def fail(llm: Any, **counts: int) -> dict[str, Any]:
    """Set how many copies fail from now on. See ``Faults.set``."""
    Faults().set(**counts)
    return {}


class Faults:
    """How many more copies fail. Shared by this process and those that it starts from now on.

    Args:
        path: a file to make, for the numbers; None for that of the process that started this one.
    """

    def __init__(self, path: str | None = None) -> None:
        if path is not None:
            os.environ[_FILE] = path
        with open(os.environ[_FILE], "r+b" if path is None else "w+b") as file:
            file.truncate(mmap.PAGESIZE)
            self._left = memoryview(mmap.mmap(file.fileno(), mmap.PAGESIZE)).cast("q")

    def install(self) -> None:
        """Have every engine for the CPU that is made from now on in this process ask for faults."""
        from kvtier._device import cpu

        init = cpu.CpuTransferEngine.__init__

        def faulty_init(engine: Any, kv_caches: Any, layout: Any, region: Any, deadline_s: float) -> None:
            copy = partial(self._copy, cpu.copy_plan)
            staged = partial(self._staged, cpu.copy_staged)
            init(engine, kv_caches, layout, region, copy=copy, staged=staged, deadline_s=deadline_s)

        cpu.CpuTransferEngine.__init__ = faulty_init  # type: ignore[method-assign,assignment]

    def set(self, *, stores: int = 0, loads: int = 0, staged: int = 0, rank: int = -1) -> None:
        """Let the next so many attempts of each kind fail, half-way; negative: all of them.

        Args:
            rank: the worker whose copies fail; negative for any.
        """
        for index, number in enumerate((stores, loads, staged, rank)):
            self._left[index] = number

    def _copy(self, copy: Callable[[Any], None], plan: Any) -> None:
        self._maybe_fail(_QUEUES[threading.current_thread().name], copy, plan)

    def _staged(self, copy: Callable[[Any], None], plan: Any) -> None:
        self._maybe_fail(_STAGED, copy, plan)

    def _maybe_fail(self, kind: int, copy: Callable[[Any], None], plan: Any) -> None:
        left = self._left
        if not left[kind] or left[_RANK] not in (-1, _rank()):
            copy(plan)
            return
        left[kind] -= left[kind] > 0
        half = len(plan.sizes) // 2
        copy(type(plan)(plan.src[:half], plan.dst[:half], plan.sizes[:half], 0))
        raise OSError("this copy was told to fail")


def _rank() -> int:
    import torch

    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
