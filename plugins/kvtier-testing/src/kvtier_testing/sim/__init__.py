"""kvtier in virtual time: the real core, executor and manager over simulated tiers and a simulated device.

    result = run(4711)                                    # one run of the world that the seed draws
    result = run(4711, Overrides(tier=MyTier))                # with your own tier
    result = run(4711, Overrides(policy=MyPolicy))            # with your own eviction policy

A run that breaks a rule raises ``Violation`` or the core's own error. The same seed gives the same run:
``python -m kvtier_testing.sim --seed 4711 --trace`` shows it.
"""

from __future__ import annotations

from kvtier_testing.sim.backend import Backend
from kvtier_testing.sim.fleet import Result, run
from kvtier_testing.sim.loop import Spinning, Stalled, simulate
from kvtier_testing.sim.model import Violation
from kvtier_testing.sim.simulation import Overrides
from kvtier_testing.sim.tiers import SimTier, SimTierConfig

__all__ = [
    "Backend",
    "Overrides",
    "Result",
    "SimTier",
    "SimTierConfig",
    "Spinning",
    "Stalled",
    "Violation",
    "run",
    "simulate",
]
