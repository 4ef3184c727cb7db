"""What is told of engines is told against the plain one, and only as far as noise lets it be."""

from __future__ import annotations

import pytest

from kvtier_bench.engines import PLAIN, spread_of_median
from kvtier_bench.overhead import CONTROL, Sample, losses


def sample(wall_s: float, cpu_s: float = 1.0) -> Sample:
    return Sample(1000, wall_s, {"engine": cpu_s / 2, "compute": cpu_s / 2})


def test_a_loss_is_taken_against_the_plain_engine_of_the_same_round() -> None:
    plain = [sample(1.0, 2.0), sample(10.0, 2.0), sample(2.0, 2.0)]
    slower = [sample(1.25, 2.1), sample(12.5, 2.1), sample(2.5, 2.1)]
    (loss,) = losses({PLAIN: plain, "slow": slower})
    assert (loss.connector, loss.rounds, loss.tokens_s) == ("slow", 3, 400.0)
    assert (loss.lost_percent, loss.low, loss.high) == pytest.approx((20.0, 20.0, 20.0))
    assert (loss.cpu_percent, loss.cpu_low, loss.cpu_high) == pytest.approx((5.0, 5.0, 5.0))
    assert loss.quartiles == "20.0 to 20.0"


@pytest.mark.parametrize(
    ("walls", "goal"),
    [
        ([1.0, 1.001, 1.01], "met"),
        ([1.03, 1.05, 1.04], "missed"),
        ([0.97, 1.05, 1.0], "not told"),
    ],
)
def test_the_goal_is_met_or_missed_only_where_both_bounds_say_so(walls: list[float], goal: str) -> None:
    plain, others = [sample(1.0)] * 3, [sample(wall) for wall in walls]
    (loss,) = losses({PLAIN: plain, "kvtier cpu": others})
    assert loss.goal == goal
    as_noisy = losses(
        {PLAIN: plain, "kvtier cpu": others, CONTROL: [sample(1.06), sample(0.96), sample(1.0)]}
    )
    assert [row.goal for row in as_noisy] == ["not told", ""]


def test_one_round_has_no_spread() -> None:
    (loss,) = losses({PLAIN: [sample(1.0)], "fast": [sample(0.5)]})
    assert (loss.low, loss.lost_percent, loss.high) == pytest.approx((-100.0, -100.0, -100.0))


def test_the_spread_of_a_median_contains_it_and_narrows_with_more_values() -> None:
    few = spread_of_median([0.0, 1.0, 2.0, 3.0, 4.0])
    many = spread_of_median([0.0, 1.0, 2.0, 3.0, 4.0] * 20)
    assert few[0] <= many[0] <= 2.0 <= many[1] <= few[1]
    assert few[0] < few[1]
    assert few == spread_of_median([0.0, 1.0, 2.0, 3.0, 4.0]), "the same figures give the same bounds"
