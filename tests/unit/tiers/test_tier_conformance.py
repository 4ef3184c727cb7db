"""kvtier's own tiers fulfil the contract that every tier has to."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvtier import native
from kvtier.keys import OffloadKey
from kvtier.testing.tiers import Damage, TierConformance
from kvtier.tiers.base import SecondaryTier
from kvtier.tiers.dummy import DummyTier
from kvtier.tiers.fs import FsConfig, FsTier
from kvtier.tiers.fs.call import FileCall, FileWork
from kvtier.tiers.fs.native_files import NativeFiles
from kvtier.tiers.fs.python_files import PythonFiles


class TestDummy(TierConformance):
    tier = DummyTier

    def settings(self, place: Path) -> Mapping[str, object]:
        return {"type": "dummy", "capacity_bytes": "1GiB"}

    def bounded(self, place: Path, capacity_bytes: int) -> Mapping[str, object]:
        return {"type": "dummy", "capacity_bytes": capacity_bytes}

    @contextmanager
    def slowed(self, tier: SecondaryTier[Any], seconds: float) -> Iterator[None]:
        before = tier.config
        slow = (
            {"hang_rate": 1.0}
            if seconds == float("inf")
            else dict.fromkeys(("put_latency_s", "get_latency_s"), seconds)
        )
        tier.config = before.model_copy(update=slow)
        try:
            yield
        finally:
            tier.config = before


class SlowFiles:
    """Work on files that takes longer while ``seconds`` is set."""

    def __init__(self, inner: FileWork) -> None:
        self._inner = inner
        self._waiting = threading.Condition()
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def begin(self, *_: object) -> bool:
        return False

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


class _OnFiles(TierConformance):
    """The file tier, with one way to work on files."""

    tier = FsTier
    is_persistent = True
    is_shared = True
    work: ClassVar[FileWork]

    def settings(self, place: Path) -> Mapping[str, object]:
        return {"type": "fs", "root_dir": str(place), "n_threads": 4, "min_free_bytes": 0}

    def bounded(self, place: Path, capacity_bytes: int) -> Mapping[str, object]:
        return {**self.settings(place), "max_bytes": capacity_bytes}

    def make_tier(self, place: Path) -> SecondaryTier[Any]:
        self.slow = SlowFiles(self.work)
        return FsTier(FsConfig.model_validate(self.settings(place)), self.slow)

    def damage(self, tier: SecondaryTier[Any], place: Path, key: OffloadKey, damage: Damage) -> None:
        (file,) = place.rglob(f"{key[:-4].hex()}.bin")
        length = file.stat().st_size
        if damage is Damage.FLIPPED:
            with file.open("r+b") as stream:
                byte = stream.read(1)[0]
                stream.seek(0)
                stream.write(bytes([byte ^ 1]))
        elif damage is Damage.SWAPPED:
            other = next(path for path in place.rglob("*.bin") if path != file)
            file.write_bytes(other.read_bytes())
        else:
            os.truncate(file, length // 2 if damage is Damage.CUT else 0)

    @contextmanager
    def slowed(self, tier: SecondaryTier[Any], seconds: float) -> Iterator[None]:
        self.slow.be_slow(seconds)
        try:
            yield
        finally:
            self.slow.be_slow(0.0)


class TestFilesInPython(_OnFiles):
    work = PythonFiles()


@pytest.mark.skipif(native.library is None, reason="the native helper is not built")
class TestFilesInC(_OnFiles):
    if native.library is not None:
        work = NativeFiles(native.library)
