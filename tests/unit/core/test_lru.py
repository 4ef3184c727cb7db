"""Least recently used goes first, and of one prompt the tail."""

from __future__ import annotations

from kvtier.policies._lru import LRU
from tests.unit.core.world import keys


def test_the_oldest_go_first_and_the_tail_of_a_prompt_before_its_front() -> None:
    policy = LRU()
    old, new = keys("old", 3), keys("new", 3)
    policy.add(old, used=False)
    policy.add(new, used=False)
    assert policy.evict(4) == [old[2], old[1], old[0], new[2]]
    assert len(policy) == 2
    assert new[0] in policy
    assert new[2] not in policy
