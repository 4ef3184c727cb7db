"""The measurement of the core runs through and gives figures that can be."""

from __future__ import annotations

import pytest

from kvtier_bench.core import Case, Cost, run
from kvtier_bench.machine import Machine


@pytest.mark.parametrize("tier", ["none", "memory"])  # with fs it takes as long as the disk does
def test_every_call_is_measured(tier: str) -> None:
    *costs, machine = run([Case("arc", tier, 12_288, 1)], compare=False)
    assert isinstance(machine, Machine)
    calls = {cost.call for cost in costs if isinstance(cost, Cost)}
    assert len(calls) == len(costs)
    assert "reserve 8,192, full" in calls
    assert ("secondary hit, until it is pinned for its load" in calls) is (tier != "none")
    assert ("end of step, 1000 chunks ending" in calls) is (tier == "memory")
    for cost in costs:
        assert isinstance(cost, Cost)
        assert cost.kvtier > 0
        assert cost.vllm is None
        assert cost.ratio is None
