"""The tier keeps kvtier's contract."""

import shutil
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from math import isinf
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from kvtier_files import FilesTier

from kvtier.keys import OffloadKey
from kvtier.tiers import SecondaryTier, in_thread
from kvtier_testing.tiers import Damage, TierConformance


class TestFiles(TierConformance):
    tier = FilesTier
    is_persistent = True
    is_shared = True

    def settings(self, place: Path) -> Mapping[str, object]:
        return {"type": "files", "path": str(place)}

    def bounded(self, place: Path, capacity_bytes: int) -> Mapping[str, object]:
        return {**self.settings(place), "max_bytes": capacity_bytes}

    @contextmanager
    def slowed(self, tier: Any, seconds: float) -> Iterator[None]:
        over = threading.Event()

        def slow(call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
            async def wait_and_call(*arguments: Any) -> Any:
                await in_thread(over.wait, None if isinf(seconds) else seconds)
                return await call(*arguments)

            return wait_and_call

        with mock.patch.multiple(tier, _write=slow(tier._write), _read=slow(tier._read)):
            try:
                yield
            finally:
                over.set()

    async def test_reset_after_a_failed_one_hides_all(self, place: Path) -> None:
        async with self.opened(place) as it:
            await it.put([1])
            with mock.patch.object(Path, "rename", side_effect=PermissionError), pytest.raises(OSError):
                await it.tier.reset()
            await it.tier.reset()
        async with self.opened(place) as it:
            assert await it.contains([1]) == [False]

    def damage(self, tier: SecondaryTier[Any], place: Path, key: OffloadKey, damage: Damage) -> None:
        (chunk,) = place.glob(f"*/{key.hex()}")
        stored = chunk.read_bytes()
        if damage is Damage.SWAPPED:
            shutil.copy(next(other for other in chunk.parent.iterdir() if other != chunk), chunk)
        elif damage is Damage.FLIPPED:
            chunk.write_bytes(stored[:-1] + bytes([stored[-1] ^ 1]))
        else:
            chunk.write_bytes(stored[: len(stored) // 2] if damage is Damage.CUT else b"")
