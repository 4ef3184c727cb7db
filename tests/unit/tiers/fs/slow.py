"""A file tier for the conformance suite that can be made slow."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis

from kvtier.tiers.base import SecondaryTier
from kvtier.tiers.fs import FsTier
from kvtier.tiers.fs.files import ChunkFiles
from kvtier.tiers.fs.files.call import FileCall
from kvtier_testing.tiers import TierConformance
from tests.effort import effort


class SlowFiles:
    """Work on files that takes longer while ``seconds`` is set."""

    def __init__(self, inner: ChunkFiles) -> None:
        self._inner = inner
        self._waiting = threading.Condition()
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def put(self, call: FileCall, first: int, end: int) -> int:
        self._wait()
        return self._inner.put(call, first, end)

    def get(self, call: FileCall, first: int, end: int) -> None:
        self._wait()
        self._inner.get(call, first, end)

    def be_slow(self, seconds: float) -> None:
        with self._waiting:
            self.seconds = seconds
            self._waiting.notify_all()

    def _wait(self) -> None:
        with self._waiting:
            until = time.monotonic() + self.seconds
            while self.seconds and time.monotonic() < until:
                self._waiting.wait(min(1.0, max(0.0, until - time.monotonic())))


class FileConformance(TierConformance):
    """The file tier. ``make_tier`` sets ``slow``."""

    tier = FsTier
    is_persistent = True
    is_shared = True
    slow: SlowFiles

    def sequences(self) -> hypothesis.settings:
        usual = super().sequences()
        return hypothesis.settings(usual, max_examples=effort(8, usual.max_examples))

    def settings(self, place: Path) -> Mapping[str, object]:
        return {"type": "fs", "root_dir": str(place), "n_threads": 4, "min_free_bytes": 0, "max_bytes": 2**50}

    def bounded(self, place: Path, capacity_bytes: int) -> Mapping[str, object]:
        return {**self.settings(place), "max_bytes": capacity_bytes}

    @contextmanager
    def slowed(self, tier: SecondaryTier[Any], seconds: float) -> Iterator[None]:
        self.slow.be_slow(seconds)
        try:
            yield
        finally:
            self.slow.be_slow(0.0)
