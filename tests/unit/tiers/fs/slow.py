"""A file tier for the conformance suite that can be made slow."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis

from kvtier.tiers._base import SecondaryTier
from kvtier.tiers.fs import FsTier
from kvtier.tiers.fs._files import ChunkFiles
from kvtier.tiers.fs._files.call import FileCall
from kvtier_testing.tiers import TierConformance
from tests.effort import effort

WORK = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)


class Slowness:
    """Makes who waits wait for so many seconds."""

    def __init__(self) -> None:
        self._waiting = threading.Condition()
        self._seconds = 0.0

    def be(self, seconds: float) -> None:
        with self._waiting:
            self._seconds = seconds
            self._waiting.notify_all()

    def wait(self) -> None:
        with self._waiting:
            until = time.monotonic() + self._seconds
            while self._seconds and time.monotonic() < until:
                self._waiting.wait(min(1.0, max(0.0, until - time.monotonic())))


class SlowFiles:
    """Work on files in Python's threads that can be made slow."""

    def __init__(self, inner: ChunkFiles, slow: Slowness) -> None:
        self._inner = inner
        self._slow = slow

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def put(self, call: FileCall, first: int, end: int) -> int:
        self._slow.wait()
        return self._inner.put(call, first, end)

    def get(self, call: FileCall, first: int, end: int) -> None:
        self._slow.wait()
        self._inner.get(call, first, end)


class SlowLibrary:
    """The native helper, whose puts and gets can be made slow; its own threads do them."""

    def __init__(self, library: ctypes.CDLL, slow: Slowness) -> None:
        self._library = library

        def slowed(work: Callable[[int, int, int], int]) -> Any:
            def wait_and_do(call: int, first: int, end: int) -> int:
                slow.wait()
                return work(call, first, end)

            return WORK(wait_and_do)

        self.kvt_files_put = slowed(library.kvt_files_put)
        self.kvt_files_get = slowed(library.kvt_files_get)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)


class FileConformance(TierConformance):
    """The file tier. ``make_tier`` sets ``slow``."""

    tier = FsTier
    is_persistent = True
    is_shared = True
    slow: Slowness

    def sequences(self) -> hypothesis.settings:
        usual = super().sequences()
        return hypothesis.settings(usual, max_examples=effort(8, usual.max_examples))

    def settings(self, place: Path) -> Mapping[str, object]:
        return {"type": "fs", "root_dir": str(place), "n_threads": 4, "min_free_bytes": 0, "max_bytes": 2**50}

    def bounded(self, place: Path, capacity_bytes: int) -> Mapping[str, object]:
        return {**self.settings(place), "max_bytes": capacity_bytes}

    @contextmanager
    def slowed(self, tier: SecondaryTier[Any], seconds: float) -> Iterator[None]:
        self.slow.be(seconds)
        try:
            yield
        finally:
            self.slow.be(0.0)
