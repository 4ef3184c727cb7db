"""The runner of CI's sessions: two at a time, no hang, no silence. The tests use a nox of their own."""

from __future__ import annotations

import fcntl
import os
import subprocess
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from tests.common import load_file

SOURCE = Path(__file__).parents[2] / ".ci/lanes.py"

# A session acts by its name. It makes its environment and reports the sessions that used it before.
NOX = """
import json, os, pathlib, sys, time

name, report = sys.argv[2], sys.argv[4]
what = name.partition("-")[0]
place = pathlib.Path(os.environ["PLACE"]) / ".nox" / name
place.mkdir(parents=True, exist_ok=True)
print(name, "finds", sorted(path.name for path in place.iterdir()))
busy = place / "busy"
busy.mkdir()  # fails where another is at work there
(place / f"was-{name}").touch()
try:
    while what == "hangs":
        time.sleep(1)
    if what == "meets":  # ends only beside another one of its kind
        folder = pathlib.Path(os.environ["PLACE"])
        (folder / name).touch()
        while len(list(folder.glob("meets*"))) < 2:
            time.sleep(0.01)
finally:
    busy.rmdir()
if what == "fails":
    print("E   AssertionError: the cause")
    print("    | ResourceWarning: unclosed file")
    print("    | pytest.PytestWarning: another")
    print("FAILED tests/test_one.py::test_it - AssertionError\\n" * 1000)
print("===== 1 passed, 2 skipped in 3.21s =====")
result = "skipped" if what == "skipped" else "success"
pathlib.Path(report).write_text(json.dumps({"sessions": [{"result": result}]}))
sys.exit(what == "fails")
"""

Run = Callable[..., tuple[list[str], str]]


@pytest.fixture
def lanes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The runner, in a project of its own."""
    module: ModuleType = load_file("lanes", SOURCE)
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/nox.py").write_text(NOX)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    monkeypatch.setenv("PLACE", str(tmp_path))
    monkeypatch.setattr(module, "PROJECT", tmp_path)
    return module


@pytest.fixture
def run(lanes: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run sessions, mapped to the owners of their environments; return results and output."""

    def run(sessions: Mapping[str, str], limit_s: float = 60.0) -> tuple[list[str], str]:
        logs = tmp_path / "logs"
        logs.mkdir()
        jobs = [lanes.Job(name, owner, logs) for name, owner in sessions.items()]
        lanes.run(jobs, limit_s, {})
        lanes.conclude(jobs, 1.0)
        return [job.result for job in jobs], capsys.readouterr().out

    return run


def test_table_puts_failures_last(run: Run) -> None:
    results, said = run({"passes": "passes", "fails": "fails", "skipped": "skipped"})
    assert results == ["passed", "FAILED (1)", "skipped"]
    table = said[said.index("==== sessions ====") :]
    assert [line.split()[0] for line in table.splitlines()[1:4]] == ["passes", "fails", "skipped"]
    assert table.count("1 passed, 2 skipped in 3.21s") == 3
    assert said.splitlines()[-1] == "failed: fails"
    assert "FAILED tests/test_one.py::test_it" in table
    raised = (
        "E   AssertionError: the cause",
        "ResourceWarning: unclosed file",
        "pytest.PytestWarning: another",
    )
    assert all(one in table for one in raised)
    assert len(table.splitlines()) <= 20, "the middle of a long log is not shown"


def test_hung_session_is_named(lanes: ModuleType, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "GRACE_S", 1.0)  # SIGINT may be ignored, as in a shell's background jobs
    results, said = run({"hangs": "hangs"}, limit_s=1.0)
    assert results == ["ENDED after its limit of 1 s"]
    assert said.splitlines()[-1] == "failed: hangs"


def test_run_waits_for_other_run(
    lanes: ModuleType, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed runner leaves its session behind, which holds the lock until it ends."""
    (tmp_path / ".nox").mkdir()
    with (tmp_path / ".nox/lanes.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        left = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[lock.fileno()])
    waits = threading.Event()
    monkeypatch.setattr(lanes, "print", lambda *_, **__: waits.set(), raising=False)
    with ThreadPoolExecutor(1) as pool:
        results = pool.submit(run, {"passes": "passes"})
        assert waits.wait(30)
        assert not results.done()
        left.communicate()
        assert results.result(30)[0] == ["passed"]


def test_uv_gets_pip_settings(lanes: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "file:///one\nfile:///two")
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels")
    for variable in ("UV_INDEX", "UV_INDEX_STRATEGY", *lanes.OF_UV.values()):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("UV_FIND_LINKS", "/mine")
    found = lanes.uv_settings()
    assert found["UV_INDEX"] == "file:///one file:///two"
    assert "UV_FIND_LINKS" not in found, "what is set already stays"
