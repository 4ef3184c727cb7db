"""The measurement of a start on a root with many chunks: it measures what it says, and leaves nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtier.cli import bench_root
from kvtier.cli import main as cli
from kvtier.errors import ConfigError, KVTierError
from kvtier.tiers.base import Outcome, Status
from kvtier.tiers.fs import FsTier


def test_a_root_is_measured_and_the_chunks_are_removed(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["--root", str(folder), "--chunks", "600", "--rounds", "2", "--json", str(figures)]
    result = CliRunner().invoke(cli.app, ["bench", "root", *options])
    assert result.exit_code == 0, result.output
    rows = json.loads(figures.read_text())["RootStart"]
    assert [row["chunks"] for row in rows] == [600]
    for row in rows:
        assert 0 < row["open_s"] < row["answered_s"] <= row["worst_s"]
        assert row["answered_s"] <= row["known_s"]
        assert row["lookup_ms"] > 0
    assert list(folder.iterdir()) == []


def test_a_disk_that_does_not_take_the_chunks_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def put(tier: FsTier, batch: object) -> Outcome:
        return Outcome.all(Status.REFUSED, 4, "min_free")

    monkeypatch.setattr(FsTier, "put", put)
    with pytest.raises(ConfigError, match=r"does not take 4 chunks \(min_free\): name a directory"):
        bench_root.run(tmp_path, chunks=4)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_for_the_chunks_is_refused_before_any_is_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def put(tier: FsTier, batch: object) -> Outcome:
        raise AssertionError("a chunk was put")

    monkeypatch.setattr(FsTier, "put", put)
    with pytest.raises(KVTierError, match=r"needed for 1,000,000,000 chunks, and .* GiB are free: name a"):
        bench_root.run(tmp_path, chunks=10**9)
    assert list(tmp_path.iterdir()) == []
