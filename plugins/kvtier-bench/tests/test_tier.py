"""``kvtier bench tier`` measures any tier, proves its bytes, and has its bare client beside it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import ConfigError, KVTierError
from kvtier.tiers.base import TierConfig
from kvtier_bench import tier as bench
from kvtier_bench.bare import BareClient
from kvtier_bench.tier import Latency, TierPoint

SIZE = 4096
Config = Callable[..., Path]


class Bare(BareClient[TierConfig]):
    """A client that takes a while for a put."""

    put_s = 0.0
    calls: list[str] = []
    stored: dict[str, bytes] = {}

    async def open(self) -> None:
        self.calls.append("open")

    async def put(self, names: Sequence[str], chunks: Sequence[memoryview]) -> None:
        await asyncio.sleep(self.put_s)
        assert not self.stored.keys() & set(names)
        self.stored.update(zip(names, map(bytes, chunks), strict=True))

    async def get(self, names: Sequence[str], chunks: Sequence[memoryview]) -> None:
        for name, chunk in zip(names, chunks, strict=True):
            chunk[:] = self.stored[name]

    async def discard(self, names: Sequence[str]) -> None:
        for name in names:
            del self.stored[name]

    async def aclose(self) -> None:
        self.calls.append("aclose")


@pytest.fixture(autouse=True)
def _in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "ALONE_S", 0.05)
    monkeypatch.setattr(bench, "SINGLES", 4)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Write the settings of a dummy tier into a file."""

    def write(**settings: Any) -> Path:
        path = tmp_path / "tier.json"
        path.write_text(json.dumps({"type": "dummy", **settings}))
        return path

    return write


def measure(path: Path, rounds: int = 1) -> tuple[dict[tuple[str, bool], TierPoint], dict[str, Latency]]:
    rows = bench.run(path, (SIZE,), mib=1, rounds=rounds)
    points = {(row.verb, row.busy): row for row in rows if isinstance(row, TierPoint)}
    return points, {row.call: row for row in rows if isinstance(row, Latency)}


def test_a_tier_without_a_bare_client_has_figures_and_nothing_beside_them(config: Config) -> None:
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
    config: Config, monkeypatch: pytest.MonkeyPatch, put_s: float, goal: str
) -> None:
    monkeypatch.setattr(Bare, "put_s", put_s)
    monkeypatch.setattr(Bare, "calls", [])
    monkeypatch.setattr(bench, "_bare_client", Bare)
    latency_s = 0.05 if goal == "FAIL" else 0.0  # far more than what a busy machine adds to either
    points, latencies = measure(config(put_latency_s=latency_s), rounds=3)
    point = points["put", False]
    assert point.goal == goal
    assert point.ratio is not None
    assert point.ratio_low is not None
    assert point.ratio_high is not None
    assert point.ratio_low <= point.ratio <= point.ratio_high
    assert (point.ratio >= 0.9) == (goal == "pass")
    assert latencies["put"].bare_p50_ms is not None
    assert latencies["put"].bare_p50_ms >= put_s * 1000
    assert (Bare.calls, Bare.stored) == (["open", "aclose"], {})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"corruption_rate": 1.0}, "gave wrong bytes: checksum"),
        ({"failure_rate": 1.0}, "a put of the tier under test did not do its work: 16 of 16 .* FAILED"),
        ({"capacity_bytes": 8 * SIZE}, "a get of the tier under test did not do its work"),
    ],
)
def test_a_tier_that_does_not_do_its_work_is_not_measured(
    config: Config, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(KVTierError, match=words):
        measure(config(**settings))


def test_settings_that_cannot_be_read_are_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "tier.toml"
    with pytest.raises(ConfigError, match=r"tier\.toml cannot be read: No such file or directory"):
        bench.read_config(path)
    path.write_text('type = "dummy"\nsed = 1\n')
    with pytest.raises(ConfigError, match=r"tier\.toml\.sed is not a setting; did you mean seed"):
        bench.read_config(path)
