"""Second attempts never multiply an outage."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers._retry import RetryBudget


@given(share=st.floats(0, 1), wanted=st.lists(st.booleans(), max_size=300))
def test_retries_are_limited(share: float, wanted: list[bool]) -> None:
    budget, taken = RetryBudget(share), 0
    for first, wants in enumerate(wanted, start=1):
        budget.earn()
        taken += wants and budget.spend()
        assert taken <= 1 + share * first + 1e-6


def test_savings_are_bounded() -> None:
    budget = RetryBudget(0.1)
    for _ in range(100_000):
        budget.earn()
    assert sum(budget.spend() for _ in range(1000)) == 10
