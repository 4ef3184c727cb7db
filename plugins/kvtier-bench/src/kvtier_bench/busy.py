"""What computes in pure Python meanwhile, as an engine does: a thread of this process, or another process."""

from __future__ import annotations

import ctypes
import multiprocessing
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from multiprocessing.sharedctypes import RawValue
from typing import Any

_FIRST_LOOPS_S = 60.0


class _Busy(ABC):
    @property
    @abstractmethod
    def loops(self) -> int:
        """How far it has come."""

    async def rate_during(self, work: Awaitable[object]) -> float:
        """Return how many loops a second it does while something else is awaited."""
        loops, started = self.loops, time.perf_counter()
        await work
        return (self.loops - loops) / (time.perf_counter() - started)


class BusyThread(_Busy):
    """A thread of this process that computes while it is entered, and never lets go of the interpreter.

    Attributes:
        cpu_s: processor seconds of this process that it has taken.
    """

    loops = 0
    cpu_s = 0.0

    def __init__(self) -> None:
        self._stop = False
        self._thread = threading.Thread(target=self._compute, name="engine", daemon=True)

    def __enter__(self) -> BusyThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()

    def _compute(self) -> None:
        loops = 0
        while not self._stop:
            for _ in range(1000):
                loops += 1
            self.loops = loops
            self.cpu_s = time.thread_time()


class BusyProcess(_Busy):
    """Another process that computes while it is entered; it shares nothing but the processors."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._loops = RawValue(ctypes.c_uint64, 0)
        self._process = context.Process(target=_count, args=(self._loops,), name="engine", daemon=True)

    @property
    def loops(self) -> int:
        """How far it has come."""
        return int(self._loops.value)

    def __enter__(self) -> BusyProcess:
        self._process.start()
        deadline = time.monotonic() + _FIRST_LOOPS_S
        while not self.loops:
            if not self._process.is_alive() or time.monotonic() > deadline:
                self.__exit__()
                raise RuntimeError("the process that was to compute does not")
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()


def _count(loops: Any) -> None:
    done = 0
    while True:
        for _ in range(1000):
            done += 1
        loops.value = done
