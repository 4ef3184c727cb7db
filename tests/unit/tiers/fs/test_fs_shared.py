"""One root, several engines: one budget, one ledger that may be lost, and no duplicate work."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil

import anyio
import crc32c
import msgspec
import pytest

from kvtier.errors import TierError
from kvtier.tiers import Outcome, Status
from kvtier.tiers.fs._files.chunk_files import tree_bytes
from kvtier.tiers.fs._files.native_call import StopFlag
from kvtier.tiers.fs._maintenance import maintenance
from kvtier.tiers.fs._quota import ledger
from kvtier.tiers.fs._quota.accounts import Accounts, FileSystem
from kvtier.tiers.fs._quota.quota import Quota
from kvtier_tools.root.contents import read_ledger
from tests.unit.tiers.fs.conftest import AT_FDCWD

pytestmark = pytest.mark.timeout(60)
OK, ABSENT, REFUSED, FAILED = Status.OK, Status.ABSENT, Status.REFUSED, Status.FAILED


def accounts_of(world):
    """The root's ledger, which must be readable."""
    root_fd = os.open(world.root, os.O_RDONLY)
    try:
        accounts = read_ledger(root_fd)
    finally:
        os.close(root_fd)
    assert accounts is not None
    return accounts


def has_ledger_of(world, writers):
    try:
        accounts = accounts_of(world)
    except AssertionError:
        return False
    return accounts.is_exact and len(accounts.leases) == writers


async def put_many(world, tier, first, outcomes):
    for start in range(first, first + 80, 8):
        outcomes.append(await world.put(tier, range(start, start + 8)))


async def test_engines_fill_one_bound(world):
    tiers = [await world.open(max_bytes=2_000_000, eviction="none") for _ in range(4)]
    outcomes: list[Outcome] = []
    async with anyio.create_task_group() as tasks:
        for number, tier in enumerate(tiers):
            tasks.start_soon(put_many, world, tier, 1000 * number, outcomes)
    assert 1_700_000 < await world.bytes_below() <= 2_000_000
    refused = sum(outcome.statuses.count(REFUSED) for outcome in outcomes)
    assert refused > 100
    assert sum(outcome.reasons.get("max_bytes", 0) for outcome in outcomes) == refused


async def test_simultaneous_puts_count_once(world):
    """Otherwise engines that put the same chunks at once would evict chunks needlessly."""
    world.chunk_bytes = 131_072
    tiers = [await world.open(max_bytes=10**9) for _ in range(4)]
    drift = accounts_of(world).used - await world.bytes_below()
    for first in range(0, 320, 64):
        batch = world.to_put(range(first, first + 64))
        async with anyio.create_task_group() as tasks:
            for tier in tiers:
                tasks.start_soon(tier.put, batch)
        assert (await world.get(tiers[0], range(first, first + 64))).statuses == (OK,) * 64
    for tier in tiers:
        await anyio.to_thread.run_sync(world.session(tier).quota.flush)
    assert accounts_of(world).used - await world.bytes_below() == drift


async def test_restart_knows_size(world, hung_count):
    hung_count.open()
    tier = await world.open(max_bytes=400_000, eviction="none")
    await world.put(tier, range(60))
    used = tier.statistics().used_bytes
    held = await world.bytes_below()
    await tier.aclose()
    hung_count.close()
    tier = await world.open(until_counted=False, max_bytes=400_000, eviction="none")
    assert tier.statistics().used_bytes == used
    assert used >= held - 4096 - 4096  # the ledger and its directory were created after the count
    outcome = await world.put(tier, range(100, 140))
    assert outcome.reasons["max_bytes"] >= 30


def sealed_ledger(body):
    return b"%08x %s\n" % (crc32c.crc32c(body), body)


@pytest.mark.parametrize("loss", ["deleted", "garbage", "empty", "torn", "numbers", "another boot"])
async def test_lost_ledger_is_recounted(world, hung_count, monkeypatch, tmp_path, loss):
    world.root = tmp_path / "root"  # on a disk, which holds more than the limit
    hung_count.open()
    tier = await world.open(max_bytes=400_000, eviction="none")
    await world.put(tier, range(60))
    await tier.aclose()
    file = world.root / ".kvtier" / "ledger"
    if loss == "deleted":
        file.unlink()
    elif loss == "another boot":
        monkeypatch.setattr(ledger, "_boot", lambda: "another")
    else:
        forged = msgspec.json.encode(Accounts(0, is_exact=True, leases={"1-1": 999_999}))
        text = {
            "garbage": b"\xff" * 4096,
            "empty": b"",
            "torn": file.read_bytes()[:90],
            "numbers": sealed_ledger(forged.replace(b"999999", b"9" * 16)),
        }[loss]
        file.write_bytes(text)
    hung_count.close()
    tier = await world.open(until_counted=False, max_bytes=400_000, eviction="none")
    outcome = await world.put(tier, range(100, 140))
    assert (outcome.statuses, dict(outcome.reasons)) == ((REFUSED,) * 40, {"counting": 40})
    assert tier.statistics().used_bytes is None
    hung_count.open()
    await world.eventually(lambda: tier.statistics().used_bytes is not None)
    assert tier.statistics().used_bytes == await world.bytes_below()
    await world.put(tier, range(100, 140))
    assert await world.bytes_below() <= 400_000


@pytest.mark.parametrize("loss", ["ledger", "folder", "garbage"])
async def test_ledger_loss_is_harmless(world, monkeypatch, loss):
    monkeypatch.setattr(maintenance, "TICK_S", 0.02)
    tiers = [await world.open(max_bytes=600_000, recount_s=0.05, eviction="none") for _ in range(2)]
    for tier in tiers:
        await world.put(tier, range(4))
    folder = world.root / ".kvtier"
    if loss == "garbage":
        (folder / "ledger").write_bytes(b"garbage")
    elif loss == "ledger":
        (folder / "ledger").unlink()
    else:
        shutil.rmtree(folder.rename(world.root.with_name("removed")))  # at once, even during writes
    for number, tier in enumerate(tiers):
        statuses = (await world.put(tier, range(100 * number, 100 * number + 60))).statuses
        assert set(statuses) <= {OK, REFUSED}
    await world.eventually(lambda: has_ledger_of(world, 2))
    for number, tier in enumerate(tiers):
        await world.put(tier, range(1000 * number, 1000 * number + 60))
    assert 300_000 < await world.bytes_below() <= 600_000


async def sweep(_world, one, other):
    for tier in (one, other):
        await tier.reset()  # no engine uses the old epoch any more


async def evict(world, one, _other):
    await world.put(one, range(100, 140))


async def discard(world, one, _other):
    await one.discard(world.keys(range(10)))


@pytest.mark.parametrize("remove", [sweep, evict, discard])
async def test_count_leaves_no_hole(world, monkeypatch, remove):
    """A count between a removal and its report already excludes these bytes."""
    monkeypatch.setattr(maintenance, "TICK_S", 1000.0)
    tiers = [await world.open(max_bytes=600_000) for _ in range(2)]
    await world.put(tiers[0], range(20))
    report = Quota.removed
    late: list[int] = []

    def count_then_report(quota, nbytes, since):
        if nbytes and not late:
            quota.count(lambda: tree_bytes(AT_FDCWD, str(world.root), StopFlag()))
            late.append(nbytes)
        return report(quota, nbytes, since)

    monkeypatch.setattr(Quota, "removed", count_then_report)
    await remove(world, *tiers)
    await world.eventually(lambda: late)
    for tier in tiers:
        await tier.aclose()
    assert accounts_of(world).used >= await world.bytes_below()
    monkeypatch.setattr(maintenance, "TICK_S", 0.02)
    await world.open(max_bytes=600_000, recount_s=0.05)
    with anyio.fail_after(30):  # its sweep continues to remove files until one of its counts agrees
        while accounts_of(world).used != await world.bytes_below():  # noqa: ASYNC110 - as in ``eventually``
            await anyio.sleep(0.005)


def die_with_a_lease(world, nbytes):
    root_fd = os.open(world.root, os.O_RDONLY)
    try:
        one = ledger.SharedLedger(root_fd, lambda: FileSystem(10**12, 0, 10**12))
        with one.change() as accounts:
            accounts.leases[one.writer] = nbytes
        one._unregister()  # as the kernel closes it, without a release
    finally:
        os.close(root_fd)
    return one.writer


@pytest.mark.parametrize("ends_meanwhile", [False, True], ids=["found at the start", "found by a tick"])
async def test_dead_leases_evict_nothing(world, monkeypatch, ends_meanwhile):
    """Engines that crash repeatedly leave this, each with the lease of a batch."""
    monkeypatch.setattr(maintenance, "TICK_S", 0.05)
    tier = await world.open(max_bytes=1_000_000)
    await world.put(tier, range(20))
    if not ends_meanwhile:
        await tier.aclose()
    dead = await anyio.to_thread.run_sync(die_with_a_lease, world, 990_000)
    if not ends_meanwhile:
        tier = await world.open(max_bytes=1_000_000)
    await world.eventually(lambda: dead not in accounts_of(world).leases)
    await world.eventually(lambda: not accounts_of(world).unconfirmed)
    assert (await world.get(tier, range(20))).statuses == (OK,) * 20
    assert (await world.put(tier, range(100, 110))).statuses == (OK,) * 10
    assert tier.statistics().evicted_chunks == 0


async def test_stopped_lock_holder_fails_puts(world, monkeypatch):
    tier = await world.open(max_bytes=10**9)
    await world.put(tier, [1])
    await world.eventually(lambda: not world.session(tier).quota.has_news)  # no lease ahead remains
    with monkeypatch.context() as patch, (world.root / ".kvtier" / "ledger").open("rb") as file:
        patch.setattr(ledger, "_PATIENCE_S", 0.05)
        fcntl.flock(file, fcntl.LOCK_EX)
        outcome = await world.put(tier, [2])
        assert (outcome.statuses, dict(outcome.reasons)) == ((FAILED,), {"etimedout": 1})
        assert (await world.get(tier, [1, 2])).statuses == (OK, ABSENT)
        await tier.discard(world.keys([1]))
    assert (await world.put(tier, [2])).statuses == (OK,)


async def test_second_writer_does_nothing(world):
    one, two = await world.open(), await world.open()
    await world.put(one, range(32))
    before = [world.file(number).stat() for number in range(32)]
    assert (await world.put(two, range(32))).statuses == (OK,) * 32
    after = [world.file(number).stat() for number in range(32)]
    assert [(it.st_ino, it.st_mtime_ns) for it in after] == [(it.st_ino, it.st_mtime_ns) for it in before]


async def test_lockless_is_read_only(world, monkeypatch, caplog):
    def flock(fd, how):
        raise OSError(37, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", flock)
        with pytest.raises(TierError, match=r"no locks .*enolck"):
            await world.open()
    tier = await world.open()
    await world.put(tier, [1])
    await tier.aclose()
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", flock)
        tier = await world.open()
        assert (await world.get(tier, [1])).statuses == (OK,)
        outcome = await world.put(tier, [2])
        assert (outcome.statuses, dict(outcome.reasons)) == ((REFUSED,), {"enolck": 1})
        await tier.aclose()


async def test_nfs_locks_open_for_writing(world, monkeypatch):
    """There an exclusive lock of a read-only descriptor fails with EBADF: see flock(2)."""
    flock = fcntl.flock

    def as_on_nfs(fd, operation):
        can_write = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
        if operation & fcntl.LOCK_EX and not can_write:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", as_on_nfs)
    first = await world.open(max_bytes=10**9)
    await world.put(first, range(2))
    dead = await anyio.to_thread.run_sync(die_with_a_lease, world, 1000)
    second = await world.open(max_bytes=10**9)
    assert (await world.get(second, range(2))).statuses == (Status.OK, Status.OK)
    await world.eventually(lambda: dead not in accounts_of(world).leases)
    await world.put(second, range(2, 4))
    assert (await world.get(first, range(4))).statuses == (Status.OK,) * 4
