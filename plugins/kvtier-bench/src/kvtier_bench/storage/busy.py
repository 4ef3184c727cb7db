"""A process that computes in pure Python, as an engine beside tiers does."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.sharedctypes import RawValue
from typing import Any

_FIRST_LOOPS_S = 60.0


class BusyProcess:
    """A process that computes while ``computing`` is entered, and is stopped otherwise."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._loops = RawValue(ctypes.c_uint64, 0)
        self._process = context.Process(target=_count, args=(self._loops,), name="engine", daemon=True)

    @property
    def loops(self) -> int:
        """How far it has come."""
        return int(self._loops.value)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Let it compute."""
        self._send(signal.SIGCONT)
        try:
            yield
        finally:
            self._send(signal.SIGSTOP)

    def __enter__(self) -> BusyProcess:
        self._process.start()
        deadline_s = time.monotonic() + _FIRST_LOOPS_S
        while not self.loops:
            if not self._process.is_alive() or time.monotonic() > deadline_s:
                self.__exit__()
                raise RuntimeError("the process that computes beside the benchmark has not started")
            time.sleep(0.01)
        self._send(signal.SIGSTOP)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    def _send(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)


def _count(loops: Any) -> None:
    done = 0
    while True:
        for _ in range(1000):
            done += 1
        loops.value = done
