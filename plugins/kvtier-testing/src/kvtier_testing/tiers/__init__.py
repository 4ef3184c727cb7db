"""The contract of a tier as tests: subclass ``TierConformance`` and run it with pytest.

    class TestShelf(TierConformance):
        tier = ShelfTier
        is_persistent = True

        def settings(self, place):
            return {"type": "shelf", "path": str(place)}

Each test runs in a separate thread with its own event loop, and has a time limit. If blockbuster is
installed, blocking calls on the event loop raise.
"""

from __future__ import annotations

from kvtier_testing.tiers.basics import BasicTests
from kvtier_testing.tiers.cancellation import CancellationTests
from kvtier_testing.tiers.lifecycle import LifecycleTests
from kvtier_testing.tiers.resources import ResourceTests
from kvtier_testing.tiers.rig import TierRig
from kvtier_testing.tiers.setup import Damage, TierSetup
from kvtier_testing.tiers.stateful import StatefulTests


class TierConformance(BasicTests, CancellationTests, LifecycleTests, ResourceTests, StatefulTests):
    """Tests of the contract of ``SecondaryTier``. A subclass sets ``tier`` and the hooks of ``TierSetup``."""


__all__ = ["Damage", "TierConformance", "TierRig", "TierSetup"]
