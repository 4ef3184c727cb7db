"""The format ``segments`` fulfils the contract that every tier has to, by the helper and without it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvtier import native
from kvtier.keys import OffloadKey
from kvtier.tiers import seal
from kvtier.tiers.base import SecondaryTier
from kvtier.tiers.fs import FsConfig, FsTier
from kvtier.tiers.fs.layout import BLOCK_BYTES
from kvtier.tiers.fs.segments.native_segments import NativeSegments
from kvtier.tiers.fs.segments.python_segments import PythonSegments
from kvtier.tiers.fs.store import Store
from kvtier_testing.tiers import Damage
from tests.unit.tiers.fs.slow import FileConformance, SlowFiles


class _OnSegments(FileConformance):
    """The file tier, with one way to work on segments."""

    def make_store(self, max_bytes: int | None) -> Store:
        raise NotImplementedError

    def settings(self, place: Path) -> Mapping[str, object]:
        return {**super().settings(place), "format": "segments"}

    def _make(self, settings: Mapping[str, object]) -> SecondaryTier[Any]:
        config = FsConfig.model_validate(settings)
        self.slow = SlowFiles(self.make_store(config.max_bytes))
        return FsTier(config, self.slow)

    def damage(self, tier: SecondaryTier[Any], place: Path, key: OffloadKey, damage: Damage) -> None:
        file, block = _where(place, key)
        if damage in (Damage.CUT, Damage.EMPTY):
            # What follows is behind the end of the file: of the other chunks none may be there.
            _zero(file, block, self.chunk_bytes // 2 if damage is Damage.CUT else 0, self.chunk_bytes)
        elif damage is Damage.FLIPPED:
            with file.open("r+b") as stream:
                stream.seek(block * BLOCK_BYTES)
                byte = stream.read(1)[0]
                stream.seek(block * BLOCK_BYTES)
                stream.write(bytes([byte ^ 1]))
        else:
            with file.open("r+b") as stream:
                stream.seek(block * BLOCK_BYTES)
                stream.write(os.urandom(self.chunk_bytes))


def _where(place: Path, key: OffloadKey) -> tuple[Path, int]:
    """Find a chunk by its seal in an extent's head."""
    for file in place.rglob("*.seg"):
        content = file.read_bytes()
        at = content.find(b"KVTEXT\x00\x01")
        while at >= 0:
            for i in range(31):
                start = at + 128 * (i + 1)
                sealed = seal.read(content[start : start + seal.TRAILER_BYTES])
                if sealed is not None and sealed.key == key:
                    return file, at // BLOCK_BYTES + 1 + i * (sealed.payload_bytes // BLOCK_BYTES)
            at = content.find(b"KVTEXT\x00\x01", at + 1)
    raise AssertionError(f"no segment has {key.hex()}")


def _zero(file: Path, block: int, first: int, end: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(block * BLOCK_BYTES + first)
        stream.write(bytes(end - first))


class TestSegmentsInPython(_OnSegments):
    def make_store(self, max_bytes: int | None) -> Store:
        return PythonSegments(max_bytes)


@pytest.mark.skipif(native.library is None, reason="the native helper is not built")
class TestSegmentsInC(_OnSegments):
    def make_store(self, max_bytes: int | None) -> Store:
        assert native.library is not None
        return NativeSegments(native.library, max_bytes)
