"""``kvtier bench tier`` measures any tier, proves its bytes, and has its bare client beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvtier.cli import bench_tier
from kvtier.cli import main as cli
from kvtier.cli.bench_tier import Latency, TierPoint
from kvtier.errors import ConfigError, KVTierError
from kvtier.memory.heap import HeapMemory
from kvtier.tiers.fs import FsConfig
from kvtier_testing.files import PlainFiles
from tests.unit.conftest import InstallDistribution

SIZE = 4096

BARE = """
import asyncio

from kvtier_testing.bare import BareClient

CALLS = []
STORED = {{}}


class Bare(BareClient):
    async def open(self):
        CALLS.append("open")

    async def put(self, names, chunks):
        await asyncio.sleep({put_s})
        assert not STORED.keys() & set(names)
        STORED.update(zip(names, map(bytes, chunks), strict=True))

    async def get(self, names, chunks):
        for name, chunk in zip(names, chunks, strict=True):
            chunk[:] = STORED[name]

    async def discard(self, names):
        for name in names:
            del STORED[name]

    async def aclose(self):
        CALLS.append("aclose")
"""


@pytest.fixture(autouse=True)
def _in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_tier, "ALONE_S", 0.05)


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Path]:
    """Write the settings of a dummy tier into a file."""

    def write(**settings: Any) -> Path:
        path = tmp_path / "tier.json"
        path.write_text(json.dumps({"type": "dummy", **settings}))
        return path

    return write


def measure(path: Path, rounds: int = 1) -> tuple[dict[tuple[str, bool], TierPoint], dict[str, Latency]]:
    rows = bench_tier.run(path, (SIZE,), mib=1, rounds=rounds)
    points = {(row.verb, row.busy): row for row in rows if isinstance(row, TierPoint)}
    return points, {row.call: row for row in rows if isinstance(row, Latency)}


def test_a_tier_without_a_bare_client_has_figures_and_nothing_beside_them(
    config: Callable[..., Path],
) -> None:
    points, latencies = measure(config())
    assert set(points) == {("put", False), ("put", True), ("get", False), ("get", True)}
    for (_, busy), point in points.items():
        assert point.tier_gb_s > 0
        assert (point.tier_slowdown is not None) == busy
        assert (point.bare_gb_s, point.ratio, point.goal) == (None, None, "-")
    assert set(latencies) == {"put", "get", "contains, 500 keys"}
    for latency in latencies.values():
        assert 0 < latency.tier_p50_ms <= latency.tier_p99_ms
        assert latency.bare_p50_ms is None


@pytest.mark.parametrize(("put_s", "goal"), [(0.05, "pass"), (0.0, "FAIL")])
def test_a_tier_is_measured_beside_its_bare_client_which_is_left_as_it_was(
    config: Callable[..., Path],
    install_distribution: InstallDistribution,
    monkeypatch: pytest.MonkeyPatch,
    put_s: float,
    goal: str,
) -> None:
    monkeypatch.setattr(bench_tier, "SINGLES", 4)
    install_distribution("acme-bench", BARE.format(put_s=put_s), {"dummy": "Bare"}, group="kvtier.benchmarks")
    latency_s = 0.05 if goal == "FAIL" else 0.0  # far more than what a busy machine adds to either
    points, latencies = measure(config(put_latency_s=latency_s), rounds=3)
    point = points["put", False]
    assert point.goal == goal
    assert point.bare_gb_s is not None
    assert point.ratio is not None
    assert point.ratio_low is not None
    assert point.ratio_high is not None
    assert point.ratio_low <= point.ratio <= point.ratio_high
    assert (point.ratio >= 0.9) == (goal == "pass")
    assert latencies["put"].bare_p50_ms is not None
    assert latencies["put"].bare_p50_ms >= put_s * 1000
    import acme_bench  # type: ignore[import-not-found]

    assert acme_bench.CALLS == ["open", "aclose"]
    assert acme_bench.STORED == {}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"corruption_rate": 1.0}, "gave wrong bytes: checksum"),
        (
            {"failure_rate": 1.0},
            "a put of the tier under test did not do its work: 16 of 16 chunks ended FAILED",
        ),
        ({"capacity_bytes": 8 * SIZE}, "a get of the tier under test did not do its work"),
    ],
)
def test_a_tier_that_does_not_do_its_work_is_not_measured(
    config: Callable[..., Path], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(KVTierError, match=words):
        measure(config(**settings))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("tier.json", "{", "cannot be read: .*; JSON is needed, or TOML in a"),
        ("tier.json", "[]", "must hold the settings of one tier"),
        ("tier.json", "{}", r"tier\.json\.type is missing; installed are: .*dummy"),
        ("tier.json", '{"type": "dumy"}', "did you mean dummy"),
        ("tier.json", '{"type": "dummy", "sed": 1}', r"tier\.json\.sed is not a setting; did you mean seed"),
        ("tier.toml", "type = ", "cannot be read"),
    ],
)
def test_settings_that_cannot_be_read_are_refused_in_words(
    tmp_path: Path, name: str, text: str, words: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        bench_tier.read_config(path)


def test_settings_may_be_toml(tmp_path: Path) -> None:
    path = tmp_path / "tier.toml"
    path.write_text('type = "dummy"\ncapacity_bytes = "1MiB"\n')
    assert bench_tier.read_config(path).model_dump()["capacity_bytes"] == 2**20


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.json cannot be read: No such file or directory"):
        bench_tier.read_config(tmp_path / "absent.json")


def command(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["bench", "tier", *arguments])


def test_the_command_shows_figures_and_writes_them(config: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ["--chunk-bytes", str(SIZE), "--mib", "1", "--rounds", "1", "--json", str(out)]
    result = command("--config", str(config()), *options)
    assert result.exit_code == 0, result.output
    assert "A tier beside its bare client" in result.output
    assert {row["chunk_bytes"] for row in json.loads(out.read_text())["TierPoint"]} == {SIZE}


def test_the_command_needs_a_file_and_sizes_that_are_possible(
    config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert "--config" in command().output
    assert "--chunk-bytes" in command("--config", str(config()), "--chunk-bytes", "1").output


async def test_the_file_tier_is_measured_beside_plain_files_of_which_none_is_left(tmp_path: Path) -> None:
    client = PlainFiles(FsConfig(root_dir=tmp_path), SIZE)
    await client.open()
    memory = HeapMemory(6, SIZE)
    for slot in range(3):
        memory.view(slot)[:] = bytes([slot]) * SIZE
    names = ["a", "b", "c"]
    await client.put(names, [memory.view(slot) for slot in range(3)])
    await client.get(names[::-1], [memory.view(slot) for slot in (3, 4, 5)])
    assert [bytes(memory.view(slot)[:1]) for slot in (3, 4, 5)] == [b"\2", b"\1", b"\0"]
    await client.discard(names[:1])
    with pytest.raises(FileNotFoundError):
        await client.get(names, [memory.view(slot) for slot in range(3)])
    await client.aclose()
    assert list(tmp_path.iterdir()) == []
