"""Puts are held back before they hold slots for long or delay gets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtier._core.tiers.tier_status import PutPressure


def slowed(pressure: PutPressure, gets: int, now_s: float = 10.0) -> None:
    for _ in range(gets):
        now_s += 1.0
        pressure.get_ended(8, 0.5, now_s, beside_puts=True)


def test_slowing_puts_are_reduced() -> None:
    pressure = PutPressure(2.0, 4)
    pressure.put_ended(1, 0.01)
    pressure.get_ended(8, 0.05, 1.0, beside_puts=False)
    before = pressure.room(0)
    slowed(pressure, 3)
    assert pressure.room(0) == before / 8
    slowed(pressure, 100)
    assert pressure.room(0) >= 1


def test_concurrent_gets_halve_once() -> None:
    pressure = PutPressure(2.0, 4)
    pressure.get_ended(8, 0.05, 1.0, beside_puts=False)
    for _ in range(8):
        pressure.get_ended(8, 0.5, 10.0, beside_puts=True)
    assert pressure.share == 0.5


def test_normal_gets_recover() -> None:
    for recover in (
        lambda pressure: pressure.get_ended(8, 0.05, 99.0, beside_puts=True),
        lambda pressure: pressure.put_ended(1, 0.01),
    ):
        pressure = PutPressure(2.0, 4)
        pressure.get_ended(8, 0.05, 1.0, beside_puts=False)
        slowed(pressure, 20)
        assert pressure.share < 0.05
        for _ in range(40):
            recover(pressure)
        assert pressure.share == 1.0


def test_slow_gets_alone_drop_nothing() -> None:
    pressure = PutPressure(2.0, 4)
    pressure.get_ended(8, 0.05, 1.0, beside_puts=False)
    for now_s in range(2, 60):
        pressure.get_ended(8, 0.5, now_s, beside_puts=False)
    slowed(pressure, 10, 60.0)  # that is what it takes now
    assert pressure.share == 1.0


def test_small_differences_change_nothing() -> None:
    pressure = PutPressure(2.0, 4)
    pressure.get_ended(1, 0.0001, 1.0, beside_puts=False)
    for now_s in range(2, 30):
        pressure.get_ended(1, 0.01, now_s, beside_puts=True)
    assert pressure.share == 1.0


@given(
    drain_s=st.floats(0.01, 100),
    width=st.integers(1, 64),
    puts=st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 100)), min_size=1, max_size=20),
    gets=st.lists(st.tuples(st.integers(1, 1000), st.floats(0.001, 10), st.booleans()), max_size=20),
    backlog=st.integers(0, 10_000),
)
def test_share_stays_in_bounds(
    drain_s: float,
    width: int,
    puts: list[tuple[int, float]],
    gets: list[tuple[int, float, bool]],
    backlog: int,
) -> None:
    pressure, now_s = PutPressure(drain_s, width), 0.0
    for chunks, seconds in puts:
        pressure.put_ended(chunks, seconds)
    for chunks, seconds, beside_puts in gets:
        now_s += seconds
        pressure.get_ended(chunks, seconds, now_s, beside_puts=beside_puts)
    assert 0 < pressure.share <= 1
    assert pressure.room(backlog) >= 0
    assert pressure.room(0) >= 1
    assert pressure.room(backlog) <= pressure.room(0), "the more is queued, the less is let in"
