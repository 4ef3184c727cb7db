"""Pauses grow, are bounded, and differ."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtier._core.tiers.backoff import Backoff


def test_pauses_double_and_restart() -> None:
    backoff = Backoff(1.0, 5.0)
    assert [backoff.next_s() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.reset()
    assert backoff.next_s() == 1.0


@given(
    first_s=st.floats(0.01, 100),
    longest_s=st.floats(0.01, 1000),
    chances=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=40),
)
def test_pauses_stay_within_jitter(first_s: float, longest_s: float, chances: list[float]) -> None:
    drawn = iter(chances)
    backoff = Backoff(first_s, longest_s, lambda: next(drawn))
    for _ in chances:
        assert 0.75 * first_s <= backoff.next_s() <= 1.25 * max(first_s, longest_s)
