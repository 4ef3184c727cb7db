"""The benchmark of the file tier: it measures, compares with its goals, and leaves nothing."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest

from kvtier.cli import bench_fs, bench_fs_goals, bench_fs_limit
from kvtier.cli.bench_fs import Point
from kvtier.errors import KVTierError
from kvtier.tiers.base import Outcome, Status
from kvtier.tiers.fs import FsTier

pytestmark = pytest.mark.timeout(120)


def point(path, verb, busy, **seen):
    given = {"ratio": 1.0, "cpu_us_chunk": 10.0, "bare_us_chunk": 5.0, "held_share": 0.01, **seen}
    return Point(
        path=path,
        chunk_bytes=524288,
        verb=verb,
        busy=busy,
        raw_gb_s=1.0,
        tier_gb_s=1.0,
        spread="1-1",
        slowdown=None,
        raw_slowdown=None,
        **given,
    )


def all_points(**seen):
    """Points of both verbs, idle and busy; ``seen`` is of the tier's busy put."""
    return [
        point(path, verb, busy, **(seen if (path, verb, busy) == ("files", "put", True) else {}))
        for path in ("files", "vllm")
        for verb in ("put", "get")
        for busy in (False, True)
    ]


def test_all_goals_are_met_where_all_is_well():
    goals = bench_fs_goals.compare(all_points(), shares_interpreter=True)
    assert len(goals) == 8
    assert all(goal.passed for goal in goals)


@pytest.mark.parametrize(
    ("seen", "what"), [({"ratio": 0.7}, "beside an engine"), ({"held_share": 0.03}, "interpreter")]
)
def test_a_goal_that_is_missed_is_said(seen, what):
    missed = [
        goal
        for goal in bench_fs_goals.compare(all_points(**seen), shares_interpreter=True)
        if not goal.passed
    ]
    assert [what in goal.what for goal in missed] == [True]


def test_without_vllm_the_goals_that_need_it_are_left_out():
    points = [found for found in all_points() if found.path != "vllm"]
    assert not any("vLLM" in goal.what for goal in bench_fs_goals.compare(points, shares_interpreter=True))


def test_what_is_in_another_process_takes_no_interpreter_from_the_engine():
    goals = bench_fs_goals.compare(all_points(held_share=0.5), shares_interpreter=False)
    assert goals
    assert all(goal.passed and "interpreter" not in goal.what for goal in goals)


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_every_path_is_measured_and_nothing_is_left(tmp_path, monkeypatch, isolation):
    monkeypatch.setattr(bench_fs_limit, "FILE_BYTES", 8 * 2**20)
    monkeypatch.setattr(bench_fs, "VllmUnderTest", missing)
    result = bench_fs.run(tmp_path, sizes=(4096,), seconds=0.05, rounds=1, isolation=isolation)
    points = [found for found in result if isinstance(found, Point)]
    assert {(found.path, found.verb, found.busy) for found in points} == {
        (bench_fs.FILES, verb, busy) for verb in ("put", "get") for busy in (False, True)
    }
    assert all(found.tier_gb_s > 0 and found.cpu_us_chunk > 0 for found in points)
    assert all((found.raw_busy is not None) == found.busy for found in points)
    assert list(tmp_path.iterdir()) == []


def missing(*_):
    raise ImportError("no vLLM here")


def with_free(monkeypatch, free):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))


def test_a_disk_without_room_for_the_run_is_refused_before_a_chunk_is_put(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_fs_limit, "FILE_BYTES", 8 * 2**20)
    monkeypatch.setattr(FsTier, "open", None)
    with_free(monkeypatch, bench_fs_limit.FILE_BYTES)  # in flight are 2 MiB
    with pytest.raises(KVTierError, match=r"at the disk's rate, and .* GiB are free: name a directory"):
        bench_fs.run(tmp_path, sizes=(4096,), seconds=1.0, rounds=1)
    with_free(monkeypatch, 1000)
    with pytest.raises(KVTierError, match=r"needed for the file .* GiB are free: name a directory"):
        bench_fs.run(tmp_path, sizes=(4096,), seconds=1.0, rounds=1)
    assert list(tmp_path.iterdir()) == []


def test_what_a_run_needs_grows_with_the_rate_the_length_and_the_trailers():
    one = bench_fs._bytes_put(1.0, (65536,), 1.0)
    assert one >= 1.5e9
    assert bench_fs._bytes_put(2.0, (65536,), 1.0) > one + 1.5e9
    assert bench_fs._bytes_put(1.0, (65536,), 2.0) > one + 1.5e9
    assert bench_fs._bytes_put(1.0, (65536, 4096), 1.0) >= 3.0e9


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [("enospc", "name a directory"), ("eio", "the log")],
)
def test_a_tier_that_fails_on_the_way_is_said_in_one_error(tmp_path, monkeypatch, reason, remedy):
    async def put(tier, batch):
        return Outcome.all(Status.REFUSED, len(batch), reason)

    monkeypatch.setattr(bench_fs_limit, "FILE_BYTES", 8 * 2**20)
    monkeypatch.setattr(FsTier, "put", put)
    with pytest.raises(KVTierError, match=rf"\({reason}\): .*{remedy}"):
        bench_fs.run(tmp_path, sizes=(4096,), seconds=0.01, rounds=1)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_does_not_take_the_file_of_its_limit_is_said_in_words(tmp_path):
    (tmp_path / "raw-limit").symlink_to("/dev/full")
    with (
        pytest.raises(
            KVTierError, match=r"could not be written \(No space left on device\): name a directory"
        ),
        bench_fs_limit.raw_limit(tmp_path, bench_fs_limit.BLOCK_BYTES),
    ):
        pass
    assert list(tmp_path.iterdir()) == []
