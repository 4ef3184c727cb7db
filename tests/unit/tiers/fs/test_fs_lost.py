"""A root whose path now names another directory: only then does the tier ask to be reopened."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
from pathlib import Path

import anyio
import pytest

from kvtier.tiers import Status
from kvtier.tiers.fs import _namespace
from kvtier.tiers.fs._locks import make_writer_lock
from kvtier.tiers.fs._maintenance import maintenance
from kvtier.tiers.fs._namespace import OpenNamespace
from kvtier.tiers.fs._quota.quota import Quota
from tests.unit.conftest import mounted_tmpfs

OK = Status.OK


@pytest.fixture
def told():
    """The reports of tiers about their roots."""
    return []


@pytest.fixture
def looks(monkeypatch):
    """Makes tiers check often; waits for several checks that start after the call."""
    monkeypatch.setattr(maintenance, "TICK_S", 0.01)
    monkeypatch.setattr(_namespace, "_FIRST_TRY_PAUSE_S", 0.0)  # so there are no later pauses either
    looked, is_replaced = threading.Semaphore(0), OpenNamespace.is_replaced

    def counted(namespace):
        looked.release()
        return is_replaced(namespace)

    async def wait():
        while looked.acquire(blocking=False):
            pass
        for _ in range(4):
            assert await anyio.to_thread.run_sync(looked.acquire, True, 20)

    monkeypatch.setattr(OpenNamespace, "is_replaced", counted)
    return wait


@pytest.fixture
async def tier(world, told, looks):
    """A tier that checks its root often."""
    return await world.open(lost=told.append, max_bytes=2**50)


async def test_replaced_root_is_told(world, tier, told):
    world.root.rename(world.root.with_name("before"))
    world.root.mkdir()
    await world.eventually(lambda: told)
    assert told[0] == f"{world.root} was replaced by another directory or removed"


async def test_removed_root_is_remade(world, tier, told):
    await world.until_listed(tier)
    while world.root.exists():  # the ledger may come back meanwhile
        shutil.rmtree(world.root, ignore_errors=True)
    await world.eventually(lambda: told)
    await tier.aclose()
    tier = await world.open(max_bytes=2**50)
    assert (await world.put(tier, range(4))).statuses == (OK,) * 4


@pytest.mark.parametrize("eviction", ["reuse", "none"])
async def test_manual_removal_frees_room(world, tier, told, eviction):
    """``rm -rf ROOT/*`` leaves the ledger; its stale numbers must not evict fresh chunks."""
    await tier.aclose()
    settings = {"max_bytes": 40 * 20_480, "eviction": eviction}
    tier = await world.open(**settings)
    await world.put(tier, range(36))
    await tier.aclose()
    for path in world.root.glob("[!.]*"):
        shutil.rmtree(path)
    tier = await world.open(**settings)
    for number in range(100, 136):
        await world.eventually(lambda: (usage := tier.usage()) and usage.used_bytes is not None)
        assert (await world.put(tier, [number])).statuses == (OK,)
    assert (await world.get(tier, range(100, 136))).statuses == (OK,) * 36
    assert tier.statistics().evicted_chunks == 0


async def test_removed_cache_is_recreated(world, tier, told):
    await world.put(tier, range(4))
    await world.until_listed(tier)
    shutil.rmtree(world.namespace)
    await world.eventually(lambda: told)
    await tier.aclose()
    tier = await world.open(max_bytes=2**50)
    assert (await world.put(tier, range(4, 8))).statuses == (OK,) * 4
    assert (world.namespace / "config.json").exists()


async def test_remotely_removed_root_is_told(world, tier, told, monkeypatch):
    """A network file system drops the inode of a directory removed by another client."""
    root_fd, fstat = world.session(tier).namespace.root_fd, os.fstat

    def stale(fd):
        if fd == root_fd:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return fstat(fd)

    monkeypatch.setattr(os, "fstat", stale)
    world.root.rename(world.root.with_name("elsewhere"))
    await world.eventually(lambda: told)


async def test_unmounted_root_is_not_remade(world, told, looks, mounted):
    world.root = mounted / "root"
    tier = await world.open(lost=told.append, max_bytes=2**50)
    await world.until_listed(tier)
    opened = Path(f"/proc/self/fd/{world.session(tier).namespace.root_fd}")
    run("umount", "-l", str(mounted))
    for path in opened.iterdir():
        shutil.rmtree(path)
    await looks()
    assert told == []


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC])
async def test_writable_root_is_told(world, told, looks, monkeypatch, number):
    await (await world.open()).aclose()
    with monkeypatch.context() as patch:

        def refuse(root_fd, folder):
            raise OSError(number, os.strerror(number), folder)

        patch.setattr(_namespace, "make_writer_lock", refuse)
        tier = await world.open(lost=told.append, max_bytes=2**50)
        assert (await world.put(tier, range(4))).statuses == (Status.REFUSED,) * 4
        await looks()
        assert told == []
    await world.eventually(lambda: told)
    assert told[0] == f"{world.root} can be written now"
    await tier.aclose()
    assert [path.name for path in (world.namespace / ".tmp").iterdir()] == []
    tier = await world.open(max_bytes=2**50)
    assert (await world.put(tier, range(4))).statuses == (OK,) * 4


async def test_failed_attempt_leaves_nothing(world, told, looks, monkeypatch):
    await (await world.open()).aclose()
    made = []

    def make_half(namespace):
        namespace.writer, namespace._writer_fd = make_writer_lock(namespace.root_fd, f"{namespace.name}/.tmp")
        made.append(namespace.writer)
        raise OSError(errno.ENOSPC, "no room for a directory")

    monkeypatch.setattr(OpenNamespace, "_make_writer", make_half)
    tier = await world.open(lost=told.append, max_bytes=2**50)
    await looks()
    await tier.aclose()
    assert told == []
    assert len(made) > 2
    assert [path.name for path in (world.namespace / ".tmp").iterdir()] == []


async def test_moved_root_stays_usable(world, tier, told, looks):
    world.root.rename(world.root.with_name("before"))
    await looks()
    assert (await world.put(tier, range(4))).statuses == (OK,) * 4
    world.root.with_name("before").rename(world.root)
    await looks()
    assert told == []
    assert (await world.get(tier, range(4))).statuses == (OK,) * 4


def run(*command):
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def mounted(world):
    """A file system mounted above the root."""
    with mounted_tmpfs(world.root.with_name("mounted"), "size=64m") as world.root:
        yield world.root


@pytest.mark.parametrize("below", ["", "kvtier/cache"], ids=["at the mount point", "below it"])
async def test_unmounting_uncovers_nothing(world, told, looks, mounted, below):
    bare = mounted / below
    run("umount", str(mounted))
    bare.mkdir(parents=True, exist_ok=True)
    run("mount", "-t", "tmpfs", "kvtier-test", str(mounted))
    world.root = bare
    tier = await world.open(lost=told.append, max_bytes=2**50)
    run("umount", "-l", str(mounted))
    await looks()
    assert told == []
    assert (await world.put(tier, range(4))).statuses == (OK,) * 4
    assert list(bare.iterdir()) == []
    run("mount", "-t", "tmpfs", "kvtier-test", str(mounted))
    bare.mkdir(parents=True, exist_ok=True)
    await world.eventually(lambda: told)
    await tier.aclose()


async def test_failed_look_is_repeated(world, tier, told, monkeypatch, caplog):
    is_replaced = OpenNamespace.is_replaced
    errors = iter([RuntimeError("no more threads")])

    def fail_once(namespace):
        for error in errors:
            raise error
        return is_replaced(namespace)

    monkeypatch.setattr(OpenNamespace, "is_replaced", fail_once)
    world.root.rename(world.root.with_name("before"))
    world.root.mkdir()
    await world.eventually(lambda: told)
    assert "no more threads" in caplog.text


async def test_repeated_failure_told_rarely(world, tier, monkeypatch, caplog):
    looks = []

    def fail(space):
        looks.append(space)
        raise OSError(errno.EIO, "the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(Quota, "refresh", fail)
        await world.eventually(lambda: len(looks) > 5)
    assert caplog.text.count("reading its ledger failed") == 1
    assert "the disk is gone" in caplog.text
