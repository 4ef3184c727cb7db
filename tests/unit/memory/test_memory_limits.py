"""Memory limits are read as containers set them, and slots get no more memory than they allow."""

from __future__ import annotations

import queue
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvtier._memory import memory_limits as limits
from kvtier._memory.memory_limits import MemoryLimit
from kvtier._memory.region import Region

MIB = 2**20
MEMINFO = "MemTotal: 8192 kB\nMemAvailable: 2048 kB\nHugePages_Total: 0\n"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A ``/proc`` of a machine with 8 MiB, 6 MiB of them in use."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(MEMINFO)
    return tmp_path / "proc"


def group(folder: Path, limits: dict[str, str], used: int, stat: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    usage = "memory.usage_in_bytes" if "memory.limit_in_bytes" in limits else "memory.current"
    for name, text in {**limits, usage: f"{used}", "memory.stat": stat}.items():
        (folder / name).write_text(text.rstrip() + "\n")


def found(proc: Path) -> list[tuple[str, int, int]]:
    """The limits of control groups, by their paths in the mount."""
    machine, *groups = limits.memory_limits(proc)
    assert machine == MemoryLimit(8 * MIB, proc / "meminfo", 6 * MIB)
    home = proc.parent / "cgroup"
    return [(str(one.path.relative_to(home)), one.limit_bytes, one.used_bytes) for one in groups]


def test_limits_exclude_page_cache(proc: Path) -> None:
    home = proc.parent / "cgroup"
    group(
        home / "pod",
        {"memory.max": "max", "memory.high": "900"},
        700,
        "anon 1\nactive_file 50\ninactive_file 0\n",
    )
    stat = "inactive_file 100\nactive_file 20\nshmem 80\n"
    group(home / "pod" / "box", {"memory.max": "500", "memory.high": "max"}, 400, stat)
    group(home / "pod" / "other", {"memory.max": "1", "memory.high": "1"}, 1, stat)
    (proc / "self" / "cgroup").write_text("0::/pod/box\n")
    mounts = f"24 1 0:1 / / rw - ext4 /dev/a rw\n30 24 0:26 / {home} rw shared:4 - cgroup2 cgroup2 rw\n"
    (proc / "self" / "mountinfo").write_text(mounts)
    assert found(proc) == [("pod/memory.high", 900, 650), ("pod/box/memory.max", 500, 280)]


@pytest.mark.parametrize("root", ["/docker/box", "/"])
def test_version_1_is_read(proc: Path, root: str) -> None:
    home = proc.parent / "cgroup"
    stat = "inactive_file 1\ntotal_inactive_file 100\ntotal_active_file 20\n"
    own = home if root == "/docker/box" else home / "docker" / "box"
    group(own, {"memory.limit_in_bytes": "500"}, 400, stat)
    (proc / "self" / "cgroup").write_text("3:cpu:/x\n4:memory:/docker/box\n0::/\n")
    mounts = [
        f"31 30 0:{n} {root} {home} rw - cgroup cgroup rw,{name}" for n, name in enumerate(["cpu", "memory"])
    ]
    (proc / "self" / "mountinfo").write_text("\n".join(mounts))
    assert found(proc) == [(str((own / "memory.limit_in_bytes").relative_to(home)), 500, 280)]


@pytest.mark.parametrize("members", [None, "", "0::/gone\n", "0::/../above\n", "junk", "4:memory:/x\n"])
def test_unreadable_is_no_limit(proc: Path, members: str | None) -> None:
    (proc / "self" / "mountinfo").write_text(f"30 1 0:26 / {proc} rw - cgroup2 cgroup2 rw\n\njunk\n")
    if members is not None:
        (proc / "self" / "cgroup").write_text(members)
    assert found(proc) == []
    (proc / "meminfo").write_text("junk\n")
    assert list(limits.memory_limits(proc)) == []


@pytest.fixture
def container() -> Iterator[Path]:
    """A real control group on this machine with a limit of 160 MiB."""
    for folder in ("/sys/fs/cgroup/memory", "/sys/fs/cgroup"):
        made = Path(folder) / "kvtier-test-limits"
        with suppress(OSError):
            made.mkdir()
            try:
                name = "memory.limit_in_bytes" if folder.endswith("memory") else "memory.max"
                (made / name).write_text(f"{160 * MIB}")
                yield made
            finally:
                made.rmdir()
            return
    pytest.skip("no control group can be made here")


_ENGINE = """
import queue, sys
from pathlib import Path
from kvtier._memory.region import Region

Path(sys.argv[1], "cgroup.procs").write_text("0")
pieces = queue.Queue()
with Region.open("limits", 256, 2**20, Path(sys.argv[2])) as region:
    region.populate(pieces.put, threads=1)
    ready = 0
    while piece := pieces.get():
        ready += len(piece)
        region.view(piece[-1])[:] = b"x" * 2**20
    try:
        region.back(range(ready, region.slots))
    except OSError as error:
        print(error)
    print(ready)
"""


def test_small_container_survives(container: Path, shm: Path) -> None:
    command = [sys.executable, "-c", _ENGINE, str(container), str(shm)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    error, ready = ended.stdout.splitlines()
    assert f"{container}/memory." in error
    assert 64 <= int(ready) < 160


def test_population_stops_at_limit(
    shm: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left = [MemoryLimit(128 * MIB, Path("/pod/memory.max"), used) for used in (0, 64 * MIB)]
    monkeypatch.setattr(limits, "memory_limits", lambda: [left.pop(0)])
    pieces: queue.Queue[range] = queue.Queue()
    with Region.open("a", 4, 32 * MIB, shm) as region:
        region.populate(pieces.put, threads=1)
        assert [pieces.get(timeout=30) for _ in range(2)] == [range(2), range(0)]
    (record,) = caplog.records
    assert f"/pod/memory.max: {64 * MIB} of {128 * MIB} bytes are in use" in record.getMessage()
