"""Keys by age: against a plain list, through more than one refill of the front."""

from __future__ import annotations

from random import Random

import pytest

from kvtier.keys import OffloadKey, pack_key
from kvtier.policies._aged import AgedKeys


def keys(first: int, count: int) -> list[OffloadKey]:
    return [pack_key(f"{index:06}".encode()) for index in range(first, first + count)]


@pytest.mark.parametrize("seed", range(5))
def test_it_does_what_a_list_does(seed: int) -> None:
    random, aged, truth, made = Random(seed), AgedKeys(), list[OffloadKey](), 0
    for _ in range(300):
        added = keys(made, random.randrange(60))
        made += len(added)
        aged.add(added)
        truth += added
        for key in random.sample(truth, min(len(truth), random.randrange(10))):
            truth.remove(key)
            aged.remove(key)
            assert key not in aged
        count = random.choice([0, 1, 5, 50, 100])
        assert aged.pop_oldest(count) == truth[:count]
        del truth[:count]
        assert len(aged) == len(truth)
        assert all(key in aged for key in truth[:3])
