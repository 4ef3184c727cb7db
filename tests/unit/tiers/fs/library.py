"""The native library with hooks before calls of some of its functions."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvtier import _native as native
from kvtier.tiers.fs._files.native_call import Verb

WORK = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
IN_THE_POOL = {verb.value for verb in Verb}


class _Library:
    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def patch_library(patch: pytest.MonkeyPatch, before: Callable[[], object], *names: str) -> None:
    """Call ``before`` in the same thread before some functions of the library."""
    real: Any = native.library
    library = _Library(real)

    def call(name: str, *arguments: Any) -> Any:
        before()
        return getattr(real, name)(*arguments)

    for name in names:
        function = partial(call, name)
        setattr(library, name, WORK(function) if name in IN_THE_POOL else function)
    patch.setattr(native, "library", library)


class Gate:
    """Blocks callers while it is closed.

    Attributes:
        entered: released by each caller.
    """

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self._open = threading.Event()

    def __call__(self) -> None:
        self.entered.release()
        self._open.wait()

    def open(self) -> None:
        """Let all through."""
        self._open.set()

    def close(self) -> None:
        """Block later callers."""
        while self.entered.acquire(blocking=False):
            pass
        self._open.clear()
