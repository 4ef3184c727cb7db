"""System calls that fail under a tier, in C and in Python: a counted reason, and never a wrong byte.

A small library in front of the C library makes calls fail: each call that the tier makes with each error
that a disk or a network file system has (ESTALE: the server has forgotten a file), and then any of them
at random while chunks are put, got and discarded.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from kvtier._native import build

pytestmark = pytest.mark.timeout(200)

SHIM = Path(__file__).with_name("failing_calls.c")

DRIVER = r"""
import asyncio, ctypes, errno, logging, random, sys
from contextlib import suppress
from pathlib import Path
from kvtier.errors import TierError
from kvtier.tiers._base import Status, TierContext
from kvtier.tiers.fs import FsConfig, FsTier
from tests.unit.tiers.fs.conftest import World

logging.disable()
OK, ABSENT, REFUSED, FAILED, CORRUPT = Status.OK, Status.ABSENT, Status.REFUSED, Status.FAILED, Status.CORRUPT
class Fault(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in ("calls", "error", "every", "failed", "flips", "lags")]
fault = Fault.in_dll(ctypes.CDLL(None), "fault")
CALLS = (
    "openat preadv pwritev pread pwrite renameat fdatasync fsync mkdirat unlinkat fstatat utimensat readdir"
    .split()
)
root = Path(sys.argv[1])
world = World(root)

async def get(tier, numbers):
    outcome = await world.get(tier, numbers)
    assert CORRUPT not in outcome.statuses, outcome.reasons
    assert set(outcome.reasons) <= set(tier.reasons), outcome.reasons
    return outcome.statuses

async def put(tier, numbers):
    outcome = await world.put(tier, numbers)
    assert set(outcome.statuses) <= {OK, FAILED, REFUSED}, outcome.statuses
    assert set(outcome.reasons) <= set(tier.reasons), outcome.reasons
    return outcome

async def open_tier(folder):
    settings = dict(root_dir=root / folder, n_threads=2, min_free_bytes=0, max_bytes=10**9)
    tier = FsTier(FsConfig(**settings, durability="full"))
    await tier.open(TierContext("files", world.identity, world.chunk_bytes))
    return tier

def is_tidy(folder):
    base = root / folder
    left = [p for p in base.glob("*/.tmp/*/*")]
    return not left and not list(base.glob("*/quarantine/*"))

async def one_by_one():
    tier, number = await open_tier("one"), 0
    await put(tier, range(4))
    for name in ("EIO", "ESTALE", "EACCES", "ENOSPC"):
        for call in range(len(CALLS)):
            mine, number = range(number + 10, number + 14), number + 10
            fault.error, fault.every, fault.failed, fault.calls = getattr(errno, name), 1, 0, 1 << call
            outcome = await put(tier, mine)
            failed = 4 - outcome.statuses.count(OK)
            assert sum(outcome.reasons.values()) == failed, (name, CALLS[call], outcome)
            assert failed == 4 or "sync" not in CALLS[call], (name, CALLS[call], outcome)
            full = {"min_free", "max_bytes"}
            assert set(outcome.reasons) <= {name.lower(), *full}, (name, CALLS[call], outcome)
            there = await get(tier, range(4))
            assert set(there) <= {OK, FAILED, ABSENT, REFUSED}, there
            assert fault.failed or set(there) == {OK} or name == "ENOSPC", (name, CALLS[call])
            with suppress(TierError):  # named in the log, counted by kvtier
                await tier.contains(world.keys([1]))
            await tier.touch(world.keys([1]))
            await tier.discard(world.keys([10**6]))
            fault.calls = 0
            if name == "ENOSPC":  # and chunks are evicted for it
                assert CORRUPT not in await get(tier, [*range(4), *mine])
                continue
            assert set(await get(tier, range(4))) == {OK}, (name, CALLS[call])
            assert set((await put(tier, mine)).statuses) == {OK}, (name, CALLS[call])
            assert set(await get(tier, mine)) == {OK}, (name, CALLS[call])
    await tier.aclose()
    assert is_tidy("one")

async def at_random():
    tier, choose = await open_tier("two"), random.Random()
    for round_ in range(150):
        fault.error = choose.choice([errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENOMEM])
        fault.every, fault.calls = 6, (1 << len(CALLS)) - 1
        some = choose.sample(range(60), 6)
        what = choose.random()
        if what < 0.5:
            await put(tier, some)
        elif what < 0.9:
            await get(tier, some)
        else:
            await tier.discard(world.keys(some[:2]))
        fault.calls = 0
    assert set((await put(tier, range(60))).statuses) == {OK}
    assert set(await get(tier, range(60))) == {OK}
    fault.every, fault.calls = 2, (1 << len(CALLS)) - 1
    await tier.aclose()
    fault.calls = 0
    tier = await open_tier("two")
    assert set(await get(tier, range(60))) <= {OK, ABSENT}
    await tier.aclose()

async def short_counts():
    tier = await open_tier("count")
    await put(tier, range(60))
    add_up = world.session(tier).maintenance._add_up
    before = add_up()
    for name in ("openat", "readdir", "fstatat"):
        for every in (1, 2, 4, 8):
            fault.error, fault.every, fault.failed, fault.calls = errno.EIO, every, 0, 1 << CALLS.index(name)
            with suppress(OSError):
                found = add_up()
                assert not fault.failed, (name, found, before)
            fault.calls = 0
    for name in ("EACCES", "ENOTCONN"):
        fault.error, fault.every, fault.calls = getattr(errno, name), 2, 1 << CALLS.index("fstatat")
        add_up()
        fault.calls = 0
    fault.lags = 1
    assert before - add_up() < 8192, (add_up(), before)  # two small files
    fault.lags = 0
    await tier.aclose()

async def bad_reads():
    tier = await open_tier("bad")
    await put(tier, range(400))
    fault.failed, fault.flips = 0, 8
    for _ in range(4):
        statuses = (await world.get(tier, range(400))).statuses  # which compares the bytes
        assert set(statuses) <= {OK, CORRUPT}
    assert fault.failed > 100
    fault.flips = 0
    assert set(await get(tier, range(400))) == {OK}
    world.root = root / "bad"
    assert world.quarantined() == []
    with world.file(1).open("r+b") as file:
        file.write(bytes(8))
    assert (await world.get(tier, [1])).statuses == (CORRUPT,)
    assert len(world.quarantined()) == 1
    await tier.aclose()

asyncio.run(bad_reads())
asyncio.run(short_counts())
asyncio.run(one_by_one())
asyncio.run(at_random())
print("failed on purpose:", fault.failed)
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that makes calls fail."""
    folder = tmp_path_factory.mktemp("shim")
    command = ["-shared", "-fPIC", "-O1", "-o", str(folder / "shim.so"), str(SHIM), "-ldl"]
    try:
        subprocess.run([*build.compiler(), *command], check=True, capture_output=True, text=True)
    except build.BuildError as error:
        pytest.skip(str(error))
    return folder / "shim.so"


@pytest.mark.skipif(sys.platform != "linux", reason="it stands in front of glibc")
async def test_faults_lose_nothing(shim, place):
    environment = {
        **os.environ,
        "LD_PRELOAD": str(shim),
        "PYTHONPATH": str(Path(__file__).parents[4]),
    }
    command = [sys.executable, "-c", DRIVER, str(place)]
    done = await anyio.run_process(command, env=environment, check=False)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
