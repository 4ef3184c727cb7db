"""The format ``segments`` fulfils the contract that every tier has to, by the helper and without it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtier import native
from kvtier.keys import OffloadKey
from kvtier.testing.tiers import Damage, TierConformance
from kvtier.tiers import seal
from kvtier.tiers.base import SecondaryTier
from kvtier.tiers.fs import FsConfig, FsTier
from kvtier.tiers.fs.call import FileCall
from kvtier.tiers.fs.layout import BLOCK_BYTES
from kvtier.tiers.fs.segments.native_segments import NativeSegments
from kvtier.tiers.fs.segments.python_segments import PythonSegments
from kvtier.tiers.fs.store import Store


class SlowStore:
    """A store that takes longer while ``seconds`` is set."""

    def __init__(self, inner: Store) -> None:
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


class _OnSegments(TierConformance):
    """The file tier, with one way to work on segments."""

    tier = FsTier
    is_persistent = True
    is_shared = True

    def make_store(self, max_bytes: int | None) -> Store:
        raise NotImplementedError

    def settings(self, place: Path) -> Mapping[str, object]:
        return {
            "type": "fs",
            "format": "segments",
            "root_dir": str(place),
            "n_threads": 4,
            "min_free_bytes": 0,
        }

    def bounded(self, place: Path, capacity_bytes: int) -> Mapping[str, object]:
        return {**self.settings(place), "max_bytes": capacity_bytes}

    def _make(self, settings: Mapping[str, object]) -> SecondaryTier[Any]:
        config = FsConfig.model_validate(settings)
        self.slow = SlowStore(self.make_store(config.max_bytes))
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

    @contextmanager
    def slowed(self, tier: SecondaryTier[Any], seconds: float) -> Iterator[None]:
        self.slow.be_slow(seconds)
        try:
            yield
        finally:
            self.slow.be_slow(0.0)


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
