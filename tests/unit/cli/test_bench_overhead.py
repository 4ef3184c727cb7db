"""The arithmetic of the comparison of engines, and its options."""

from __future__ import annotations

import pytest

from kvtier.cli import engines
from kvtier.cli.bench_overhead import CONTROL, PLAIN, Plan, Sample, losses, part_of, spread_of_median


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


@pytest.mark.parametrize(
    ("thread", "part"),
    [
        ("engine", None),
        ("compute", None),
        ("kvtier-executor", "executor"),
        ("kvtier-store", "copies"),
        ("kvtier-files", "file threads"),
        ("fs-write-3", "file threads"),
        ("vllm_offloading_lookup_fs", "file threads"),
    ],
)
def test_threads_are_told_apart(thread: str, part: str | None) -> None:
    assert part_of(thread) == part


def test_the_primary_tier_is_full_after_two_rounds() -> None:
    plan = Plan("tiny", 3, 4, 100, 8, 2, control=False, native=False)
    assert (plan.chunks, plan.slots, plan.tokens) == (12, 24, 432)


def test_prompts_of_different_seeds_share_only_what_they_are_told_to() -> None:
    one, two = engines.make_prompt("a", 64), engines.make_prompt("b", 64)
    assert len(one) == len(two) == 64
    assert one == engines.make_prompt("a", 64) != two
    assert engines.make_prompt("b", 64, one[:32])[:32] == one[:32]


def test_the_sizes_of_models_say_how_long_a_block_is() -> None:
    assert engines.block_bytes("tiny") == 128 * 1024
    assert engines.block_bytes("medium") == 512 * 1024
