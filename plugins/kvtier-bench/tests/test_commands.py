"""Each command runs on a tiny case, writes the documented fields as JSON, and refuses early."""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvtier.errors import KVTierError
from kvtier.tiers import TierConfig
from kvtier_bench import commands
from kvtier_bench.machine import Machine
from kvtier_bench.storage import disk
from kvtier_bench.storage import tier as tier_bench
from kvtier_bench.storage.bare import BareClient
from kvtier_bench.storage.throughput import Throughput
from kvtier_bench.storage.tier import Latency

SIZE = 4096
Run = Callable[..., Result]
Records = dict[str, list[dict[str, Any]]]


class Bare(BareClient[TierConfig]):
    """A client that keeps chunks in a dict."""

    calls: list[str] = []
    stored: dict[str, bytes] = {}

    async def open(self) -> None:
        self.calls.append("open")

    async def put(self, names: Sequence[str], chunks: Sequence[memoryview]) -> None:
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
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "FILE_BYTES", 8 * 2**20)
    monkeypatch.setattr(tier_bench, "SINGLES", 4)


@pytest.fixture
def run() -> Run:
    return lambda *arguments: CliRunner().invoke(commands.bench, list(arguments))


def records(result: Result, *kinds: type[Any]) -> Records:
    """Return the records of a command's JSON, after checking that they have the fields of these classes."""
    assert result.exit_code == 0, result.output
    found: Records = json.loads(result.stdout)
    assert set(found) == {kind.__name__ for kind in kinds}
    for kind in kinds:
        fields = {field.name for field in dataclasses.fields(kind)}
        assert all(set(row) == fields for row in found[kind.__name__])
    return found


def tier_file(folder: Path, **settings: Any) -> str:
    path = folder / "tier.json"
    path.write_text(json.dumps({"type": "dummy", **settings}))
    return str(path)


def test_fs(run: Run, tmp_path: Path) -> None:
    options = ["--chunk-bytes", str(SIZE), "--mib", "1", "--rounds", "1", "--json"]
    points = records(run("fs", str(tmp_path), *options), Throughput, Machine)["Throughput"]
    kvtier = [point for point in points if point["subject"] == "kvtier"]
    assert {point["verb"] for point in kvtier} == {"put", "get"}
    for point in kvtier:
        assert point["gb_s"] > 0
        assert point["reference_gb_s"] > 0
        assert point["cpu_us_chunk"] > point["without_checksum_us"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("has_bare_client", [True, False])
def test_tier(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_bare_client: bool) -> None:
    monkeypatch.setattr(Bare, "calls", [])
    if has_bare_client:
        monkeypatch.setattr(tier_bench, "_bare_client", Bare)
    options = ["--chunk-bytes", str(SIZE), "--mib", "1", "--rounds", "2", "--json"]
    found = records(run("tier", "--config", tier_file(tmp_path), *options), Throughput, Latency, Machine)
    assert {point["verb"] for point in found["Throughput"]} == {"put", "get"}
    assert all((point["ratio"] is not None) == has_bare_client for point in found["Throughput"])
    assert {point["goal"] for point in found["Throughput"]} <= (
        {"pass", "FAIL"} if has_bare_client else {"-"}
    )
    assert {row["call"] for row in found["Latency"]} == {"put", "get", "contains, 500 keys"}
    assert all(0 < row["tier_p50_ms"] <= row["tier_p99_ms"] for row in found["Latency"])
    assert (Bare.calls, Bare.stored) == (["open", "aclose"] if has_bare_client else [], {})


def test_device(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from kvtier_bench import device

    monkeypatch.setattr(device, "PAGE_BYTES", (2**16, 2**21))
    monkeypatch.setattr(device, "ROUNDS", 1)
    monkeypatch.setattr(device, "STEPS", 2)
    kinds = device.Machine, device.CopySpeed, device.ComputeLoss, device.BusyEngine
    found = records(run("device", "--backend", "cpu", "--mib", "16", "--json"), *kinds)
    assert {speed["way"] for speed in found["CopySpeed"]} == {"store", "load", "both"}
    rows = found["BusyEngine"]
    assert [(it["page_kib"], it["pages"], it["way"]) for it in rows] == [
        (64, 256, way) for way in ("store", "load")
    ]
    assert all(it["busy_ms"] > 1000 * device.BUSY_STEP_S for it in rows)
    assert all(it["ratio"] > 0 for it in rows)


def test_missing_tools_are_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("kvtier_tools", "kvtier_bench.replay"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "kvtier_tools", None)
    with pytest.raises(KVTierError, match=r"needs kvtier-tools: pip install \./plugins/kvtier-tools"):
        raise run("replay", "trace.jsonl").exception or AssertionError


def test_only_replay_needs_tools() -> None:
    sources = Path(commands.__file__).parent
    users = {path.parent.name for path in sources.rglob("*.py") if "from kvtier_tools" in path.read_text()}
    assert users == {"replay"}


def test_missing_engine_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")

    monkeypatch.setattr(importlib, "import_module", absent)
    result = run("core")
    assert result.exit_code == 2
    assert "this command needs vllm, which is not installed" in result.output


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"corruption_rate": 1.0}, "gave wrong bytes: checksum"),
        ({"failure_rate": 1.0}, "a put of the tier under test failed: 16 of 16 chunks ended FAILED"),
        ({"sed": 1}, "sed is not a setting; did you mean seed"),
    ],
)
def test_failing_tier_is_not_measured(run: Run, tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    result = run(
        "tier", "--config", tier_file(tmp_path, **settings), "--chunk-bytes", str(SIZE), "--mib", "1"
    )
    assert words in str(result.exception)


def test_full_disk_is_refused_first(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=8 * 2**20))
    result = run("fs", str(tmp_path), "--chunk-bytes", str(SIZE))
    assert "GiB are free: name a directory" in str(result.exception)
    assert list(tmp_path.iterdir()) == []
