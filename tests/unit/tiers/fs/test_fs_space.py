"""The bounds hold from the first put on, regardless of other writers, and state the reason."""

from __future__ import annotations

import errno
import os
import shutil
import time
from types import SimpleNamespace

import pytest

from kvtier.tiers import Status
from kvtier.tiers.fs._config import FsConfig
from kvtier.tiers.fs._files.native_call import Result
from kvtier.tiers.fs._locks import make_writer_lock
from kvtier.tiers.fs._quota import ledger
from kvtier.tiers.fs._quota.accounts import FileSystem
from kvtier.tiers.fs._quota.ledger import Ledger, stat_file_system
from kvtier.tiers.fs._quota.quota import Quota
from kvtier_tools.root.contents import read_ledger

pytestmark = pytest.mark.timeout(60)
OK, REFUSED = Status.OK, Status.REFUSED
FILE = 100


class Disk:
    """A file system that tests change, and the ledger that all quotas on it share."""

    def __init__(self, used=0, free=10_000):
        self.used, self.free = used, free
        self.ledger = Ledger(self.look)

    def look(self):
        return FileSystem(self.used + self.free, self.used, self.free)

    def write(self, count):
        self.used += count
        self.free -= count

    def space(self, **settings):
        given = {"root_dir": "/nowhere", "min_free_bytes": 0, **settings}
        return Quota(FsConfig.model_validate(given), FILE, self.ledger)


def put(disk, space, chunks):
    """Reserve, write and settle. Return the number of granted chunks and the reason for the rest."""
    granted, reason = space.reserve(chunks)
    disk.write(granted * FILE)
    space.end_reservation(granted, granted * FILE)
    return granted, reason


def test_max_bytes_holds_exactly():
    disk = Disk(used=250)
    space = disk.space(max_bytes=1000)
    space.count(lambda: 250)
    assert put(disk, space, 5) == (5, Result.MAX_BYTES)
    assert put(disk, space, 5) == (2, Result.MAX_BYTES)
    assert put(disk, space, 5) == (0, Result.MAX_BYTES)
    assert space.used_bytes == 950


def test_uncounted_root_is_full():
    disk = Disk(used=700)
    space = disk.space(max_bytes=1000)
    assert space.used_bytes is None
    assert put(disk, space, 9) == (3, Result.COUNTING)
    assert put(disk, space, 9) == (0, Result.COUNTING)
    space.count(lambda: 100 + 300)
    assert put(disk, space, 9) == (6, Result.MAX_BYTES)


@pytest.mark.parametrize("held", [0, 1000, 4000])
def test_default_bound_holds_early(held):
    """The bound is 80 % of the free space plus the root's contents, however large these are."""
    disk = Disk(used=4000, free=6000)
    space = disk.space()
    before, reason = put(disk, space, 1000)
    assert reason is Result.COUNTING
    assert held + before * FILE <= 0.8 * (6000 + held)
    space.count(lambda: held + before * FILE)
    assert space.limit == int(0.8 * (6000 + held))
    after, reason = put(disk, space, 1000)
    assert reason is Result.MAX_BYTES
    assert 0.8 * (6000 + held) - FILE < held + (before + after) * FILE <= 0.8 * (6000 + held)


def test_min_free_sees_others():
    disk = Disk(free=2000)
    space = disk.space(max_bytes=10**9, min_free_bytes=1500)
    assert put(disk, space, 9) == (5, Result.MIN_FREE)
    assert put(disk, space, 9) == (0, Result.MIN_FREE)
    disk.write(-1000)
    assert put(disk, space, 20) == (10, Result.MIN_FREE)


@pytest.mark.parametrize(("given", "kept"), [(None, 1600), ("12%", 1200), (" 2.5 % ", 250), ("1kB", 1000)])
def test_min_free_is_bytes_or_a_share(given, kept):
    """By default more than 15 %, below which the kubelet evicts pods."""
    total = 10_000
    disk = Disk(free=total)
    space = disk.space(max_bytes=2**60, min_free_bytes=given)
    granted, reason = space.reserve(2**60)
    assert reason is Result.MIN_FREE
    assert total - kept - FILE < granted * FILE <= total - kept


@pytest.mark.parametrize("given", ["100%", "-1%", "%", "12 %%", -1, True])
def test_other_amounts_are_refused(given):
    with pytest.raises(ValueError, match="min_free_bytes"):
        FsConfig.model_validate({"root_dir": "/nowhere", "min_free_bytes": given})


def test_foreign_removal_starts_count():
    disk = Disk(used=5000, free=10**6)
    space = disk.space(max_bytes=10**6)
    space.count(lambda: 4000)
    assert not space.count_is_due(600)
    disk.write(-3000)
    space.refresh()
    assert space.should_be_counted
    assert not space.count_is_due(600)  # it was counted a moment ago
    disk.ledger.accounts.counted_at -= 2
    assert space.count_is_due(600)
    space.count(lambda: 1000)
    assert not space.should_be_counted
    assert space.used_bytes == 1000


def test_long_counts_are_rarer():
    disk = Disk(used=5000, free=10**6)
    space = disk.space(max_bytes=10**6)
    space.count(lambda: 4000)
    accounts = disk.ledger.accounts
    accounts.count_s = 3600.0
    accounts.counted_at -= 19 * 3600.0
    assert not space.count_is_due(600)
    accounts.counted_at -= 2 * 3600.0
    assert space.count_is_due(600)


def test_refused_write_lowers_limit(monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    disk = Disk(free=10**9)
    space = disk.space(max_bytes=10**8)
    space.count(lambda: 0)
    put(disk, space, 640)
    assert not space.lower_limit(("another", 0))  # room was freed during the write
    assert space.limit == 10**8
    assert space.lower_limit(space.accounts.removals)
    assert (space.limit, space.excess) == (64_000, 4480)
    space.removed(4480, space.mark())
    assert not space.lower_limit()  # a failure during an eviction is no new evidence
    assert space.limit == 64_000
    clock[0] += 61
    space.refresh()
    assert space.limit == 65_000
    full = Disk(free=FILE - 1).space(max_bytes=10**8)
    full.count(lambda: 0)
    assert not full.lower_limit()  # statvfs shows it


@pytest.mark.parametrize(
    ("files", "left", "is_free"),
    [(100, 6, False), (100, 7, True), (10**6, 64, False), (10**6, 65, True), (0, 0, True)],
)
def test_no_inodes_is_no_room(monkeypatch, files, left, is_free):
    """A chunk may need directories, too: with one inode left no put would succeed, and none make room."""
    found = SimpleNamespace(
        f_frsize=4096, f_blocks=100, f_bfree=50, f_bavail=50, f_files=files, f_favail=left
    )
    monkeypatch.setattr(os, "fstatvfs", lambda fd: found)
    assert (stat_file_system(0).free > 0) == is_free


def test_eviction_needs_pressure():
    disk = Disk(free=10**6)
    space = disk.space(max_bytes=10_000, high_watermark=0.9, low_watermark=0.8)
    space.count(lambda: 8900)
    assert space.excess == 0
    assert put(disk, space, 11)[0] == 11
    space.refresh()
    assert space.excess == 2000
    space.removed(2000, space.mark())
    assert space.excess == 0
    assert put(disk, space, 21)[0] == 20
    assert space.excess == 2000


def test_eviction_needs_candidates():
    full = Disk(used=9_999, free=1)
    assert full.space(max_bytes=100).excess == 0
    disk = Disk()
    space = disk.space(max_bytes=100, eviction="none")
    space.count(lambda: 1000)
    assert space.reserve(1)[0] == 0
    assert space.excess == 0


def test_plenty_asks_nothing():
    disk = Disk(free=10**9)
    space = disk.space(max_bytes=10**8)
    space.count(lambda: 0)
    assert not space.reserve_ahead(1)
    space.reserve(8)
    asked = 0
    for _ in range(10_000):
        if not space.reserve_ahead(8):
            asked += 1
            space.reserve(8)
        space.end_reservation(8, 8 * FILE)
    assert 0 < asked < 20


def test_bound_holds_on_petabytes(tmp_path):
    disk = Disk(used=30 * 10**15, free=70 * 10**15)
    root_fd = os.open(tmp_path, os.O_RDONLY)
    disk.ledger = ledger.SharedLedger(root_fd, disk.look)
    space = disk.space(max_bytes=1000)
    space.count(lambda: 0)
    assert put(disk, space, 5) == (5, Result.MAX_BYTES)
    assert put(disk, space, 9) == (5, Result.MAX_BYTES)
    space.refresh()
    assert space.used_bytes == 1000
    disk.ledger.close()
    os.close(root_fd)


def test_refused_leases_nothing_ahead():
    """Otherwise other writers would believe that it writes, and evict for it again and again."""
    disk = Disk(free=10**9)
    space = disk.space(max_bytes=100 * FILE + 99)
    space.count(lambda: 99 * FILE)
    assert space.reserve(2)[0] == 1
    assert disk.ledger.accounts.leased == FILE
    space.end_reservation(1, FILE)
    assert space.reserve(1)[0] == 0
    assert not space.accounts.leased


def test_vanishing_folder_fails_once(tmp_path, monkeypatch):
    root_fd = os.open(tmp_path, os.O_RDONLY)
    shared = ledger.SharedLedger(root_fd, Disk().look)

    def register_late(*args):
        shutil.rmtree(tmp_path / ".kvtier")
        return make_writer_lock(*args)

    def stored_leases():
        accounts = read_ledger(root_fd)
        assert accounts is not None
        return accounts.leases

    shutil.rmtree(tmp_path / ".kvtier")
    with monkeypatch.context() as patch:
        patch.setattr(ledger, "make_writer_lock", register_late)
        for _ in range(2):
            with pytest.raises(FileNotFoundError), shared.change():
                pytest.fail("there are no accounts to hold")
    with shared.change() as accounts:
        accounts.leases[shared.writer] = 7
    assert stored_leases() == {shared.writer: 7}
    shared.close()
    assert stored_leases() == {}
    os.close(root_fd)


# ------------------------------------------------------------------------------ in the tier


async def test_unanswered_space_fails_put(world, monkeypatch):
    tier = await world.open()

    def fail(fd):
        raise OSError(errno.EIO, "gone")

    monkeypatch.setattr(os, "fstatvfs", fail)
    outcome = await world.put(tier, [1, 2])
    assert (outcome.statuses, dict(outcome.reasons)) == ((Status.FAILED,) * 2, {"eio": 2})
    monkeypatch.undo()
    assert (await world.put(tier, [1, 2])).statuses == (OK, OK)
