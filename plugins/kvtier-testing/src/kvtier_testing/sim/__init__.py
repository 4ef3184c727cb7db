"""kvtier in virtual time: the real core, executor and manager over simulated tiers and a simulated device.

    result = run(4711)                                    # one run of the world that the seed draws
    result = run(4711, Overrides(tier=MyTier))                # with a tier of one's own in it
    result = run(4711, Overrides(policy=MyPolicy))            # with an eviction policy of one's own

A run that shows something that must never happen raises ``Violation``, or the core's own error. The same
seed gives the same run: ``python -m kvtier_testing.sim --seed 4711 --trace`` shows it.
"""

from __future__ import annotations

from kvtier_testing.sim.backend import NO_FAULTS, Backend, FaultProfile
from kvtier_testing.sim.faults import FaultyTier, inject_faults
from kvtier_testing.sim.loop import SimLoop, Spinning, Stalled, simulate
from kvtier_testing.sim.model import CHUNK_BYTES, SimMemory, Violation, World, content
from kvtier_testing.sim.scenario import End, Owner, Scenario, TierScenario
from kvtier_testing.sim.simulation import Overrides, Result, run
from kvtier_testing.sim.tiers import SimTier, SimTierConfig

__all__ = [
    "CHUNK_BYTES",
    "NO_FAULTS",
    "Backend",
    "End",
    "FaultProfile",
    "FaultyTier",
    "Overrides",
    "Owner",
    "Result",
    "Scenario",
    "SimLoop",
    "SimMemory",
    "SimTier",
    "SimTierConfig",
    "Spinning",
    "Stalled",
    "TierScenario",
    "Violation",
    "World",
    "content",
    "inject_faults",
    "run",
    "simulate",
]
