"""Benchmarks with real engines run to their end and give what they promise, at sizes that say nothing."""

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


def run(folder: Path, *arguments: str) -> Report:
    """Run a benchmark with its files below ``folder``, which it has to leave empty."""
    root = folder / "files"
    command = [sys.executable, "-m", "kvtier", "bench", *arguments]
    done = subprocess.run(
        [*command, "--root", str(root), "--json"], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert list(root.iterdir()) == []
    found: Report = json.loads(done.stdout)
    return found


def test_overhead(tmp_path: Path) -> None:
    small = ("--model", "tiny", "--rounds", "2", "--prompts", "2")
    report = run(tmp_path, "overhead", *small, "--control")
    losses = {loss["connector"]: loss for loss in report["Loss"]}
    assert set(losses) == {"kvtier cpu", "kvtier cpu+fs", "none again"}
    for loss in losses.values():
        assert loss["rounds"] == 2
        assert loss["tokens_s"] > 0
        assert loss["low"] <= loss["lost_percent"] <= loss["high"] < 100
        assert loss["cpu_low"] <= loss["cpu_percent"] <= loss["cpu_high"]
    parts = {share["part"] for share in report["Share"] if share["connector"] == "kvtier cpu+fs"}
    assert parts >= {"copies", "engine thread", "executor", "tiers' process"}
    assert all(share["percent"] >= 0 for share in report["Share"])
    (machine,) = report["Machine"]
    assert machine["vllm"] != "not installed"


def test_convoy(tmp_path: Path) -> None:
    report = run(tmp_path, "convoy", "--model", "tiny", "--rounds", "1", "--requests", "10")
    convoys = {(row["scenario"], row["connector"]): row for row in report["Convoy"]}
    connectors = ("none", "kvtier cpu", "kvtier cpu+fs", "vllm cpu+fs")
    assert set(convoys) == {(scenario, name) for scenario in ("distinct", "shared") for name in connectors}
    assert {row["wrong"] for row in convoys.values()} == {"0 of 10"}
    assert all(row["seconds"] > 0 and row["requests_s"] > 0 for row in convoys.values())
    traffic = {(row["scenario"], row["connector"]): row for row in report["Traffic"]}
    distinct = traffic["distinct", "kvtier cpu+fs"]
    assert distinct["in_files"] == 160
    assert distinct["loaded_fs"] > 0, "prefixes come from files"
    assert distinct["fetched"] == distinct["loaded_fs"] + distinct["in_vain"]


def test_replay(tmp_path: Path) -> None:
    """On servers of its own, one after the other."""
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


def test_versus_without_lmcache(tmp_path: Path) -> None:
    """A system that cannot be run is named, and the others are measured."""
    report = run(tmp_path, "versus", "--model", "tiny", "--rounds", "1", "--only", "speed")
    (missing,) = report["NotRun"]
    assert missing["system"] == "LMCache"
    assert "lmcache is not installed" in missing["reason"]
    found = {(row["measure"], row["system"]): row for row in report["Speed"]}
    assert {system for _, system in found} == {"kvtier", "vLLM native", "none"}
    for system in ("kvtier", "vLLM native"):
        for measure in ("TTFT host hit, ms", "TTFT storage hit, ms"):
            row = found[measure, system]
            assert (row["n"], row["from_cache"]) == (1, "3840 of 3840")  # of the round that counts
            assert row["value"] > 0
        assert found["until ready, s", system]["n"] == 2
