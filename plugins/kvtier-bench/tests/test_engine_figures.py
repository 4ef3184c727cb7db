"""What is made of the samples of real engines."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from kvtier_bench.engine import convoy, fleet, overhead
from kvtier_bench.engine.compared import FS, NATIVE_FS, PLAIN, Sample
from kvtier_bench.engine.versus import faults, speed
from kvtier_bench.engine.versus.systems import KVTIER, LMCACHE


def sample(wall_s: float, cpu_s: float = 1.0) -> Sample:
    return Sample(wall_s, {"engine": cpu_s / 2, "compute": cpu_s / 2})


def test_a_loss_is_taken_against_the_plain_engine_of_the_same_round() -> None:
    plain = [sample(1.0, 2.0), sample(10.0, 2.0), sample(2.0, 2.0)]
    slower = [sample(1.25, 2.1), sample(12.5, 2.1), sample(2.5, 2.1)]
    (loss,) = overhead.losses({PLAIN: plain, "slow": slower}, 1000)
    assert (loss.connector, loss.rounds, loss.tokens_s) == ("slow", 3, 400.0)
    assert (loss.lost_percent, loss.low, loss.high) == pytest.approx((20.0, 20.0, 20.0))
    assert (loss.cpu_percent, loss.cpu_low, loss.cpu_high) == pytest.approx((5.0, 5.0, 5.0))


@pytest.mark.parametrize(
    ("walls", "goal"),
    [([1.0, 1.001, 1.01], "met"), ([1.03, 1.05, 1.04], "missed"), ([0.97, 1.05, 1.0], "not told")],
)
def test_the_goal_is_met_or_missed_only_where_both_bounds_and_the_noise_say_so(
    walls: list[float], goal: str
) -> None:
    measured = {PLAIN: [sample(1.0)] * 3, "kvtier cpu": [sample(wall) for wall in walls]}
    assert [loss.goal for loss in overhead.losses(measured, 1000)] == [goal]
    noisy = {**measured, overhead.CONTROL: [sample(1.06), sample(0.96), sample(1.0)]}
    assert [loss.goal for loss in overhead.losses(noisy, 1000)] == ["not told", ""]


def test_throughput_is_taken_against_the_primary_tier_alone_in_the_same_round() -> None:
    def one(wall_s: float, answers: list[list[int]]) -> Sample:
        return Sample(wall_s, {}, [wall_s / 4, wall_s / 2], answers)

    base = [one(4.0, [[1], [2]]), one(8.0, [[1], [2]])]
    rows = [one(2.0, [[1], [2]]), one(4.0, [[1], [3]])]
    record = convoy.convoy(convoy.SHARED, FS, rows, base, base)
    assert (record.throughput, record.low, record.high) == (2.0, 2.0, 2.0)
    assert (record.ttft_ms, record.ttft_p95_ms) == (1000.0, 1000.0)
    assert record.wrong == "1 of 4"


def test_a_second_engine_is_compared_with_files_in_the_same_round() -> None:
    def one(ttft_s: float, answer: int, cached: int = fleet.PROMPT_TOKENS) -> Sample:
        return Sample(ttft_s, {}, [ttft_s], [[answer]], {"cached": cached})

    first = one(10.0, 1, 0)
    pairs = {fleet.FILES: [(first, one(1.0, 1)), (first, one(2.0, 1))]}
    pairs["redis"] = [(first, one(3.0, 1)), (first, one(6.0, 2, 0))]
    files, redis, computed = fleet.table(pairs)
    assert (files.ratio, redis.ratio, computed.ratio) == (1.0, 3.0, 7.5)
    assert (redis.ttft_ms, redis.from_cache, redis.wrong) == (4500.0, "1280 of 2560", "1 of 2")


@pytest.mark.parametrize(
    ("connector", "samples", "expected"),
    [
        (
            FS,
            [
                ("kvtier_fetched_chunks_total", {"tier": "fs"}, 3.0),
                ("vllm:kv_offload_tiering_read_bytes_total", {"tier": "fs"}, 3 * 4096.0),  # counts once
                ("kvtier_loaded_chunks_total", {"tier": "cpu"}, 2.0),
                ("kvtier_loaded_chunks_total", {"tier": "fs"}, 1.0),
                ("kvtier_misses_total", {"reason": "budget"}, 4.0),
            ],
            (3, 1, 2, 2, "budget 4"),
        ),
        (
            NATIVE_FS,  # does not say where a chunk came from
            [
                ("vllm:kv_offload_tiering_read_bytes_total", {"tier": "1:fs"}, 3 * 4096.0),
                ("vllm:kv_offload_load_bytes_total", {}, 4 * 4096.0),
            ],
            (3, 3, 1, 0, "none"),
        ),
    ],
)
def test_traffic_is_taken_from_the_metrics_of_either_connector(
    connector: str, samples: list[tuple[str, dict[str, str], float]], expected: tuple[object, ...]
) -> None:
    row = Sample(1.0, {}, counts=convoy.counts_of(samples, 4096))
    found = convoy.traffic(convoy.DISTINCT, connector, [row], in_files=16)
    assert (found.fetched, found.loaded_fs, found.loaded_cpu, found.in_vain, found.misses) == expected


def test_a_measure_is_compared_within_a_round_with_kvtier_or_with_no_cache() -> None:
    found = {
        speed.HOST: {LMCACHE: [20.0, 400.0, 60.0], KVTIER: [10.0, 100.0, 20.0]},
        speed.UNSEEN: {KVTIER: [1.1, 2.2, 3.3], PLAIN: [1.0, 2.0, 3.0]},
        speed.WRITTEN: {KVTIER: [1.5], LMCACHE: [3.0]},
    }
    rows = {
        (row.measure, row.system): row for row in speed.table(found, {(speed.HOST, LMCACHE): [1279, 1280]})
    }
    host = rows[speed.HOST, LMCACHE]
    assert (host.value, host.ratio, host.low, host.high, host.against) == (60.0, 3.0, 2.0, 4.0, KVTIER)
    assert host.from_cache == "1279 of 1280"
    assert rows[speed.HOST, KVTIER].ratio is None
    assert rows[speed.UNSEEN, KVTIER].ratio == pytest.approx(1.1)
    assert rows[speed.UNSEEN, KVTIER].against == PLAIN
    assert rows[speed.WRITTEN, LMCACHE] == speed.Speed(speed.WRITTEN, LMCACHE, 3.0, 2.0, against=KVTIER, n=1)


@pytest.mark.parametrize(
    ("tokens", "logprobs", "wrong", "failed"),
    [
        ([1, 2, 3], [-0.5, -1.0, -1.5], 0, 0),
        ([1, 2, 3], [-0.5, -1.00001, -1.5], 0, 0),  # as engines that do the same differ
        ([1, 2, 4], [-0.5, -1.0, -1.5], 1, 0),
        ([1, 2, 3], [-0.5, -1.0, -1.6], 1, 0),  # the likeliest token is the same by chance
        ([1, 2, 3], [-0.5, float("nan"), -1.5], 1, 0),
        ([1, 2], [-0.5, -1.0], 0, 1),
    ],
)
def test_a_wrong_answer_is_seen_where_its_tokens_are_right_by_chance(
    tokens: list[int], logprobs: list[float], wrong: int, failed: int
) -> None:
    reference = {"answers": [[1, 2, 3], [5]], "logprobs": [[-0.5, -1.0, -1.5], [-2.0]]}
    answer = {"answers": [tokens, [5]], "logprobs": [logprobs, [-2.0]]}
    assert faults.count_wrong(answer, reference) == wrong
    assert faults.count_failed(answer, reference) == failed


def test_a_flipped_bit_makes_one_number_of_a_chunk_huge(tmp_path: Path) -> None:
    path = tmp_path / "chunk"
    path.write_bytes(struct.pack("<101f", *[0.1] * 101))
    faults.flip_a_bit(path)
    numbers = struct.unpack("<101f", path.read_bytes())
    assert len([number for number in numbers if number > 1e30]) == 1
    assert len([number for number in numbers if number == pytest.approx(0.1)]) == 100
