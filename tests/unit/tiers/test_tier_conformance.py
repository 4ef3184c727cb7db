"""kvtier's own tiers fulfil every tier's contract."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from kvtier.keys import OffloadKey
from kvtier.tiers import SecondaryTier
from kvtier.tiers.fs import FsTier
from kvtier_testing.dummy import DummyTier
from kvtier_testing.tiers import Damage, TierConformance
from tests.effort import effort
from tests.unit.tiers.fs.conftest import MEMORY
from tests.unit.tiers.fs.library import patch_library


class TestDummy(TierConformance):
    tier = DummyTier

    def sequences(self) -> hypothesis.settings:
        usual = super().sequences()
        return hypothesis.settings(usual, max_examples=effort(8, usual.max_examples))

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


class TestFiles(TierConformance):
    tier = FsTier
    is_persistent = True
    is_shared = True

    @pytest.fixture
    def place(self, tmp_path: Path) -> Iterator[Path]:
        """A root in memory, where flushes cost nothing."""
        with tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else tmp_path) as folder:
            yield Path(folder) / "root"

    @pytest.fixture(autouse=True)
    def slow_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_fast, self.seconds = threading.Event(), 0.0
        self.is_fast.set()
        patch_library(monkeypatch, lambda: self.is_fast.wait(self.seconds), "kvt_files_put", "kvt_files_get")

    def sequences(self) -> hypothesis.settings:
        usual = super().sequences()
        return hypothesis.settings(usual, max_examples=effort(8, usual.max_examples))

    def settings(self, place: Path) -> Mapping[str, object]:
        return {"type": "fs", "root_dir": str(place), "n_threads": 4, "min_free_bytes": 0, "max_bytes": 2**50}

    def bounded(self, place: Path, capacity_bytes: int) -> Mapping[str, object]:
        return {**self.settings(place), "max_bytes": capacity_bytes}

    @contextmanager
    def slowed(self, tier: SecondaryTier[Any], seconds: float) -> Iterator[None]:
        self.seconds = min(seconds, threading.TIMEOUT_MAX)
        self.is_fast.clear()
        try:
            yield
        finally:
            self.is_fast.set()

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
