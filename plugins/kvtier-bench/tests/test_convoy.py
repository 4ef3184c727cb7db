"""What is made of the convoy's samples."""

from __future__ import annotations

import pytest

from kvtier_bench.convoy import DISTINCT, SHARED, Sample, convoy, counts_of, traffic
from kvtier_bench.engines import FS, NATIVE_FS


def sample(wall_s: float, answers: list[list[int]], **counts: float) -> Sample:
    named = {name.replace("_because_", " "): count for name, count in counts.items()}
    return Sample(wall_s, wall_s / 8, [wall_s / 4, wall_s / 2], answers, named)


def test_throughput_is_taken_against_the_primary_tier_alone_in_the_same_round() -> None:
    base = [sample(4.0, [[1], [2]]), sample(8.0, [[1], [2]])]
    rows = [sample(2.0, [[1], [2]]), sample(4.0, [[1], [3]])]
    record = convoy(SHARED, FS, rows, base, base)
    assert (record.throughput, record.low, record.high) == (2.0, 2.0, 2.0)
    assert (record.seconds, record.requests_s) == (3.0, 0.75)
    assert (record.ttft_ms, record.ttft_p95_ms) == (1000.0, 1000.0)
    assert (record.cpu_s, record.wrong) == (0.375, "1 of 4")


def test_what_was_fetched_and_not_loaded_was_fetched_in_vain() -> None:
    rows = [
        sample(1.0, [], fetched=10, loaded_fs=8, loaded_cpu=3, expired=1),
        sample(1.0, [], fetched=5, loaded_fs=5, miss_because_budget=2, miss_because_absent=7),
    ]
    record = traffic(DISTINCT, FS, rows, in_files=16)
    assert (record.fetched, record.loaded_fs, record.loaded_cpu, record.in_vain) == (15, 13, 3, 2)
    assert (record.expired, record.misses) == (1, "absent 7, budget 2")


@pytest.mark.parametrize(("fetched", "loaded", "expected"), [(10, 6, (6, 0, 4)), (10, 12, (10, 2, 0))])
def test_vllm_does_not_say_where_a_chunk_came_from(
    fetched: int, loaded: int, expected: tuple[int, int, int]
) -> None:
    record = traffic(SHARED, NATIVE_FS, [sample(1.0, [], fetched=fetched, loaded=loaded)], in_files=10)
    assert (record.loaded_fs, record.loaded_cpu, record.in_vain) == expected
    assert record.misses == "none"


def test_what_kvtier_says_in_words_of_its_own_and_of_vllm_counts_once() -> None:
    samples = [
        ("kvtier_fetched_chunks_total", {"tier": "fs"}, 3.0),
        ("vllm:kv_offload_tiering_read_bytes_total", {"tier": "fs"}, 3 * 4096.0),
        ("kvtier_loaded_chunks_total", {"tier": "cpu"}, 2.0),
        ("kvtier_loaded_chunks_total", {"tier": "fs"}, 1.0),
        ("kvtier_loaded_chunks_created", {"tier": "fs"}, 1e9),
        ("kvtier_misses_total", {"reason": "budget"}, 4.0),
        ("kvtier_expired_requests_total", {}, 5.0),
    ]
    expected = {"fetched": 3, "loaded_cpu": 2, "loaded_fs": 1, "miss budget": 4, "expired": 5}
    assert counts_of(samples, 4096) == expected


def test_vllm_counts_bytes() -> None:
    samples = [
        ("vllm:kv_offload_tiering_read_bytes_total", {"tier": "1:fs"}, 3 * 4096.0),
        ("vllm:kv_offload_load_bytes_total", {}, 2 * 4096.0),
    ]
    assert counts_of(samples, 4096) == {"fetched": 3, "loaded": 2}
