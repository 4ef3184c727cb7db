"""The contract of a tier as tests: subclass ``TierConformance`` and run it with pytest.

    class TestShelf(TierConformance):
        tier = ShelfTier
        is_persistent = True

        def settings(self, place):
            return {"type": "shelf", "path": str(place)}

Needs pytest, hypothesis and anyio: ``pip install kvtier[testing]``. Where blockbuster is installed, too,
calls that block the event loop are refused in every test.
"""

from __future__ import annotations

import pytest

from kvtier.testing.tiers.agreement import AgreesWithADict
from kvtier.testing.tiers.interruption import IsInterrupted
from kvtier.testing.tiers.keeping import KeepsChunks
from kvtier.testing.tiers.lifetime import ComesAndGoes
from kvtier.testing.tiers.rig import TierRig
from kvtier.testing.tiers.setup import Damage, TierSetup


class TierConformance(AgreesWithADict, ComesAndGoes, IsInterrupted, KeepsChunks):
    """What every ``SecondaryTier`` must do. See ``TierSetup`` for what a subclass gives."""

    pytestmark = pytest.mark.anyio


__all__ = ["Damage", "TierConformance", "TierRig", "TierSetup"]
