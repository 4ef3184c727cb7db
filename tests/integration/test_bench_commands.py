"""Benchmarks with real engines finish and report what they promise, at sizes too small to measure."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

PATIENCE_S = 900.0

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(PATIENCE_S + 60),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed; nox -s integration installs it",
    ),
]

Report = Mapping[str, Sequence[Mapping[str, Any]]]


needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="NIXL is not installed; nox -s integration installs it"
)


def run(folder: Path, *arguments: str) -> Report:
    """Run a benchmark with its files below ``folder``; it must leave the folder empty."""
    root = folder / "files"
    found = measure(*arguments, "--root", str(root))
    assert list(root.iterdir()) == []
    return found


def measure(*arguments: str) -> Report:
    """Run a benchmark."""
    command = [sys.executable, "-m", "kvtier", "bench", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found: Report = json.loads(done.stdout)
    return found


def test_core(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier_bench.managers import core

    monkeypatch.setattr(
        core, "CASES", [core.Case("arc", tier, 12_288, 1) for tier in ("none", "memory", "fs")]
    )
    costs = [cost for cost in core.run() if isinstance(cost, core.Cost)]
    calls = [(cost.tier, cost.call) for cost in costs]
    assert len(set(calls)) == len(calls)
    assert ("none", "reserve 8,192, full") in calls
    assert {("memory", call := "secondary hit, until it is pinned for its load"), ("fs", call)} < set(calls)
    assert all(cost.kvtier > 0 and cost.vllm > 0 for cost in costs)


def test_replay(tmp_path: Path) -> None:
    """Each tier runs on its own servers, one after the other."""
    lines = [
        {"timestamp": 500 * number, "input_length": 5000, "output_length": 100}
        | {"hash_ids": [0, *range(100 * (number % 4) + 1, 100 * (number % 4) + 10)]}
        for number in range(8)
    ]
    (trace := tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    report = run(tmp_path, "replay", str(trace), "--speed", "1")
    served = {row["server"]: row for row in report["Served"]}
    assert set(served) == {"none", "kvtier cpu+fs"}
    assert [row["failed"] for row in served.values()] == ["0", "0"]
    assert all(row["hit_percent"] > 0 for row in served.values())
    tiers = {row["source"] for row in report["Source"] if row["server"] == "kvtier cpu+fs"}
    assert tiers == {"computed", "device", "cpu", "fs"}


@needs_nixl
def test_peers() -> None:
    report = measure("peers", "--chunk-bytes", "65536", "--mib", "4", "--rounds", "1")
    (read,) = report["Throughput"]
    assert (read["subject"], read["verb"], read["chunk_bytes"]) == ("nixl", "get", 65536)
    assert min(read["gb_s"], read["reference_gb_s"], read["ratio"]) > 0
    (single,) = report["Latency"]
    assert min(single["tier_p50_ms"], single["bare_p50_ms"]) > 0


@needs_nixl
def test_fleet(tmp_path: Path) -> None:
    report = run(tmp_path, "fleet", "--nixl", "--model", "tiny", "--rounds", "1")
    served = {row["way"]: row for row in report["Served"]}
    assert set(served) == {"files", "nixl", "computed", "device"}
    assert {row["wrong"] for row in served.values()} == {"0 of 4"}
    assert {row["way"] for row in served.values() if row["from_cache"] == "0 of 5120"} == {"computed"}


@needs_nixl
@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("kvcr") is None, reason="KVCR is not installed")
def test_fleet_beside_kvcr(tmp_path: Path) -> None:
    report = run(tmp_path, "fleet", "--kvcr", sys.executable, "--model", "tiny", "--rounds", "1")
    served = {row["way"]: row for row in report["Served"]}
    assert served["nixl, kv.fetch"]["wrong"] == "0 of 4"
    assert served["nixl, kv.fetch"]["from_cache"] == "5120 of 5120"
    assert served["KVCR, kv.fetch"]["wrong"] == "0 of 4"
    wrong = {(row["way"], row["fault"]): row["wrong"] for row in report["Fault"]}
    assert {found for (way, _), found in wrong.items() if way == "nixl, kv.fetch"} == {"0 of 4", "0 of 12"}
    assert wrong["KVCR, kv.fetch", "none (control)"] == "0 of 4"


@needs_nixl
def test_losses_while_reading() -> None:
    report = measure("fleet", "--serve", "0.2", "--model", "tiny", "--rounds", "1")
    control, *read = report["Lost"]
    assert control["gb_s"] == 0
    assert all(0 < row["gb_s"] < 0.3 and row["tier_s_per_gb"] > 0 for row in read)


def test_restart() -> None:
    report = measure("restart", "--model", "tiny", "--rounds", "1")
    found = {row["way"]: row for row in report["FirstHit"]}
    assert [found[way]["from_cache"] for way in ("kept memory", "files", "nothing")] == [
        "5120 of 5120",
        "5120 of 5120",
        "0 of 5120",
    ]
    assert {row["wrong"] for row in found.values()} == {"0 of 4"}
    assert all(row["tier_us"] > 0 and row["chunks"] == 64 for row in report["Keeping"])


def test_hints(tmp_path: Path) -> None:
    report = run(tmp_path, "hints", "--conversations", "4", "--agents", "4", "--tokens-per-chunk", "16")
    returning = {(row["way"], row["of"]): row for row in report["Returning"]}
    assert len(returning) == 12
    assert all(row["ratio"] > 0 for row in returning.values())
    assert {row["wrong"].partition(" ")[0] for row in report["Moved"]} == {"0"}
    found = {row["way"]: row for row in report["Moved"]}
    assert found["no hints"]["prefetched_chunks"] == 0 < found["oracle"]["prefetched_chunks"]


def test_versus_without_lmcache(tmp_path: Path) -> None:
    """A system that cannot run is named in the report, and the others are measured."""
    report = run(tmp_path, "versus", "--model", "tiny", "--rounds", "1", "--only", "speed")
    (missing,) = report["NotRun"]
    assert missing["system"] == "LMCache"
    assert "lmcache is not installed" in missing["reason"]
    found = {(row["measure"], row["system"]): row for row in report["Speed"]}
    assert {system for _, system in found} == {"kvtier", "vLLM native", "none"}
    for system in ("kvtier", "vLLM native"):
        for measure in ("TTFT host hit, ms", "TTFT storage hit, ms"):
            row = found[measure, system]
            assert (row["n"], row["from_cache"]) == (1, "3840 of 3840")  # of the measured round
            assert row["value"] > 0
        assert found["hits with other tokens than computed", system]["value"] == 0
        restarted = found["TTFT first hit of a restarted engine, ms", system]
        assert (restarted["n"], restarted["from_cache"]) == (1, "1280 of 1280")
        assert found["until ready, s", system]["n"] == 2
        for measure in ("nothing reused, s", "nothing reused, processor s"):
            row = found[measure, system]
            assert (row["against"], row["ratio"] > 0) == ("none", True)
        convoy = found["convoy from storage, s", system]
        assert convoy["from_cache"] == "8192 of 8192", "prefixes come from files"
    (machine,) = report["Machine"]
    assert machine["vllm"] != "not installed"
