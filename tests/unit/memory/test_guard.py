"""No file of a region outlives its engine, however the engine ends and whatever else is killed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier._memory import guard
from kvtier._memory.region import Region
from tests.common import children, wait_until
from tests.unit.memory.conftest import PAGE, Holder, Holding


def guards(folder: Path) -> list[int]:
    """The processes that guard the files of a folder."""
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
    """Return the descendants of a process, as tools that kill process trees do."""
    return [one for child in children(pid) for one in (child, *descendants(child))]


@pytest.fixture
def engine(holding: Holding) -> Iterator[Holder]:
    """A process with a guarded region."""
    with holding("engine") as holder:
        assert (holder.answer(), holder.tell("guard")) == ("open", "guarded")
        yield holder


def test_killed_tree_leaves_no_file(shm: Path, engine: Holder) -> None:
    assert os.listdir(shm) == ["kvtier_engine"]
    for pid in [*descendants(engine.process.pid), engine.process.pid]:
        os.kill(pid, signal.SIGKILL)
    engine.process.wait()
    wait_until(lambda: os.listdir(shm) == [])
    wait_until(lambda: guards(shm) == [])


def test_stuck_worker_loses_file(shm: Path, engine: Holder) -> None:
    """It may hang in the kernel for as long as a disk does."""
    with Region.open("engine", 4, PAGE, shm) as worker:
        engine.kill()
        worker.view(1)[:2] = b"ok"
        wait_until(lambda: os.listdir(shm) == [])
        assert bytes(worker.view(1)[:2]) == b"ok"
    wait_until(lambda: guards(shm) == [])


def test_orderly_close_ends_guard(shm: Path, engine: Holder) -> None:
    assert len(guards(shm)) == 1
    assert engine.tell("close") == "closed"
    assert os.listdir(shm) == []
    wait_until(lambda: guards(shm) == [])


def test_unclaimed_region_leaves_no_file(shm: Path, holding: Holding) -> None:
    """The engine is killed before it has a scheduler, while a worker pins the memory."""
    with holding("engine") as worker:
        assert (worker.answer(), worker.tell("guard first")) == ("open", "guarded")
        worker.kill()
        wait_until(lambda: os.listdir(shm) == [])
        wait_until(lambda: guards(shm) == [])


def test_claim_ends_first_guard(shm: Path, holding: Holding) -> None:
    with holding("engine") as worker, holding("engine") as scheduler:
        assert (worker.answer(), worker.tell("guard first"), scheduler.answer()) == (
            "open",
            "guarded",
            "open",
        )
        assert scheduler.tell("claim") == "claimed"
        wait_until(lambda: guards(shm) == [])
        assert os.listdir(shm) == ["kvtier_engine"]


def test_works_without_guard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with Region.open("engine", 2, 4096, tmp_path) as region:
        region.start_guard()
        region.view(0)[:2] = b"ok"
    assert "cannot start the guard process of" in caplog.text
