"""No file of a region outlives its engine, however that ends and whoever is killed with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier._memory import guard
from kvtier._memory.region import Region
from tests.common import wait_until

ENGINE = """
import sys, time
from pathlib import Path
from kvtier._memory.region import Region

region = Region.open("engine", 2, 4096, Path(sys.argv[1]))
region.start_guard()
print("open", flush=True)
if sys.stdin.read() == "close":
    region.close()
    print("closed", flush=True)
    time.sleep(1000)
"""


def guards(folder: Path) -> list[int]:
    """The processes that guard files of a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if words[3:5] == [guard.__file__.encode(), str(folder / "kvtier_engine").encode()]:
            found.append(int(path.parent.name))
    return found


def descendants(pid: int) -> list[int]:
    """What whoever kills a tree of processes finds below one of them."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            found += [child, *descendants(child)]
    return found


def start(folder: Path) -> subprocess.Popen[str]:
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert engine.stdout is not None
    assert engine.stdout.readline() == "open\n"
    return engine


def test_an_engine_that_is_killed_with_all_its_descendants_leaves_no_file(tmp_path: Path) -> None:
    with start(tmp_path) as engine:
        assert os.listdir(tmp_path) == ["kvtier_engine"]
        for pid in [*descendants(engine.pid), engine.pid]:
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: os.listdir(tmp_path) == [])
    wait_until(lambda: guards(tmp_path) == [])


def test_a_worker_that_does_not_end_keeps_its_memory_but_not_the_file(tmp_path: Path) -> None:
    """It may hang in the kernel for as long as a disk does."""
    with start(tmp_path) as engine, Region.open("engine", 2, 4096, tmp_path) as worker:
        engine.kill()
        engine.wait()
        worker.view(1)[:2] = b"ok"
        wait_until(lambda: os.listdir(tmp_path) == [])
        assert bytes(worker.view(1)[:2]) == b"ok"
    wait_until(lambda: guards(tmp_path) == [])


def test_a_guard_ends_when_the_region_is_closed_in_order(tmp_path: Path) -> None:
    with start(tmp_path) as engine:
        assert engine.stdin is not None
        assert engine.stdout is not None
        assert len(guards(tmp_path)) == 1
        engine.stdin.write("close")
        engine.stdin.close()
        assert engine.stdout.readline() == "closed\n"
        assert os.listdir(tmp_path) == []
        wait_until(lambda: guards(tmp_path) == [])
        engine.kill()


def test_where_no_guard_can_be_started_the_region_is_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with Region.open("engine", 2, 4096, tmp_path) as region:
        region.start_guard()
        region.view(0)[:2] = b"ok"
    assert "cannot start the guard process of" in caplog.text
