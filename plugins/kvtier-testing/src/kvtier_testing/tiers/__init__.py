"""The contract of a tier as tests: subclass ``TierConformance`` and run it with pytest.

    class TestShelf(TierConformance):
        tier = ShelfTier
        is_persistent = True

        def settings(self, place):
            return {"type": "shelf", "path": str(place)}

Where blockbuster is installed, calls that block the event loop are refused in every test.
"""

from __future__ import annotations

import pytest

from kvtier_testing.tiers.agreement import AgreesWithADict
from kvtier_testing.tiers.interruption import IsInterrupted
from kvtier_testing.tiers.keeping import KeepsChunks
from kvtier_testing.tiers.lifetime import ComesAndGoes
from kvtier_testing.tiers.rig import TierRig
from kvtier_testing.tiers.setup import Damage, TierSetup


class TierConformance(AgreesWithADict, ComesAndGoes, IsInterrupted, KeepsChunks):
    """What every ``SecondaryTier`` must do. See ``TierSetup`` for what a subclass gives."""

    pytestmark = pytest.mark.anyio


__all__ = ["Damage", "TierConformance", "TierRig", "TierSetup"]
