"""The tier passes kvtier's conformance tests. It serves its own puts from its own memory."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from engines import GENEROUS_S, require_nixl

from kvtier.keys import OffloadKey
from kvtier.tiers import SecondaryTier
from kvtier_nixl import NixlTier
from kvtier_testing.tiers import Damage, TierConformance


class TestNixlTier(TierConformance):
    tier = NixlTier
    pause_s = 1.0  # NIXL holds the interpreter lock while an agent ends.

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _has_nixl(cls) -> None:
        require_nixl()
        import nixl._api  # noqa: F401 - holds the interpreter lock for seconds, the first time

    def settings(self, place: Path) -> Mapping[str, object]:
        memory = {"serve_bytes": "256MiB", "receive_bytes": "32MiB"}
        return {"type": "nixl", "listen": "127.0.0.1:0", "deadline_s": GENEROUS_S, **memory}

    def bounded(self, place: Path, capacity_bytes: int) -> Mapping[str, object]:
        return {**self.settings(place), "serve_bytes": capacity_bytes}

    def sequences(self) -> hypothesis.settings:
        # NIXL takes about half a second to open and to close.
        return hypothesis.settings(super().sequences(), max_examples=8, stateful_step_count=20)

    def damage(self, tier: SecondaryTier[Any], place: Path, key: OffloadKey, damage: Damage) -> None:
        assert isinstance(tier, NixlTier)
        chunk = tier._held.pin(key)
        assert chunk is not None
        address, length = tier._serving.address(chunk.row), tier._serving.row_bytes
        if damage is Damage.FLIPPED:
            ctypes.memset(address, ctypes.string_at(address, 1)[0] ^ 1, 1)
        elif damage is Damage.SWAPPED:
            ctypes.memmove(address, tier._serving.address((chunk.row + 1) % 4), length)
        else:
            start = length // 2 if damage is Damage.CUT else 0
            ctypes.memset(address + start, 0, length - start)
        tier._held.unpin(chunk.row)
