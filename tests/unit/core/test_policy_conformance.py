"""kvtier's own eviction policies fulfil the contract that every policy has to."""

from __future__ import annotations

from kvtier.policies._arc import ARC
from kvtier.policies._lru import LRU
from kvtier_testing.policies import PolicyConformance


class TestLRU(PolicyConformance):
    policy = LRU


class TestARC(PolicyConformance):
    policy = ARC
