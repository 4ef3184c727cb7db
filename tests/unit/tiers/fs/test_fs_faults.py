"""File systems that fail in every way: a counted reason, never an exception or a wrong byte."""

from __future__ import annotations

import os
import resource
import shutil

import anyio
import pytest

from kvtier.errors import TierError
from kvtier.tiers import Status
from kvtier.tiers.fs._files.chunk_files import tree_bytes
from kvtier.tiers.fs._files.native_call import StopFlag
from kvtier.tiers.fs._maintenance import maintenance

pytestmark = pytest.mark.timeout(60)
OK, ABSENT, REFUSED, FAILED = Status.OK, Status.ABSENT, Status.REFUSED, Status.FAILED


def unfinished(world):
    return [path for path in (world.namespace / ".tmp").rglob("*") if path.is_file() and not path.suffix]


async def test_full_inode_table_makes_room(world, mounted, monkeypatch):
    monkeypatch.setattr(maintenance, "TICK_S", 0.02)
    world.root = mounted("size=64m,nr_inodes=120") / "root"
    tier = await world.open(max_bytes=10**9)
    outcome = await world.put(tier, range(60))
    assert outcome.statuses.count(OK) > 10
    assert set(outcome.statuses) <= {OK, REFUSED}
    assert set(outcome.reasons) <= {"enospc", "min_free"}
    assert unfinished(world) == []
    for number in range(200, 230):
        with anyio.fail_after(20):
            while (await world.put(tier, [number])).statuses != (OK,):  # noqa: ASYNC110
                await anyio.sleep(0.005)
    assert (await world.get(tier, range(220, 230))).statuses.count(OK) > 0
    assert world.quarantined() == []


async def test_foreign_files_shrink_tier(world, mounted, monkeypatch):
    monkeypatch.setattr(maintenance, "TICK_S", 0.02)
    point = mounted("size=8m")
    world.root = point / "root"
    tier = await world.open(max_bytes=10**9, min_free_bytes=2_000_000)
    assert (await world.put(tier, range(100))).statuses == (OK,) * 100
    held = tier.statistics().used_bytes
    (point / "ballast").write_bytes(bytes(5 * 2**20))

    def has_made_room():
        found = os.statvfs(point)
        return found.f_bavail * found.f_frsize >= 2_000_000

    await world.eventually(has_made_room)
    await world.eventually(lambda: tier.statistics().used_bytes < held)  # counted once it has left
    there = [number for number in range(100) if world.file(number).exists()]
    assert set((await world.get(tier, there)).statuses) <= {OK, ABSENT}


async def test_full_disk_is_read(world, mounted):
    point = mounted("size=1m")
    world.root = point / "root"
    tier = await world.open(max_bytes=10**6)
    await world.put(tier, range(4))
    await tier.aclose()
    with (point / "ballast").open("wb", buffering=0) as ballast:
        os.posix_fallocate(ballast.fileno(), 0, os.statvfs(point).f_bavail * 4096)
    tier = await world.open(max_bytes=10**6, eviction="none")
    assert (await world.get(tier, range(4))).statuses == (OK,) * 4
    outcome = await world.put(tier, [7])
    assert outcome.statuses == (REFUSED,)
    assert set(outcome.reasons) <= {"enospc", "min_free"}


async def test_removed_root_misses(world, monkeypatch):
    monkeypatch.setattr(maintenance, "TICK_S", 1000.0)  # no ledger is written during the removal
    tier = await world.open(max_bytes=10**9)
    await world.put(tier, range(4))
    await world.until_listed(tier)  # the work started by opening is over
    shutil.rmtree(world.root)
    assert (await world.get(tier, range(4))).statuses == (ABSENT,) * 4
    outcome = await world.put(tier, range(4))
    assert (outcome.statuses, dict(outcome.reasons)) == ((FAILED,) * 4, {"enoent": 4})
    await anyio.to_thread.run_sync(world.session(tier).maintenance._do_tick)
    await tier.discard(world.keys(range(4)))
    assert not any(await tier.contains(world.keys(range(4))))


async def test_failed_lookup_is_a_failure(world):
    tier = await world.open()
    data = world.root / world.session(tier).epoch.place.data_dir
    data.symlink_to(data.name)  # ELOOP for each file stands for EIO and EACCES of a failing disk
    with pytest.raises(TierError, match="2 of 2 lookups failed: eloop"):
        await tier.contains(world.keys(range(2)))


async def test_anything_may_be_removed(world, monkeypatch):
    monkeypatch.setattr(maintenance, "TICK_S", 0.02)
    tier = await world.open(max_bytes=10**9)
    for round_ in range(3):
        await world.put(tier, range(10))
        for number, path in enumerate(world.root.iterdir()):  # at once, even during writes
            shutil.rmtree(path.rename(world.root.with_name(f"removed-{round_}-{number}")))
        assert (await world.get(tier, range(10))).statuses == (ABSENT,) * 10
        with anyio.fail_after(20):  # a new ledger needs a count first
            while (await world.put(tier, range(10))).statuses != (OK,) * 10:  # noqa: ASYNC110
                await anyio.sleep(0.005)
        assert (await world.get(tier, range(10))).statuses == (OK,) * 10


async def test_no_descriptors_end_count(world):
    """A count without the unopened directories would let puts exceed the bound."""
    await world.put(await world.open(), range(4))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    root_fd = os.open(world.root, os.O_RDONLY)
    held = [os.dup(root_fd) for _ in range(256)]  # no lower descriptor is free
    resource.setrlimit(resource.RLIMIT_NOFILE, (held[-1] + 2, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            tree_bytes(root_fd, ".", StopFlag())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in (*held, root_fd):
            os.close(fd)
