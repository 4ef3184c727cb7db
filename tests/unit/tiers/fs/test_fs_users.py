"""Roots that several users share, as pods with arbitrary user ids do: the root's own mode decides."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from kvtier.errors import TierError
from kvtier.tiers import Status

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users"),
]
GROUP = 23_456
PROGRAM = r"""
import asyncio, encodings.ascii, encodings.idna, os, sys, tempfile
from pathlib import Path
from kvtier.tiers._base import Status
from tests.unit.tiers.fs.conftest import World

async def main(root, user, numbers, there):
    os.umask(0o022)
    os.setgroups([int(sys.argv[5])])
    os.setgid(user)
    os.setuid(user)
    world = World(root)
    tier = await world.open(max_bytes=48 * 20_480)
    assert tier.statistics().read_only is None, tier.statistics()
    assert (await world.put(tier, numbers)).statuses == (Status.OK,) * len(numbers)
    got = set((await world.get(tier, there)).statuses)
    assert Status.OK in got and got <= {Status.OK, Status.ABSENT}, got  # some may be evicted
    await tier.touch(world.keys(there))
    await tier.reset() if user == 12_002 else None
    await world.close_all()

first, last = int(sys.argv[3]), int(sys.argv[4])
there = range(first, last) if first == 0 else range(4)
asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), range(first, last), there))
"""


def run_as(user: int, root: Path, first: int, last: int) -> None:
    """Open a tier as a user of the group, put chunks, and get some existing ones."""
    arguments = [str(root), str(user), str(first), str(last), str(GROUP)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr


@pytest.fixture
def root(place: Path) -> Path:
    """A root as in a volume with an ``fsGroup``."""
    place.chmod(0o755)
    made = place / "root"
    made.mkdir()
    os.chown(made, 0, GROUP)
    made.chmod(0o2770)
    return made


def test_group_shares_root(root):
    run_as(12_001, root, 0, 8)
    run_as(12_002, root, 8, 40)  # the same epoch, and then a reset
    run_as(12_003, root, 0, 40)  # the other users' chunks are evicted
    wrong = [
        (path, oct(mode))
        for path in root.rglob("*")
        if ((mode := path.stat().st_mode) and not mode & stat.S_IWGRP) or mode & 0o007
    ]
    assert wrong == []


async def test_user_root_stays_private(world):
    tier = await world.open()
    await world.put(tier, range(4))
    assert [path for path in world.root.rglob("*") if path.stat().st_mode & 0o077] == []


async def test_foreign_owner_is_named(world):
    tier = await world.open()
    assert (await world.put(tier, [1])).statuses == (Status.OK,)
    await tier.aclose()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    world.root.chmod(0o755)
    world.root.parent.chmod(0o755)
    command = [sys.executable, "-c", PROGRAM, str(world.root), "12001", "0", "1", str(GROUP)]
    done = await anyio.run_process(command, env=environment, check=False)
    last = done.stderr.decode().strip().splitlines()[-1]
    assert TierError.__name__ in last
    assert f"{world.identity.namespace} belongs to root (uid 0)" in last
    assert "uid 12001" in last
