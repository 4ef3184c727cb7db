"""The bounds: they hold from the first put on, whoever else writes, and say why."""

from __future__ import annotations

import copy
import errno
import os
from contextlib import contextmanager
from typing import Any

import anyio
import pytest

from kvtier.tiers._base import Status
from kvtier.tiers.fs._config import FsConfig
from kvtier.tiers.fs._files.call import Result
from kvtier.tiers.fs._quota.accounts import LEASE_BYTES, FileSystem
from kvtier.tiers.fs._quota.ledger import Ledger
from kvtier.tiers.fs._quota.quota import Quota

pytestmark = pytest.mark.timeout(60)
OK, REFUSED = Status.OK, Status.REFUSED
FILE = 100


class Disk:
    """A file system and a clock that tests move, and the books that all quotas on it share."""

    def __init__(self, used=0, free=10_000):
        self.used, self.free, self.now = used, free, 0.0
        self.looks = 0
        self.during_look = None
        self.books: Any = Ledger(self.look())

    def look(self):
        self.looks += 1
        seen = FileSystem(self.used + self.free, self.used, self.free)
        meanwhile, self.during_look = self.during_look, None
        if meanwhile is not None:
            meanwhile()
        return seen

    def write(self, count):
        self.used += count
        self.free -= count

    def space(self, **settings):
        given = {"root_dir": "/nowhere", "min_free_bytes": 0, **settings}
        return Quota(FsConfig.model_validate(given), FILE, self.books, self.look, lambda: self.now)


def put(disk, space, chunks):
    """Reserve, write and settle. Returns how many were granted and why not more."""
    granted, reason = space.reserve(chunks)
    disk.write(granted * FILE)
    space.settle(granted, granted * FILE)
    return granted, reason


def test_max_bytes_holds_to_the_byte():
    disk = Disk(used=250)
    space = disk.space(max_bytes=1000)
    space.count(lambda: 250)
    assert put(disk, space, 5) == (5, Result.MAX_BYTES)
    assert put(disk, space, 5) == (2, Result.MAX_BYTES)
    assert put(disk, space, 5) == (0, Result.MAX_BYTES)
    assert space.used_bytes == 950


def test_before_the_first_count_the_root_is_taken_to_hold_all_there_is():
    disk = Disk(used=700)
    space = disk.space(max_bytes=1000)
    assert space.used_bytes is None
    assert put(disk, space, 9) == (3, Result.COUNTING)
    assert put(disk, space, 9) == (0, Result.COUNTING)
    space.count(lambda: 100 + 300)
    assert put(disk, space, 9) == (6, Result.MAX_BYTES)


@pytest.mark.parametrize("held", [0, 1000, 4000])
def test_the_default_bound_holds_before_the_count_too(held):
    """80 % of what is free and what the root holds, whatever it turns out to hold."""
    disk = Disk(used=4000, free=6000)
    space = disk.space()
    before, reason = put(disk, space, 1000)
    assert reason is Result.COUNTING
    assert held + before * FILE <= 0.8 * (6000 + held)
    space.count(lambda: held + before * FILE)
    assert space.limit_bytes == int(0.8 * (6000 + held))
    after, reason = put(disk, space, 1000)
    assert reason is Result.MAX_BYTES
    assert 0.8 * (6000 + held) - FILE < held + (before + after) * FILE <= 0.8 * (6000 + held)


def test_min_free_sees_what_others_write():
    disk = Disk(free=2000)
    space = disk.space(max_bytes=10**9, min_free_bytes=1500)
    assert put(disk, space, 9) == (5, Result.MIN_FREE)
    assert put(disk, space, 9) == (0, Result.MIN_FREE)
    disk.write(-1000)
    assert put(disk, space, 20) == (10, Result.MIN_FREE)


def test_the_file_system_is_asked_once_for_many_puts_but_again_after_a_second():
    disk = Disk(free=100 * LEASE_BYTES)
    space = disk.space(max_bytes=10**12)
    space.count(lambda: 0)
    put(disk, space, 1)
    looks = disk.looks
    for _ in range(50):
        assert put(disk, space, 10)[0] == 10
    assert disk.looks == looks
    disk.free = 500  # somebody else has filled the disk
    disk.now += 1.0
    assert put(disk, space, 10)[0] == 5
    assert disk.looks > looks


def test_a_lease_that_cannot_be_written_down_is_none(monkeypatch):
    disk = Disk()
    space = disk.space(max_bytes=1000)
    space.count(lambda: 0)
    assert put(disk, space, 2)[0] == 2
    real = disk.books.change

    @contextmanager
    def fail():
        before = copy.deepcopy(disk.books.accounts)
        with real() as accounts:
            yield accounts
        disk.books.accounts = before
        raise OSError(errno.ENOSPC, "no room for the ledger")

    with monkeypatch.context() as patch:
        patch.setattr(disk.books, "change", fail)
        for _ in range(3):
            with pytest.raises(OSError, match="no room"):
                space.reserve(8)
    assert put(disk, space, 20)[0] == 8
    space.refresh()
    assert disk.books.accounts.used == space.used_bytes == 1000


def test_a_lease_that_is_not_used_goes_back_to_the_others():
    disk = Disk()
    one, two = disk.space(max_bytes=2000), disk.space(max_bytes=2000)
    one.count(lambda: 0)
    assert put(disk, one, 4)[0] == 4
    assert disk.books.accounts.leased == 400 + 200  # an eighth of what there was beyond the four
    one.refresh()
    assert disk.books.accounts.leased == 0
    assert put(disk, two, 20)[0] == 16


class Interrupted(Ledger):
    """A disk's books, while which are asked something happens that another thread does."""

    writer = "self"

    def __init__(self, books):
        self._books = books
        self.meanwhile = None
        self.fails = False

    @contextmanager
    def change(self):
        with self._books.change() as accounts:
            before = copy.deepcopy(accounts)
            yield accounts
            if self.meanwhile is not None:
                self.meanwhile()
        if self.fails:
            self._books.accounts = before
            raise OSError(errno.ENOSPC, "no room for the ledger")

    def expire_dead_leases(self, accounts):
        self._books.expire_dead_leases(accounts)


def leased_ahead(max_bytes=8000 + FILE):
    """Return a disk and a space that has put one file and has leased 10 ahead."""
    disk = Disk(free=100_000)
    disk.books = Interrupted(disk.books)
    space = disk.space(max_bytes=max_bytes)
    space.count(lambda: 0)
    assert not space.reserve_at_once(1)
    assert put(disk, space, 1)[0] == 1
    return disk, space


def test_what_is_leased_is_reserved_without_asking_anybody():
    disk, space = leased_ahead()
    looks = disk.looks
    disk.books.meanwhile = lambda: pytest.fail("the ledger was asked")
    assert space.reserve_at_once(9)
    assert not space.reserve_at_once(2)
    assert space.reserve_at_once(1)
    assert disk.looks == looks


def test_a_lease_is_to_be_renewed_when_half_of_it_is_left_and_is_then_not_asked_for_again():
    _, space = leased_ahead()
    assert not space.needs_renewal
    assert space.reserve_at_once(5)
    assert not space.needs_renewal
    assert space.reserve_at_once(1)
    assert space.needs_renewal
    space.renew()
    assert not space.needs_renewal
    assert space.reserve_at_once(8)


def test_a_look_is_to_be_renewed_before_it_is_old():
    disk, space = leased_ahead()
    disk.now += 0.5
    assert space.needs_renewal
    space.renew()
    assert not space.needs_renewal
    disk.now += 0.5
    assert space.reserve_at_once(1)


def test_no_number_of_renewals_leases_a_small_root_empty():
    disk, space = leased_ahead()
    for _ in range(20):
        assert space.reserve_at_once(6)
        space.renew()
        space.settle(6, 0)
    assert disk.books._books.accounts.leased <= 8000 // 8 + 6 * FILE
    assert put(disk, disk.space(max_bytes=8000 + FILE), 60)[0] == 60


def test_puts_go_on_while_the_ledger_is_asked_and_use_no_lease_that_is_not_written_down():
    disk, space = leased_ahead()
    taken = []
    assert space.reserve_at_once(6)
    disk.books.meanwhile = lambda: taken.extend([space.reserve_at_once(4), space.reserve_at_once(1)])
    space.renew()
    assert taken == [True, False]
    disk.books.meanwhile = None
    space.settle(10, 10 * FILE)
    disk.write(10 * FILE)
    space.refresh()
    assert space.used_bytes == 11 * FILE


def test_what_is_reserved_and_written_while_a_renewal_fails_stays_so():
    disk, space = leased_ahead()
    assert space.reserve_at_once(6)

    def go_on():
        disk.write(FILE)
        space.settle(6, FILE)
        assert space.reserve_at_once(4)

    disk.books.meanwhile, disk.books.fails = go_on, True
    with pytest.raises(OSError, match="no room"):
        space.renew()
    disk.books.meanwhile, disk.books.fails = None, False
    assert space.reserve_at_once(5)
    assert not space.reserve_at_once(1)
    space.settle(9, 9 * FILE)
    space.refresh()
    assert space.used_bytes == 11 * FILE
    assert disk.books._books.accounts.leased == 0


def test_what_is_written_during_a_look_is_held_against_it():
    disk, space = leased_ahead(max_bytes=10**6)
    disk.free = 600
    assert space.reserve_at_once(2)

    def end_the_put():  # the look has seen nothing of it
        disk.write(2 * FILE)
        space.settle(2, 2 * FILE)

    disk.during_look = end_the_put
    space.renew()
    assert not space.reserve_at_once(5)
    assert space.reserve_at_once(4)


@pytest.mark.parametrize("has_seen", [True, False])
def test_what_a_count_may_have_seen_is_not_taken_off_once_more(has_seen):
    """A removal that is told when a count has begun and ended since its beginning."""
    disk = Disk()
    space = disk.space(max_bytes=1000)
    space.count(lambda: 1000)
    since = space.mark()
    space.count(lambda: 700 if has_seen else 1000)
    space.changed(-300, since)
    assert space.used_bytes == (700 if has_seen else 1000)
    assert space.unconfirmed_bytes == 300
    assert space.excess_bytes == 0  # 700 are there at the most
    assert space.count_is_due(3600)
    space.count(lambda: 700)
    assert (space.used_bytes, space.unconfirmed_bytes) == (700, 0)
    assert put(disk, space, 5)[0] == 3


@pytest.mark.parametrize(("total", "kept"), [(10_000, 500), (2**50, 32 * 2**30)])
def test_the_default_of_min_free_is_a_share_and_bounded(total, kept):
    disk = Disk(free=total)
    space = disk.space(max_bytes=2**60, min_free_bytes=None)
    granted, reason = space.reserve(2**60)
    assert reason is Result.MIN_FREE
    assert total - kept - FILE < granted * FILE <= total - kept


def test_a_file_system_with_hardly_an_inode_has_no_free_bytes(monkeypatch, tmp_path):
    """A chunk may need directories, too: with one inode left no put would end, and none make room."""
    from kvtier.tiers.fs._quota.quota import look_at

    real = os.statvfs(tmp_path)
    values = dict(
        zip(("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files"), real, strict=False)
    )

    class Found:
        f_files = f_favail = 0
        f_frsize, f_blocks, f_bfree, f_bavail = (
            values[name] for name in ("f_frsize", "f_blocks", "f_bfree", "f_bavail")
        )

    for files, left, is_free in (
        (100, 0, False),
        (100, 6, False),
        (100, 7, True),
        (10**6, 64, False),
        (10**6, 65, True),
        (0, 0, True),
    ):
        Found.f_files, Found.f_favail = files, left
        monkeypatch.setattr(os, "fstatvfs", lambda fd: Found)
        assert (look_at(0).free > 0) == is_free


def test_more_is_asked_to_leave_only_above_the_high_watermark_or_where_a_put_was_refused():
    disk = Disk(free=10**6)
    space = disk.space(max_bytes=10_000, high_watermark=0.9, low_watermark=0.8)
    space.count(lambda: 8900)
    assert space.excess_bytes == 0
    assert put(disk, space, 11)[0] == 11
    space.refresh()
    assert space.excess_bytes == 2000
    space.changed(-2000, space.mark())
    assert space.excess_bytes == 0
    assert put(disk, space, 21)[0] == 20
    assert space.excess_bytes == 2000


def test_nothing_is_asked_to_leave_before_the_root_was_counted_or_where_nothing_may():
    full = Disk(used=9_999, free=1)
    assert full.space(max_bytes=100).excess_bytes == 0
    disk = Disk()
    space = disk.space(max_bytes=100, eviction="none")
    space.count(lambda: 1000)
    assert space.reserve(1)[0] == 0
    assert space.excess_bytes == 0


# ------------------------------------------------------------------------------ in the tier


async def test_puts_beyond_max_bytes_are_refused_and_chunks_that_are_there_are_well(world):
    tier = await world.open(max_bytes=12 * (world.chunk_bytes + 4096 + 2 * 4096), eviction="none")
    await world.put(tier, [0, 1])
    outcome = await world.put(tier, range(40))
    written = outcome.statuses.count(OK)
    assert outcome.statuses[:2] == (OK, OK)
    assert 2 < written < 40
    assert dict(outcome.reasons) == {"max_bytes": 40 - written}
    assert sum(path.stat().st_blocks * 512 for path in world.root.rglob("*")) <= tier.statistics().limit_bytes
    again = await world.put(tier, range(40))
    assert again.statuses.count(OK) >= written
    got = await world.get(tier, range(40))
    assert got.statuses.count(OK) == again.statuses.count(OK)


async def test_min_free_refuses(world):
    tier = await world.open(min_free_bytes=2**60)
    outcome = await world.put(tier, [1, 2])
    assert (outcome.statuses, dict(outcome.reasons)) == ((REFUSED,) * 2, {"min_free": 2})


async def test_puts_that_follow_one_another_find_a_lease_and_wait_for_no_ledger(world, monkeypatch):
    monkeypatch.setattr("kvtier.tiers.fs._quota.accounts.LEASE_BYTES", 16 * 2 * world.chunk_bytes)
    monkeypatch.setattr("kvtier.tiers.fs._quota.quota.LOOK_EVERY_S", 1e9)
    monkeypatch.setattr("kvtier.tiers.fs._maintenance.maintenance.TICK_S", 1e9)
    tier = await world.open()
    if not tier.statistics().native:
        pytest.skip("without the helper's threads a thread of Python's asks")
    await world.put(tier, [0])
    quotas = []
    real = Quota.reserve_at_once

    def reserve_at_once(quota, chunks):
        quotas.append(quota)
        return real(quota, chunks)

    monkeypatch.setattr(Quota, "reserve_at_once", reserve_at_once)
    monkeypatch.setattr(Quota, "reserve", lambda *_: pytest.fail("a put has asked the ledger"))
    for number in range(1, 81):
        assert (await world.put(tier, [number])).statuses == (OK,)
        await world.eventually(lambda: not quotas[-1].needs_renewal)


async def test_the_root_is_counted_again_from_time_to_time(world):
    tier = await world.open(recount_s=0.02)
    await world.put(tier, range(20))
    full = tier.statistics().used_bytes
    for number in range(20):
        world.file(number).unlink()
    with anyio.fail_after(20):
        while tier.statistics().used_bytes > full - 20 * world.chunk_bytes:  # noqa: ASYNC110
            await anyio.sleep(0.005)


async def test_a_file_system_that_cannot_be_asked_is_a_failure_of_the_put(world, monkeypatch):
    tier = await world.open()

    def fail(fd):
        raise OSError(errno.EIO, "gone")

    monkeypatch.setattr(os, "fstatvfs", fail)
    monkeypatch.setattr("kvtier.tiers.fs._quota.quota.LOOK_EVERY_S", 0.0)
    outcome = await world.put(tier, [1, 2])
    assert (outcome.statuses, dict(outcome.reasons)) == ((Status.FAILED,) * 2, {"eio": 2})
    monkeypatch.undo()
    assert (await world.put(tier, [1, 2])).statuses == (OK, OK)
