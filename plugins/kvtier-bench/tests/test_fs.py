"""The benchmark of the file tier: it measures, says what room it needs, and leaves nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier.errors import KVTierError
from kvtier.tiers.base import Batch, Outcome, Status
from kvtier.tiers.fs import FsTier
from kvtier_bench import disk, fs
from kvtier_bench.fs import Point


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise ImportError("no vLLM here")

    monkeypatch.setattr(disk, "FILE_BYTES", 8 * 2**20)
    monkeypatch.setattr(fs, "VllmUnderTest", missing)


def test_the_tier_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    result = fs.run(tmp_path, sizes=(4096,), seconds=0.05, rounds=1)
    points = [found for found in result if isinstance(found, Point)]
    assert {(found.path, found.verb, found.busy) for found in points} == {
        (fs.KVTIER, verb, busy) for verb in ("put", "get") for busy in (False, True)
    }
    assert all(found.tier_gb_s > 0 and found.cpu_us_chunk > 0 for found in points)
    assert all((found.raw_busy is not None) == found.busy for found in points)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("free", "words"),
    [
        (8 * 2**20, r"at the disk's rate, and .* GiB are free: name a directory"),  # in flight are 2 MiB
        (1000, r"needed for the file .* GiB are free: name a directory"),
    ],
)
def test_a_disk_without_room_for_the_run_is_refused_before_a_chunk_is_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, words: str
) -> None:
    monkeypatch.setattr(FsTier, "open", None)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with pytest.raises(KVTierError, match=words):
        fs.run(tmp_path, sizes=(4096,), seconds=1.0, rounds=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("reason", "remedy"), [("enospc", "name a directory"), ("eio", "the log")])
def test_a_tier_that_fails_on_the_way_is_told_in_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str, remedy: str
) -> None:
    async def put(tier: FsTier, batch: Batch) -> Outcome:
        return Outcome.all(Status.REFUSED, len(batch), reason)

    monkeypatch.setattr(FsTier, "put", put)
    with pytest.raises(KVTierError, match=rf"\({reason}\): .*{remedy}"):
        fs.run(tmp_path, sizes=(4096,), seconds=0.01, rounds=1)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_does_not_take_the_file_of_its_limit_is_told_in_words(tmp_path: Path) -> None:
    (tmp_path / "raw-limit").symlink_to("/dev/full")
    words = r"could not be written \(No space left on device\): name a directory"
    with pytest.raises(KVTierError, match=words), disk.raw_limit(tmp_path, disk.BLOCK_BYTES):
        pass
    assert list(tmp_path.iterdir()) == []
