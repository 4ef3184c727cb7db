"""kvtier's own tiers fulfil the contract that every tier has to."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ctypes import CDLL
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest

from kvtier import _native as native
from kvtier.keys import OffloadKey
from kvtier.tiers._base import SecondaryTier
from kvtier.tiers.dummy import DummyTier
from kvtier.tiers.fs import FsConfig, FsTier
from kvtier.tiers.fs._files import ChunkFiles
from kvtier.tiers.fs._files.native import NativeFiles
from kvtier_testing.tiers import Damage, TierConformance
from tests.unit.tiers.fs.slow import FileConformance, SlowFiles, SlowLibrary, Slowness


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


class _OnFiles(FileConformance):
    """The file tier, with one way to work on files."""

    work: ClassVar[ChunkFiles]

    def make_tier(self, place: Path) -> SecondaryTier[Any]:
        self.slow = Slowness()
        files: Any = SlowFiles(self.work, self.slow)
        if isinstance(self.work, NativeFiles):  # so that its own threads put and get
            files = NativeFiles(cast(CDLL, SlowLibrary(self.work.library, self.slow)))
        return FsTier(FsConfig.model_validate(self.settings(place)), files)

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


class TestFilesInPython(_OnFiles):
    work = ChunkFiles()


@pytest.mark.skipif(native.library is None, reason="the native helper is not built")
class TestFilesInC(_OnFiles):
    if native.library is not None:
        work = NativeFiles(native.library)
