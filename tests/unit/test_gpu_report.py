"""The report of a run on a GPU keeps partial output, and makes tables of the steps that ran."""

from __future__ import annotations

from math import inf

import pytest

from tests.gpu import report as gpu
from tests.gpu.first_token import Asked, rows
from tests.gpu.stress import gap_at_difference

MACHINE = {"device": "GPU", "cores": 16}
PHASE = {
    "phase": "cpu_hit",
    "ttft_ms": 41.2,
    "computed": 72,
    "from_cpu": 8928,
    "from_adopted": 0,
    "from_fs": 0,
    "speed_up": 39.0,
}


def step(script: str, limit_s: float) -> gpu.Step:
    return gpu.Step("step", ("sh", "-c", script), ("sh",), limit_s, gpu.counts)


def test_failed_steps_keep_output() -> None:
    found = gpu.run(step("echo half; echo why >&2; exit 3", 60))
    assert (found["failed"], found["output"]) == ("status 3", "half\nwhy\n")


def test_hung_steps_end_whole() -> None:
    found = gpu.run(step("sleep 600 & sleep 600", 0.0))
    assert found["failed"] == "hung: not over after 0 s"
    assert "output" in found


def test_only_run_steps_change_page() -> None:
    found = {
        "machine": MACHINE,
        "conformance": {"seconds": 9.0, "result": {"passed": 298, "skipped": 39}},
        "copies": {"skipped": "kvtier_bench not found"},
        "engine": {"seconds": 80.0, "result": {"Phase": [{**PHASE, "identical": False}]}},
        "versus": {"failed": "hung: not over after 600 s"},
    }
    names = ("machine", "suites", "copies", "engine", "versus")
    page = "".join(f"<!-- gpu: {name} -->\nold {name}\n<!-- end -->\n" for name in names)
    lines = gpu.with_figures(page, found).splitlines()
    assert "GPU; a machine with 16 processor cores." in lines
    assert "| conformance | 298 passed, 39 skipped |" in lines
    assert "| cpu_hit | 41 | 72 | 8,928 | 0 | 39.0 | **no** |" in lines
    assert "failed: hung: not over after 600 s" in lines
    assert [line for line in lines if line.startswith("old")] == ["old copies"]
    assert lines.count("<!-- end -->") == len(names)


def test_first_tokens_are_compared_with_computing() -> None:
    computed, loaded = (
        [Asked(0.2, 0, (7, 8)), Asked(0.4, 0, (9, 9))],
        [Asked(0.1, 500, (7, 8)), Asked(0.05, 500, (9, 1))],
    )
    asked = {(512, "computed"): computed, (512, "host memory"): loaded}
    first, second = rows("kvtier", asked)
    assert (first.speed_up, first.identical) == (1.0, True)
    assert second.ttft_ms == pytest.approx(75)
    assert second.speed_up == pytest.approx(4)
    assert (second.cached, second.identical) == (500, False)
    table = gpu._first_token({"FirstToken": [vars(first), vars(second)]})
    assert table[-1] == "| 512 | kvtier | 300.0 |  | 75.0 (4.0x), **other tokens** |  |"


def test_conversations_compare_with_engine_without_cache() -> None:
    of_one = {"first_s": 9.0, "cached": "1 of 2", "ready_s": 20.0, "pinned_s": 7.0, "stop_s": 3.0}
    found = [{"system": "none", "turn_s": 8.0, **of_one}, {"system": "kvtier", "turn_s": 2.0, **of_one}]
    table = gpu._conversations({"Conversations": found})
    assert table[-1] == "| kvtier | 9.0 | 2.0 (4.0x) | 1 of 2 | 20.0 | 7.0 | 3.0 |"


def test_answers_may_differ_at_near_ties() -> None:
    control = [{"5": -1.0, "6": -1.01}, {"7": -0.5, "8": -3.0}]
    assert gap_at_difference(control, (5, 7)) is None
    assert gap_at_difference(control, (6, 1)) == pytest.approx(0.01)
    assert gap_at_difference(control, (5, 8)) == pytest.approx(2.5)
    assert gap_at_difference(control, (5, 9)) == inf
