"""Several processes: live ones keep their regions, dead ones leave none."""

from __future__ import annotations

import logging
import mmap
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvtier._memory._locked_file import remove_stale_files
from kvtier._memory.region import Region

if TYPE_CHECKING:
    from tests.unit.memory.conftest import Holding

PAGE = mmap.PAGESIZE


@pytest.mark.parametrize("slots", [4, 9])
@pytest.mark.parametrize("name", ["e", "f"])
def test_restart_leaves_one_region(holding: Holding, shm: Path, name: str, slots: int) -> None:
    with holding("e") as one, holding("e") as other:
        assert (one.answer(), other.answer()) == ("open", "open")
        one.tell("write 0 old!")
        one.kill()
        other.kill()
        assert os.listdir(shm) == ["kvtier_e"]
        with holding(name, slots) as fresh:
            assert fresh.answer() == "open"
            assert os.listdir(shm) == [f"kvtier_{name}"]
            assert (shm / f"kvtier_{name}").stat().st_size == slots * PAGE
            assert fresh.tell("read 0") == "\0\0\0\0"


def test_survivor_keeps_region(holding: Holding, shm: Path) -> None:
    with holding("e") as one, holding("e") as other:
        assert (one.answer(), other.answer()) == ("open", "open")
        one.tell("write 1 kept")
        one.kill()
        with Region.open("e", 4, PAGE, shm) as joined, Region.open("f", 1, PAGE, shm):
            assert bytes(joined.view(1)[:4]) == b"kept"
            assert other.tell("read 1") == "kept"


def test_only_ghosts_are_swept(holding: Holding, shm: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvtier.memory")
    (shm / "other_program").write_bytes(b"not ours")
    (shm / "kvtier_directory").mkdir()
    (shm / "kvtier_link").symlink_to(shm / "other_program")
    os.mkfifo(shm / "kvtier_pipe")
    before = set(os.listdir(shm))
    with holding("dead") as dead, holding("alive") as alive, Region.open("here", 1, PAGE, shm):
        assert (dead.answer(), alive.answer()) == ("open", "open")
        assert remove_stale_files(shm) == []
        dead.kill()
        assert remove_stale_files(shm) == [shm / "kvtier_dead"]
        assert set(os.listdir(shm)) == before | {"kvtier_alive", "kvtier_here"}
        assert alive.tell("read 0") == "\0\0\0\0"
    assert "kvtier_dead" in caplog.text
    assert "alive" not in caplog.text


def test_exit_leaves_no_file(holding: Holding, shm: Path) -> None:
    with holding("e") as holder:
        assert holder.answer() == "open"
        assert holder.exit() == 0
        assert os.listdir(shm) == []


def test_one_process_claims(holding: Holding, shm: Path) -> None:
    with holding("e") as one, holding("e") as other:
        assert (one.answer(), other.answer()) == ("open", "open")
        assert one.tell("claim") == "claimed"
        assert "another running engine" in other.tell("claim")
        one.kill()
        assert other.tell("claim") == "claimed"


def test_forked_child_changes_nothing(shm: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from kvtier._memory._locked_file import remove_stale_files
from kvtier._memory.region import Region
shm = Path(sys.argv[1])
region = Region.open("e", 1, 4096, shm)
region.claim()
if os.fork() == 0:
    region.close()
    os._exit(0)
os.wait()
print(remove_stale_files(shm), os.listdir(shm))
"""
    found = subprocess.run(
        [sys.executable, "-c", script, str(shm)], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[] ['kvtier_e']"


def test_concurrent_starts_share_one(holding: Holding, shm: Path) -> None:
    ghost = shm / "kvtier_e"
    ghost.write_bytes(bytes(PAGE))  # of another size: joining it would fail
    with ExitStack() as stack:
        holders = [stack.enter_context(holding("e", 4)) for _ in range(6)]
        assert [holder.answer() for holder in holders] == ["open"] * 6
        assert os.listdir(shm) == ["kvtier_e"]
        for number, holder in enumerate(holders):
            assert holder.tell(f"write 0 {number:04}") == "written"
            assert holders[number - 1].tell("read 0") == f"{number:04}"


_CHURN = """
import os, signal, sys
from pathlib import Path
from kvtier._memory.region import Region
shm, number = Path(sys.argv[1]), int(sys.argv[2])
for turn in range(150):
    kind = turn % 3
    region = Region.open("shared" if kind else f"own{number}", 2, 4096, shm)
    status = region.path.stat()
    mark = bytes([turn % 251 + 1]) * 4
    region.view(1)[4 * number : 4 * number + 4] = mark
    with region.path.open("rb") as file:
        file.seek(4096 + 4 * number)
        assert file.read(4) == mark, "the name means another file"
    assert os.path.samestat(status, region.path.stat()), "the file was replaced while it was held"
    if turn == 149 and number == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    region.close()
    region.close()
"""


def test_random_exits_keep_held(shm: Path) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", _CHURN, str(shm), str(number)], stderr=subprocess.PIPE)
        for number in range(4)
    ]
    errors = [process.communicate(timeout=200)[1].decode() for process in processes]
    assert [error for error in errors if error] == []
    assert [process.returncode for process in processes] == [-9, 0, 0, 0]
    remove_stale_files(shm)
    assert os.listdir(shm) == []
