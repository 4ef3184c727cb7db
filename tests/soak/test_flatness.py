"""The judging of a soak: what leaks is found, what merely moves is not, and it says how sharp it is."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.soak import engine_life, manager_life
from tests.soak.flatness import FEWEST_LOOKS, Bound, Look, Verdict, judge, level

BOUND = Bound(2, "kills", 0.25)


def looks(figure: Callable[[int], float], count: int = 36, kills_each: int = 2) -> list[Look]:
    """Make looks whose figure follows from the number of kills so far."""
    return [
        Look(
            at_s=4.0 * index,
            events={"kills": index * kills_each, "requests": index * 40, "calls": index * 500},
            figures={"it": figure(index * kills_each)},
        )
        for index in range(1, count + 1)
    ]


def verdict(given: list[Look], bound: Bound = BOUND) -> Verdict:
    (found,) = judge(given, {"it": bound})
    return found


def noisy(seed: int, most: float) -> Callable[[], float]:
    """Noise as pools make it: mostly at the top, now and then far below."""
    chance = random.Random(seed)
    return lambda: chance.choice([0.0, 0.0, 0.0, -most * chance.random()])


def test_what_does_not_grow_is_flat() -> None:
    found = verdict(looks(lambda _: 68))
    assert (found.is_flat, found.grown, found.peak) == (True, 0, 68)


@pytest.mark.parametrize("seed", range(20))
def test_one_for_each_kill_is_found_whatever_the_noise(seed: int) -> None:
    noise = noisy(seed, 8)
    assert not verdict(looks(lambda kills: 68 + kills + noise())).is_flat


@pytest.mark.parametrize("seed", range(20))
def test_connections_that_come_and_go_are_no_leak(seed: int) -> None:
    noise = noisy(seed, 8)
    assert verdict(looks(lambda _: 68 + noise()), Bound(4, "kills", 0.25)).is_flat


def test_one_for_every_tenth_kill_is_found_in_a_long_run_and_not_said_to_be_found_in_a_short_one() -> None:
    bound = Bound(2, "kills", 0.05)

    def leaking(kills: int) -> float:
        return 68 + kills // 10

    long, short = verdict(looks(leaking, 360), bound), verdict(looks(leaking, 18), bound)
    assert (long.is_flat, short.is_flat) == (False, True)
    assert long.visible is not None
    assert short.visible is not None
    assert long.visible < 0.1 < short.visible


def test_growth_while_it_warms_up_is_none() -> None:
    assert verdict(looks(lambda kills: min(kills, 20))).is_flat


def test_a_leak_that_begins_late_is_found() -> None:
    assert not verdict(looks(lambda kills: max(0, kills - 36))).is_flat


def test_what_gets_less_is_flat() -> None:
    assert verdict(looks(lambda kills: 100 - kills)).is_flat


def test_a_single_look_beyond_what_may_ever_be_is_no_flat_figure() -> None:
    bound = Bound(5, "kills", most=10)
    assert verdict(looks(lambda _: 10), bound).is_flat
    assert not verdict(looks(lambda kills: 11 if kills == 40 else 10), bound).is_flat
    assert not verdict(looks(lambda kills: 11 if kills == 2 else 10), bound).is_flat, "warming up or not"


def test_no_event_no_sharpness() -> None:
    found = verdict(looks(lambda _: 5, kills_each=0))
    assert found.is_flat
    assert found.visible is None


def test_too_few_looks_are_not_judged() -> None:
    assert verdict(looks(lambda _: 1, FEWEST_LOOKS)).is_flat
    with pytest.raises(ValueError, match="too few"):
        verdict(looks(lambda _: 1, FEWEST_LOOKS - 1))


def test_the_level_is_the_floor_and_not_a_single_low() -> None:
    assert level("it", looks(lambda kills: 0 if kills == 4 else 9, 12)) == 9


@pytest.mark.parametrize("bounds", [engine_life.BOUNDS, manager_life.BOUNDS])
def test_the_bounds_find_in_an_hour_what_they_are_meant_to(bounds: dict[str, Bound]) -> None:
    # An hour as it was recorded: twenty thousand requests, six hundred kills, a hundred calls a second.
    between = {"requests": 20_000 / 3, "kills": 600 / 3, "calls": 360_000 * 0.15 / 3}
    leaks = {
        "memory, MiB": ("requests", 4 / 1024),
        "python blocks": ("requests", 20),
        "objects": ("requests", 0.1),
        "descriptors": ("kills", 1),
        "threads": ("kills", 1),
        "tasks": ("kills", 1),
    }
    for name, bound in bounds.items():
        for what, (event, leak) in leaks.items():
            if what in name and bound.event == event:
                assert bound.constant + bound.for_each * between[event] < leak * between[event], name
