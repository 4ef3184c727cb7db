"""The report of a run on a GPU: partial output is kept, and tables are made of the steps that there are."""

from __future__ import annotations

from tests import gpu

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


def test_tables_need_run_steps_only() -> None:
    found = {
        "machine": MACHINE,
        "conformance": {"seconds": 9.0, "result": {"passed": 298, "skipped": 39}},
        "copies": {"skipped": "kvtier_bench not found"},
        "engine": {"seconds": 80.0, "result": {"Phase": [{**PHASE, "identical": False}]}},
        "versus": {"failed": "hung: not over after 600 s"},
    }
    lines = gpu.tables(found).splitlines()
    assert lines[0] == "GPU; a machine with 16 processor cores."
    assert "| conformance | 298 passed, 39 skipped |" in lines
    assert "| copies | skipped: kvtier_bench not found |" in lines
    assert "| engine | passed in 80 s |" in lines
    assert "| versus | failed: hung: not over after 600 s |" in lines
    assert lines[-1] == "| cpu_hit | 41 | 72 | 8,928 | 0 | 39.0 | **no** |"
