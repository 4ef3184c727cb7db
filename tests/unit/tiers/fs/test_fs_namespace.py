"""Opening: identity, roots that are no good, epochs, and what others left behind."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from pathlib import Path

import anyio
import pytest

from kvtier.errors import TierError
from kvtier.tiers._base import Status, TierContext
from kvtier.tiers.fs import FsConfig, FsTier
from kvtier.tiers.fs import _layout as layout
from kvtier.tiers.fs import _locks as locks
from kvtier.tiers.fs._locks import make_lock

pytestmark = pytest.mark.timeout(60)
OK, ABSENT, REFUSED = Status.OK, Status.ABSENT, Status.REFUSED


# ------------------------------------------------------------------------------------- identity


async def test_another_identity_in_the_same_place_is_refused_in_words(world):
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


async def test_a_root_below_a_file_is_refused_with_path_and_errno(world, tmp_path):
    (tmp_path / "file").touch()
    world.root = tmp_path / "file" / "root"
    with pytest.raises(TierError, match=r"tier files: .*file/root cannot be used: .*\(enotdir\)"):
        await world.open()


def forbid_writing(point):
    subprocess.run(["mount", "-o", "remount,ro", str(point)], check=True)


async def test_a_root_that_can_only_be_read_is_read(world, mounted, caplog):
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


async def test_an_empty_root_that_can_only_be_read_is_refused(world, mounted):
    world.root = mounted("size=4m")
    forbid_writing(world.root)
    with pytest.raises(TierError, match=r"mounted0 cannot be used: .*\(erofs\)"):
        await world.open()


async def test_direct_io_always_is_refused_where_there_is_none(world, monkeypatch):
    monkeypatch.delattr(os, "O_DIRECT")
    with pytest.raises(TierError, match="direct_io is 'always'"):
        await world.open(direct_io="always")
    opened = [os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir()]
    assert not [path for path in opened if path.startswith(str(world.root))], "each attempt would keep some"
    tier = await world.open(direct_io="auto")
    assert tier.statistics().direct_io is False


# -------------------------------------------------------------------------------------- epochs


async def test_resets_at_once_have_epochs_of_their_own(world, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # a busy disk takes longer than others wait for a reset
    tiers = [await world.open() for _ in range(4)]
    async with anyio.create_task_group() as group:
        for tier in tiers * 3:
            group.start_soon(tier.reset)
    assert len({tier.statistics().epoch for tier in tiers}) == 4
    assert max(tier.statistics().epoch for tier in tiers) == 23


@pytest.mark.parametrize("text", [None, "", "0\n", "1\n\n", "9" * 16 + "\n"])  # the rest is fuzzed
async def test_a_lost_epoch_is_never_an_old_one(world, text):
    tier = await world.open()
    await tier.reset()
    await world.put(tier, [1])
    await tier.aclose()
    file = world.namespace / "epoch"
    file.unlink()
    if text is not None:
        file.write_text(text)
    again = await world.open()
    assert again.statistics().epoch == 2
    assert (await world.get(again, [1])).statuses == (ABSENT,)
    await again.aclose()
    assert (await world.open()).statistics().epoch == 2


async def test_a_reset_that_cannot_be_stored_leaves_nothing_visible(world):
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


async def test_a_reset_that_cannot_be_stored_holds_after_opening_again_too(world):
    tier = await world.open()
    await world.put(tier, [1])
    for writer in (world.namespace / ".tmp").iterdir():
        if writer.is_dir():
            shutil.rmtree(writer)  # the new number is written there before it gets its name
    with pytest.raises(TierError, match="reset could not be stored"):
        await tier.reset()
    assert (world.namespace / "epoch").read_text() == "0\n"
    await tier.aclose()
    again = await world.open()
    assert (await world.get(again, [1])).statuses == (ABSENT,)
    assert again.statistics().epoch == 2


# -------------------------------------------------------------------------------- other writers


@pytest.mark.parametrize("times", [1, 100])
@pytest.mark.parametrize("is_over", [False, True], ids=["under way", "over"])
async def test_a_new_writer_that_a_sweep_takes_for_a_dead_one_tries_again(world, monkeypatch, times, is_over):
    """Between the making of its lock file and the locking another engine's sweep can get the lock."""
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


async def test_an_open_that_fails_leaves_no_thread_and_no_writer(world):
    tier = await world.open()
    await tier.aclose()
    (world.namespace / "config.json").write_text("{}")
    broken = FsTier(FsConfig(root_dir=world.root))
    with pytest.raises(TierError):
        await broken.open(TierContext("files", world.identity, world.chunk_bytes))
    assert world.writers() == []


def test_directory_names_of_other_namespaces_are_not_taken_for_epochs():
    name = "m_0123456789abcdef"
    assert layout.parse_data_dir(f"{name}_r0") == (name, 0)
    assert layout.parse_data_dir(f"{name}_r0.e12") == (name, 12)
    for ending in ("", "_r0.e0", "_r0.e01", "_r1", "_r0.e1x", "_r0.e1234567890123456"):
        assert layout.parse_data_dir(name + ending) is None


@pytest.mark.parametrize("trace", ["epoch", "users.e999999999999999.lock", "data"])
async def test_behind_the_last_epoch_a_reset_or_an_opening_is_refused_by_name(world, trace):
    """A forged number at the bound: what follows it would have no name, and so old chunks might be given."""
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
