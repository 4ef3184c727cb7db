"""The comparison of threads and processes: its arithmetic, and a short run without an engine."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from kvtier.cli.bench_isolation import (
    BUSY,
    IDLE,
    PROCESS,
    THREAD,
    Bed,
    BenchError,
    Stretch,
    promotions,
    taken,
)
from tests.unit.cli.conftest import Kvtier


def test_a_promotion_is_compared_with_the_threads_of_the_same_round() -> None:
    seconds = {
        (IDLE, 1, THREAD): [0.001, 0.010, 0.002],
        (IDLE, 1, PROCESS): [0.002, 0.020, 0.004],
        (BUSY, 1, THREAD): [0.008, 0.008, 0.008],
        (BUSY, 1, PROCESS): [0.004, 0.002, 0.002],
    }
    found = {(row.owner, row.isolation): row for row in promotions("fs", seconds)}
    idle, busy = found[IDLE, PROCESS], found[BUSY, PROCESS]
    assert (idle.ms, idle.ratio, idle.low, idle.high) == pytest.approx((4.0, 2.0, 2.0, 2.0))
    assert (busy.ms, busy.ratio) == pytest.approx((2.0, 0.25))
    assert busy.low == pytest.approx(0.25)
    assert busy.high == pytest.approx(0.5)
    assert all(row.ratio == 1.0 for row in found.values() if row.isolation == THREAD)
    assert idle.ms < idle.p95_ms <= 20.0


def test_what_is_taken_is_what_the_owner_waited_more_than_alone() -> None:
    alone = Stretch(wall_s=1.0, own_s=0.5, blocked_s=0.05, chunks=0, others_s=0.0)
    beside = Stretch(wall_s=1.2, own_s=0.5, blocked_s=0.15, chunks=100, others_s=0.05)
    pairs = {THREAD: [(alone, beside), (alone, beside)], PROCESS: [(alone, alone)]}
    thread, process = taken("fs", pairs, 8)
    assert (thread.isolation, thread.chunks) == (THREAD, 8)
    assert (thread.blocked_percent, thread.low, thread.high) == pytest.approx((20, 20, 20))
    assert (thread.blocked_us_a_chunk, thread.others_us_a_chunk) == pytest.approx((1000, 500))
    assert (thread.longer_percent, thread.chunks_s) == pytest.approx((20, 100 / 1.2))
    assert (process.blocked_percent, process.blocked_us_a_chunk, process.chunks_s) == (0, 0, 0)


def test_an_owner_that_waits_for_the_lock_is_seen_to_and_one_that_computes_alone_is_not() -> None:
    bed = Bed(THREAD, {"type": "dummy"}, 4096, 4)
    end = threading.Event()

    def hold() -> None:
        while not end.is_set():
            sum(range(200_000))  # for some milliseconds without letting go of the lock

    holder = threading.Thread(target=hold)
    try:
        bed.fill()
        # A machine that stands still for a moment looks like a lock that is waited for: the least counts.
        stretches = [bed.compute_beside(0, 20_000) for _ in range(3)]
        assert not any(stretch.chunks for stretch in stretches)
        alone_share = min(stretch.blocked_s / stretch.own_s for stretch in stretches)
        holder.start()
        beside = bed.compute_beside(2, 20_000)
        assert beside.chunks > 0, "promotions run meanwhile"
        assert beside.blocked_s / beside.own_s > 0.2 + alone_share
    finally:
        end.set()
        holder.join()
        bed.close()


def test_a_tier_that_loses_chunks_is_not_measured() -> None:
    bed = Bed(THREAD, {"type": "dummy", "capacity_bytes": 16384}, 4096, 4)
    try:
        bed.fill()
        with pytest.raises(BenchError, match=r"of 4 chunks \d were promoted"):
            bed.promote(4, lambda: None)
    finally:
        bed.close()


@pytest.mark.timeout(300)
def test_the_command_measures_both_and_leaves_nothing(kvtier: Kvtier, tmp_path: Path) -> None:
    root, report = tmp_path / "files", tmp_path / "report.json"
    small = ("--no-engine", "--promotion-rounds", "1", "--chunk-bytes", "4096", "--stretch-s", "0.02")
    said = kvtier("bench", "isolation", *small, "--root", root, "--json", report)
    assert said.status == 0, said.err
    assert list(root.iterdir()) == []
    tables = json.loads(report.read_text())
    promoted = {(row["tier"], row["owner"], row["chunks"], row["isolation"]) for row in tables["Promotion"]}
    assert len(promoted) == 2 * 2 * 3 * 2
    for row in tables["Promotion"]:
        assert 0 < row["ms"] <= row["p95_ms"]
        assert row["low"] <= row["ratio"] <= row["high"]
    lost = {(row["tier"], row["isolation"]): row for row in tables["Taken"]}
    assert set(lost) == {("dummy", "thread"), ("dummy", "process"), ("fs", "thread"), ("fs", "process")}
    assert all(row["low"] <= row["blocked_percent"] <= row["high"] for row in lost.values())
    started = {(row["tier"], row["isolation"]): row for row in tables["Start"]}
    assert started.keys() == lost.keys()
    assert all(0 < row["returns_ms"] < row["answers_ms"] <= row["longest_ms"] for row in started.values())
    assert "Promotion" in tables
    assert "Loss" not in tables
    assert "thread" in said.out
