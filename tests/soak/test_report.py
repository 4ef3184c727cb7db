"""The soak's exit status: what leaks, what ended early and what was not looked at are failures."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.soak.__main__ import Report
from tests.soak.flatness import Bound, Look

BOUNDS = {"threads": Bound(2, "kills", 0.25), "of another process": Bound(0, "kills")}


def looks(leaked: int, count: int = 30) -> list[Look]:
    return [
        Look(3.0 * index, {"kills": index}, {"threads": 90.0 + leaked * index, "not judged": 5.0 * index})
        for index in range(count)
    ]


def test_what_is_flat_ends_well(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = Report(4711, tmp_path / "looks.json")
    report.show("engine", looks(0), Counter(requests=12_000), BOUNDS)
    assert report.end() == 0
    said = capsys.readouterr().out
    assert "12,000 requests" in said
    assert "30 looks in 1.4 minutes" in said
    assert "all is flat (seed 4711)" in said
    kept = json.loads((tmp_path / "looks.json").read_text())
    assert kept["engine"][7]["figures"]["not judged"] == 35


def test_what_grows_is_named_and_the_seed_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(4711, None)
    report.show("engine", looks(1), Counter(), BOUNDS)
    assert report.end() == 1
    said = capsys.readouterr().out
    assert "FAILED: engine: threads has grown by 10" in said
    assert "--seed 4711" in said


def test_too_few_looks_and_an_early_end_are_failures(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(4711, None)
    report.show("engine", looks(0, 3), Counter(), BOUNDS)
    report.show("manager", [], Counter(), BOUNDS)
    report.fail("early", "wrong tokens\n(EngineCore pid=1) INFO what vLLM says of itself\nwhat kvtier says")
    assert report.end() == 1
    said = capsys.readouterr().out
    assert "3 looks are too few" in said
    assert said.count("FAILED") == 3
    assert "what kvtier says" in said
    assert "vLLM says" not in said
