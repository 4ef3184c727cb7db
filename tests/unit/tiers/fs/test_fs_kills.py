"""Writers killed at random points: no wrong byte, no leftovers, the bound always kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from kvtier.tiers import Status
from kvtier.tiers.fs._files.chunk_files import tree_bytes
from kvtier.tiers.fs._files.native_call import StopFlag
from kvtier_tools.root.contents import read_ledger
from kvtier_tools.root.verify import verify
from tests.effort import effort

pytestmark = pytest.mark.timeout(400)  # a busy machine needs seconds for each kill
KILLS = effort(25, 110)
AT_ONCE = 5
CHUNK_BYTES = 16_384
NUMBERS = 400
MAX_BYTES = 3_000_000  # less than half of the writers' chunks, so that they also evict

# One process without threads forks writers and kills them: no writer imports anything again.
DRIVER = """
import asyncio, os, random, signal, sys, time, traceback
from pathlib import Path
from kvtier.tiers._base import Status
from kvtier.tiers.fs._files.native_call import StopFlag
from kvtier.tiers.fs._files.chunk_files import tree_bytes
from tests.unit.tiers.fs.conftest import World

root, reports = sys.argv[1:3]
kills, at_once, chunk_bytes, numbers, max_bytes = map(int, sys.argv[3:])
root, reports = Path(root), Path(reports)

async def write(told):
    choose, world = random.Random(), World(root)
    world.chunk_bytes = chunk_bytes
    settings = dict(n_threads=2, max_bytes=max_bytes, recount_s=0.05, until_counted=False)
    settings["direct_io"] = choose.choice(["auto", "never"])  # a kill tears what goes through the page cache
    tier = await world.open(**settings)
    while True:
        chosen = choose.sample(range(numbers), 8)
        what = choose.random()
        if what < 0.6:
            await world.put(tier, chosen)
            os.write(told, b"x")
        elif what < 0.95:
            outcome = await world.get(tier, chosen)  # which looks at the bytes
            assert set(outcome.statuses) <= {Status.OK, Status.ABSENT}, outcome
        else:
            await tier.discard(world.keys(chosen[:2]))

def start():
    ready, told = os.pipe()
    child = os.fork()
    if child:
        os.close(told)
        return child, ready
    try:
        asyncio.run(write(told))
    except BaseException:
        (reports / str(os.getpid())).write_text(traceback.format_exc())
    os._exit(1)

def bytes_below_root():
    fd = os.open(root, os.O_RDONLY)
    try:
        return tree_bytes(fd, ".", StopFlag())
    finally:
        os.close(fd)

def look(writers):
    # Only without writers: a chunk may otherwise be counted at its old and its new place.
    for writer, _ in writers:
        os.kill(writer, signal.SIGSTOP)
        os.waitid(os.P_PID, writer, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    found = bytes_below_root()
    for writer, _ in writers:
        os.kill(writer, signal.SIGCONT)
    return found

def end(victim, ready):
    os.kill(victim, signal.SIGKILL)
    os.waitpid(victim, 0)
    os.close(ready)

root.mkdir()
living, most = [start() for _ in range(at_once)], 0
try:
    for _ in range(kills):
        victim, ready = living.pop(0)
        if random.random() < 0.7:
            os.read(ready, 1)  # else on a busy machine all would be killed before they have put anything
        time.sleep(random.expovariate(1 / 0.04))
        end(victim, ready)
        living.append(start())
        most = max(most, look(living))
finally:
    for victim, ready in living:
        end(victim, ready)
print(most)
"""


def check_well(root):
    """Check that ``kvtier verify`` finds every chunk sound."""
    (found,) = verify(root, repair=False, threads=2).namespaces
    assert found.is_healthy, found
    assert found.sound == found.chunks - found.gone > 50, found


async def test_killed_writers_leave_soundness(world, tmp_path):
    reports = tmp_path / "reports"
    reports.mkdir()
    given = (world.root, reports, KILLS, AT_ONCE, CHUNK_BYTES, NUMBERS, MAX_BYTES)
    done = await anyio.to_thread.run_sync(
        lambda: subprocess.run(
            [sys.executable, "-c", DRIVER, *map(str, given)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])},
        )
    )
    assert done.returncode == 0, done.stderr
    assert [path.read_text() for path in reports.iterdir()] == []
    assert MAX_BYTES / 2 < int(done.stdout) <= MAX_BYTES

    await anyio.to_thread.run_sync(check_well, world.root)
    world.chunk_bytes = CHUNK_BYTES
    tier = await world.open(max_bytes=MAX_BYTES, recount_s=0.05, eviction="none")
    await world.eventually(
        lambda: len(world.writers()) == 2 and len(list((world.root / ".kvtier").glob("*-*.lock"))) == 1
    )
    outcome = await world.get(tier, range(NUMBERS))
    assert set(outcome.statuses) <= {Status.OK, Status.ABSENT}
    there = [number for number in range(NUMBERS) if outcome.statuses[number] == Status.OK]
    assert len(there) > 50
    assert world.quarantined() == []
    assert sorted(world.root.rglob("*.bin")) == sorted(map(world.file, there))
    await anyio.to_thread.run_sync(check_well, world.root)

    root_fd = os.open(world.root, os.O_RDONLY)

    def is_right():
        accounts, used = read_ledger(root_fd), tree_bytes(root_fd, ".", StopFlag())
        return accounts is not None and accounts.used == used == tier.statistics().used_bytes

    try:
        with anyio.fail_after(30):
            while not await anyio.to_thread.run_sync(is_right):  # noqa: ASYNC110 - until it was counted again
                await anyio.sleep(0.02)
    finally:
        os.close(root_fd)
