"""The tier passes kvtier's conformance tests on a real pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import hypothesis
import pytest
from pools import GENEROUS_S, Pool, bare

from kvtier.keys import OffloadKey
from kvtier.tiers import SecondaryTier
from kvtier_mooncake import MooncakeTier
from kvtier_testing.tiers import Damage, TierConformance
from kvtier_testing.tiers.rig import keys


class TestMooncakeTier(TierConformance):
    tier = MooncakeTier
    is_persistent = True
    is_shared = True
    may_mix_versions = True  # A removal frees memory that other clients are reading.
    pause_s = 5.0  # Mooncake's client holds the interpreter lock while it connects and disconnects.
    pool: ClassVar[Pool]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _started(cls, pool: Pool) -> None:
        cls.pool = pool

    def settings(self, place: Path) -> Mapping[str, object]:
        return {
            "type": "mooncake",
            "master": self.pool.address,
            "key_prefix": place.name,
            "deadline_s": GENEROUS_S,
        }

    def damage(self, tier: SecondaryTier[Any], place: Path, key: OffloadKey, damage: Damage) -> None:
        assert isinstance(tier, MooncakeTier)
        name, *others = tier._names([key, *keys(range(64))])
        with bare(self.pool) as store:
            value = store.get(name)
            assert value
            other = next(found for one in others if one != name and (found := store.get(one)))
            damaged = {
                Damage.FLIPPED: bytes([value[0] ^ 1]) + value[1:],
                Damage.CUT: value[: len(value) // 2],
                Damage.EMPTY: b"\0",  # the pool does not store empty objects
                Damage.SWAPPED: other,
            }[damage]
            assert store.upsert(name, damaged) == 0

    @contextmanager
    def slowed(self, tier: SecondaryTier[Any], seconds: float) -> Iterator[None]:
        with self.pool.stopped(seconds):
            yield

    def sequences(self) -> hypothesis.settings:
        # Mooncake's client takes about a second to close.
        return hypothesis.settings(super().sequences(), max_examples=5, stateful_step_count=15)

    def wipe(self, place: Path) -> None:
        with bare(self.pool) as store:
            store.remove_by_regex(f"^{place.name}/", True)
