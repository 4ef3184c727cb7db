"""A forked child keeps none of its parent's locks, leases, shared memory or sockets alive."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from kvtier._memory._locked_file import remove_stale_files
from tests.common import wait_until

PARENT = """
import asyncio, os, signal, sys, time
from pathlib import Path

from kvtier._execution.executor import NamedTier
from kvtier._identity import Identity
from kvtier._isolation.process import ExecutorProcess
from kvtier._memory.region import Region
from kvtier.tiers._base import Batch, Status, TierContext
from kvtier_testing.dummy import DummyConfig, DummyTier
from kvtier.tiers.fs import FsConfig, FsTier

root, shm = map(Path, sys.argv[1:])
identity = Identity.make("model", {})


async def main():
    before = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists()]
    region = Region.open("engine", 4, 4096, directory=shm)
    region.claim()
    region.view(1)[:] = b"x" * 4096
    tier = FsTier(FsConfig(root_dir=root, max_bytes=2**30, min_free_bytes=0))
    await tier.open(TierContext("fs", identity, 4096))
    batch = Batch([b"k" * 32 + bytes(4)], [1], region)
    batch.trailers[0] = b"t" * len(batch.trailers[0])
    assert (await tier.put(batch)).statuses[0] == Status.OK
    process = ExecutorProcess([NamedTier("dummy", lambda: DummyTier(DummyConfig()))], identity, region)
    process.start()
    child = os.fork()
    if child == 0:
        for fd in (0, 1, 2):
            os.close(fd)
        time.sleep(1000)
    print(child, *(name for name in before if "socket:" in name), flush=True)
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[tuple[int, list[str]]]:
    """A process forked from one with open tiers and a region, which it has outlived.

    Yields its id and the sockets that its parent had before it opened them.
    """
    (tmp_path / "root").mkdir()
    (tmp_path / "shm").mkdir()
    command = [sys.executable, "-c", PARENT, str(tmp_path / "root"), str(tmp_path / "shm")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        number, *sockets = parent.stdout.readline().split()
        pid = int(number)
        try:
            parent.stdin.close()
            assert parent.wait() == -signal.SIGKILL
            yield pid, sockets
            os.kill(pid, 0)  # it was alive all the time
        finally:
            os.kill(pid, signal.SIGKILL)


def is_free(lock: Path) -> bool:
    with lock.open() as file, suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def test_child_keeps_no_resources(child: tuple[int, list[str]], tmp_path: Path) -> None:
    pid, sockets = child
    locks = [path for path in (tmp_path / "root").rglob("*.lock*") if path.is_file()]
    assert any(path.parent.name == ".kvtier" for path in locks)
    wait_until(lambda: remove_stale_files(tmp_path / "shm"))  # the tier process ends a moment later
    for path in locks:
        wait_until(partial(is_free, path))
    assert str(tmp_path / "shm") not in Path(f"/proc/{pid}/maps").read_text()
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    assert {link for link in links if "socket:" in link} <= set(sockets)
    assert [link for link in links if str(tmp_path / "shm") in link or ".lock" in link] == []
