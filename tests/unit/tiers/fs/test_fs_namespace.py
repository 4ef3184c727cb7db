"""Opening: identity, unusable roots, epochs, and leftovers of other engines."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path

import anyio
import pytest

from kvtier.errors import TierError
from kvtier.tiers import Status, TierContext
from kvtier.tiers.fs import FsConfig, FsTier, _namespace
from kvtier.tiers.fs import _layout as layout
from kvtier.tiers.fs import _locks as locks
from kvtier.tiers.fs._locks import make_lock
from kvtier.tiers.fs._maintenance import maintenance
from kvtier.tiers.fs._maintenance.evict import Evictor
from kvtier.tiers.fs._namespace import OpenNamespace
from kvtier.tiers.fs._quota.quota import Quota

pytestmark = pytest.mark.timeout(60)
OK, ABSENT, REFUSED = Status.OK, Status.ABSENT, Status.REFUSED


# ------------------------------------------------------------------------------------- identity


async def test_other_identity_is_refused(world):
    tier = await world.open()
    await tier.aclose()
    manifest = json.loads((world.namespace / "config.json").read_text())
    manifest["dtype"] = "float16"
    (world.namespace / "config.json").write_text(json.dumps(manifest))
    with pytest.raises(
        TierError, match=r"tier files: .*config\.json belongs .*dtype is 'float16' there and 'bfloat16'"
    ):
        await world.open()


# ---------------------------------------------------------------------------------- bad roots


async def test_root_below_file_names_path(world, tmp_path):
    (tmp_path / "file").touch()
    world.root = tmp_path / "file" / "root"
    with pytest.raises(TierError, match=r"tier files: .*file/root cannot be used: .*\(enotdir\)"):
        await world.open()


def forbid_writing(point):
    subprocess.run(["mount", "-o", "remount,ro", str(point)], check=True)


async def test_read_only_root_is_read(world, mounted, caplog):
    point = mounted("size=4m")
    world.root = point / "root"
    tier = await world.open()
    await world.put(tier, [1])
    await tier.aclose()
    forbid_writing(point)
    tier = await world.open()
    assert (await world.get(tier, [1, 2])).statuses == (OK, ABSENT)
    outcome = await world.put(tier, [1, 2])
    assert (outcome.statuses, dict(outcome.reasons)) == ((REFUSED,) * 2, {"erofs": 2})
    assert tier.statistics().read_only == "erofs"
    assert sum("only read" in record.message for record in caplog.records) == 1
    with pytest.raises(TierError, match="erofs"):
        await tier.reset()
    assert (await world.get(tier, [1])).statuses == (ABSENT,)
    assert (await world.put(tier, [1])).statuses == (REFUSED,)


@pytest.fixture
def frozen_ledger(world):
    """A root with chunk 1, in which only the ledger's directory is read-only."""
    point = world.root / ".kvtier"
    world.root.mkdir()
    point.mkdir()
    done = subprocess.run(["mount", "--bind", str(point), str(point)], capture_output=True)
    if done.returncode:
        pytest.skip("nothing can be mounted here")
    yield lambda how: subprocess.run(["mount", "-o", f"remount,bind,{how}", str(point)], check=True)
    subprocess.run(["umount", "--lazy", str(point)], check=False, capture_output=True)


async def test_read_only_ledger_is_read(world, frozen_ledger, monkeypatch, caplog):
    monkeypatch.setattr(maintenance, "TICK_S", 0.01)
    monkeypatch.setattr(_namespace, "_FIRST_TRY_PAUSE_S", 0.0)
    tier = await world.open()
    await world.put(tier, [1])
    await tier.aclose()
    frozen_ledger("ro")
    lost: list[str] = []
    tried = threading.Semaphore(0)
    try_to_write = OpenNamespace.try_to_write

    def counted(*args):
        tried.release()
        return try_to_write(*args)

    monkeypatch.setattr(OpenNamespace, "try_to_write", counted)
    for _ in range(2):  # the tier is reopened repeatedly while another problem lasts
        tier = await world.open(lost=lost.append)
        assert (await world.get(tier, [1, 2])).statuses == (OK, ABSENT)
        outcome = await world.put(tier, [2])
        assert (outcome.statuses, dict(outcome.reasons)) == ((REFUSED,), {"erofs": 1})
        assert tier.statistics().read_only == "erofs"
        for _ in range(4):
            assert await anyio.to_thread.run_sync(tried.acquire, True, 20)
        assert lost == []
        await tier.aclose()
    assert world.writers() == []
    assert sum("only read" in record.message for record in caplog.records) == 1
    tier = await world.open(lost=lost.append)
    frozen_ledger("rw")
    await world.eventually(lambda: lost)
    await tier.aclose()
    assert sorted(path.name for path in (world.root / ".kvtier").glob("*-*.lock")) == []
    tier = await world.open()
    assert (await world.put(tier, [2])).statuses == (OK,)


@pytest.mark.parametrize(("number", "evicts"), [(errno.EROFS, False), (errno.EDQUOT, True)])
async def test_powerless_never_evict(world, monkeypatch, number, evicts):
    """Eviction must handle a full root, although no write succeeds there."""
    monkeypatch.setattr(maintenance, "TICK_S", 0.01)
    tier = await world.open()
    await world.put(tier, range(8))
    await tier.aclose()
    limit = await world.bytes_below() // 2

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    requested, ticks = [], threading.Semaphore(0)
    make_room, refresh = Evictor.make_room, Quota.refresh

    def counted(evictor, need, *arguments):
        requested.append(need)
        return make_room(evictor, need, *arguments)

    def ticked(quota):
        ticks.release()
        refresh(quota)

    monkeypatch.setattr(Evictor, "make_room", counted)
    monkeypatch.setattr(Quota, "refresh", ticked)
    monkeypatch.setattr(_namespace, "make_writer_lock", refuse)
    tier = await world.open(max_bytes=limit)
    for _ in range(8):
        assert await anyio.to_thread.run_sync(ticks.acquire, True, 20)
    if evicts:
        await world.eventually(lambda: tier.statistics().evicted_chunks)
    else:
        assert world.session(tier).quota.excess
        assert requested == []


async def test_empty_read_only_is_refused(world, mounted):
    world.root = mounted("size=4m")
    forbid_writing(world.root)
    with pytest.raises(TierError, match=r"mounted0 cannot be used: .*\(erofs\)"):
        await world.open()


async def test_missing_direct_io_is_refused(world, monkeypatch):
    monkeypatch.setattr(os, "O_DIRECT", os.O_DIRECTORY)  # opening a file fails, as without direct I/O
    with pytest.raises(TierError, match="direct_io is 'always'"):
        await world.open(direct_io="always")
    opened = [os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir()]
    assert not [path for path in opened if path.startswith(str(world.root))], "each attempt would keep some"
    tier = await world.open(direct_io="auto")
    assert tier.statistics().direct_io is False


@pytest.fixture
def mount_as(world, monkeypatch, tmp_path):
    """Mount a file system type at the root; None: a type that is not listed."""

    def mount(kind):
        with world.root.parent.joinpath("file").open("w") as file:
            facts = Path(f"/proc/self/fdinfo/{file.fileno()}").read_text()
        number = re.findall(r"mnt_id:\s*(\d+)", facts)[0]
        lines = ["1 0 0:1 / /other rw - ext4 /dev/sda rw\n"]
        # Btrfs has other device numbers in the list than files of its subvolumes.
        lines += [f"{number} 1 0:9999 / /mnt rw shared:1 - {kind} server:/export rw\n"] if kind else []
        mounts = tmp_path / "mountinfo"
        mounts.write_text("".join(lines))
        monkeypatch.setattr(layout, "_MOUNTS", mounts)

    return mount


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "9p", "lustre", "gpfs", "wekafs", "beegfs", "ceph", None])
async def test_no_read_outlives_its_process(world, mount_as, kind):
    """A late answer of a server would overwrite the chunk that has the slot by then."""
    mount_as(kind)
    tier = await world.open(direct_io="auto")
    assert tier.statistics().direct_io is False
    await tier.aclose()
    with pytest.raises(
        TierError, match=f"on {kind or 'an unknown .*'} a direct read may outlive its process"
    ):
        await world.open(direct_io="always")


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "fuse.juicefs"])
async def test_awaited_reads_are_direct(world, mount_as, kind):
    mount_as(kind)
    tier = await world.open(direct_io="always")
    assert tier.statistics().direct_io is True


# -------------------------------------------------------------------------------------- epochs


async def test_concurrent_resets_differ(world, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # a busy disk takes longer than others wait for a reset
    monkeypatch.setattr(_namespace, "_EPOCHS_APART", 1)
    tiers = [await world.open() for _ in range(4)]
    async with anyio.create_task_group() as group:
        for tier in tiers * 3:
            group.start_soon(tier.reset)
    assert len({tier.statistics().epoch for tier in tiers}) == 4
    assert max(tier.statistics().epoch for tier in tiers) == 23


@pytest.mark.parametrize(
    "text", [None, "", "0\n", "1\n\n", "9" * 16 + "\n", "1 00000000\n"]
)  # the fuzzer covers the rest
async def test_lost_epoch_is_never_old(world, text):
    tier = await world.open()
    await tier.reset()
    own = tier.statistics().epoch
    await world.put(tier, [1])
    await tier.aclose()
    file = world.namespace / "epoch"
    file.unlink()
    if text is not None:
        file.write_text(text)
    again = await world.open()
    assert again.statistics().epoch == own + 1
    assert (await world.get(again, [1])).statuses == (ABSENT,)
    await again.aclose()
    assert (await world.open()).statistics().epoch == own + 1


async def test_flipped_epoch_bit_is_refused(world):
    await (await world.open()).aclose()
    file = world.namespace / "epoch"
    sound = file.read_bytes()
    root_fd = os.open(world.root, os.O_RDONLY)
    for bit in range(8 * len(sound)):
        damaged = bytearray(sound)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        assert layout.stored_epoch(root_fd, world.identity.namespace) is None, bytes(damaged)
    os.close(root_fd)


async def test_unstored_reset_hides_all(world):
    tier = await world.open()
    await world.put(tier, [1])
    (world.namespace / "epoch").unlink()
    (world.namespace / "epoch").mkdir()
    with pytest.raises(TierError, match="reset could not be stored"):
        await tier.reset()
    assert (await world.get(tier, [1])).statuses == (ABSENT,)
    assert list(await tier.contains(world.keys([1]))) == [False]
    outcome = await world.put(tier, [1])
    assert (outcome.statuses, dict(outcome.reasons)) == ((REFUSED,), {"reset_failed": 1})
    (world.namespace / "epoch").rmdir()
    await tier.reset()
    assert (await world.put(tier, [1])).statuses == (OK,)


async def test_unstored_reset_survives(world):
    tier = await world.open()
    await world.put(tier, [1])
    for writer in (world.namespace / ".tmp").iterdir():
        if writer.is_dir():
            shutil.rmtree(writer)  # the new number is written there before it gets its name
    with pytest.raises(TierError, match="reset could not be stored"):
        await tier.reset()
    assert (world.namespace / "epoch").read_text().split()[0] == "0"
    await tier.aclose()
    trace = max(layout.epochs_of_users(os.listdir(world.namespace)))  # the next opener's sweep removes it
    again = await world.open()
    assert (await world.get(again, [1])).statuses == (ABSENT,)
    assert again.statistics().epoch == trace + 1 > 1


@pytest.mark.parametrize("removed", ["root", "cache"])
async def test_epoch_of_reset_is_unique(world, removed):
    """Two engines may have different weights; the first does not notice at once that its files are gone."""
    tier = await world.open()
    await tier.reset()
    for path in list(world.root.iterdir()):
        if removed == "root" or path.name.startswith(world.identity.namespace):
            while path.exists():  # the tier's sweep makes and removes files meanwhile
                shutil.rmtree(path, ignore_errors=True)
    other = await world.open()
    await other.reset()
    await world.put(tier, [1])
    await world.put(other, [2])
    assert (await world.get(other, [1])).statuses == (ABSENT,)
    assert (await world.get(tier, [2])).statuses == (ABSENT,)


# -------------------------------------------------------------------------------- other writers


@pytest.mark.parametrize("times", [1, 100])
@pytest.mark.parametrize("is_over", [False, True], ids=["under way", "over"])
async def test_swept_new_writer_retries(world, monkeypatch, times, is_over):
    """Another engine's sweep can lock a new lock file before its creator does."""
    swept: list[int] = []

    def make_and_sweep(root_fd, path):
        fd = make_lock(root_fd, path)
        if len(swept) < times:
            swept.append(os.open(path, os.O_RDWR, dir_fd=root_fd))
            fcntl.flock(swept[-1], fcntl.LOCK_EX)
            os.unlink(path, dir_fd=root_fd)
            if is_over:
                fcntl.flock(swept[-1], fcntl.LOCK_UN)
        return fd

    monkeypatch.setattr(locks, "make_lock", make_and_sweep)
    try:
        if times == 1:
            tier = await world.open()
            assert (await world.put(tier, [1])).statuses == (OK,)
            (writer,) = {name.removesuffix(".lock") for name in world.writers()}
            assert world.writers() == [writer, f"{writer}.lock"]
        else:
            with pytest.raises(TierError, match="eagain"):
                await world.open()
    finally:
        for fd in swept:
            os.close(fd)


async def test_failed_open_leaves_nothing(world):
    tier = await world.open()
    await tier.aclose()
    (world.namespace / "config.json").write_text("{}")
    broken = FsTier(FsConfig(root_dir=world.root))
    with pytest.raises(TierError):
        await broken.open(TierContext("files", world.identity, world.chunk_bytes))
    assert world.writers() == []


def test_foreign_names_are_no_epochs():
    name = "m_0123456789abcdef"
    assert layout.parse_data_dir(f"{name}_r0") == (name, 0)
    assert layout.parse_data_dir(f"{name}_r0.e12") == (name, 12)
    for ending in ("", "_r0.e0", "_r0.e01", "_r1", "_r0.e1x", "_r0.e1234567890123456"):
        assert layout.parse_data_dir(name + ending) is None


@pytest.mark.parametrize("trace", ["epoch", "users.e999999999999999.lock", "data"])
async def test_epochs_are_finite(world, trace):
    """A forged number at the bound: the next epoch would have no name, so old chunks might be served."""
    await (await world.open()).aclose()
    if trace == "data":
        (world.root / f"{world.identity.namespace}_r0.e{10**15 - 1}").mkdir()
    else:
        (world.namespace / trace).write_text(f"{10**15 - 1}\n")
    if trace == "epoch":
        tier = await world.open()
        with pytest.raises(TierError, match="eoverflow"):
            await tier.reset()
        assert (await world.put(tier, [1])).statuses == (REFUSED,)
        return
    with pytest.raises(TierError, match="no epoch can follow 999999999999999"):
        await world.open()
