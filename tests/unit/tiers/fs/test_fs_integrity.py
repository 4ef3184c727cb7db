"""Files with other bytes than the put's: never returned, quarantined, counted, reported once."""

from __future__ import annotations

import logging
import os
import shutil

import anyio
import pytest

from kvtier import _reasons as reasons
from kvtier.tiers import Status
from kvtier.tiers.fs import FsTier
from kvtier.tiers.fs import _layout as layout
from kvtier.tiers.fs._files.native_call import Result
from kvtier.tiers.fs._maintenance.quarantine import Quarantine

pytestmark = pytest.mark.timeout(60)
OK, ABSENT, CORRUPT = Status.OK, Status.ABSENT, Status.CORRUPT


@pytest.fixture
def place(tmp_path):
    """On a disk, for direct I/O."""
    return tmp_path


def flip(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def _truncate(path, length):
    with path.open("r+b") as file:
        file.truncate(length)


# Ways to damage the file of chunk 1, which holds this many bytes, with the expected reason. More are in the
# fuzzer's corpus.
DAMAGES = {
    "first byte": (lambda world, file, size: flip(file, 0), "checksum"),
    "trailer's key": (lambda world, file, size: flip(file, size + 45), "torn"),
    "cut in the bytes": (lambda world, file, size: _truncate(file, size // 2 + 17), "torn"),
    "another key's": (lambda world, file, size: shutil.copy(world.file(2), file), "foreign"),
}


@pytest.mark.parametrize("name", DAMAGES)
async def test_damaged_file_is_quarantined(world, caplog, name):
    tier = await world.open()
    await world.put(tier, [1, 2])
    damage, reason = DAMAGES[name]
    damage(world, world.file(1), world.chunk_bytes)
    damaged = world.file(1).read_bytes()
    caplog.clear()
    outcome = await world.get(tier, [1, 2])
    assert outcome.statuses == (CORRUPT, OK)
    assert dict(outcome.reasons) == {reason: 1}
    assert (await world.get(tier, [1])).statuses == (ABSENT,)
    (aside,) = world.quarantined()
    assert f".{reason}." in aside
    assert (world.namespace / "quarantine" / aside).read_bytes() == damaged
    assert tier.statistics().quarantined == {reason: 1}
    told = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(told) == 1
    assert reason in told[0].message
    assert (await world.put(tier, [1])).statuses == (OK,)
    assert (await world.get(tier, [1])).statuses == (OK,)


@pytest.mark.parametrize("length", [0, 100, 16_384], ids=["empty", "cut", "without its trailer"])
async def test_short_file_is_rewritten(world, length):
    tier = await world.open()
    await world.put(tier, [1])
    _truncate(world.file(1), length)
    assert (await world.put(tier, [1])).statuses == (OK,)
    assert (await world.get(tier, [1])).statuses == (OK,)
    assert len(world.quarantined()) == 1


def fs_lines(caplog):
    return [record.message for record in caplog.records if record.name == "kvtier.tiers.fs"]


async def test_non_files_are_left(world, caplog):
    tier = await world.open()
    await world.put(tier, range(150))
    for _ in range(2):
        for number in range(150):
            world.file(number).unlink()
            if number % 2:
                world.file(number).mkdir()
                (world.file(number) / "inside").touch()
            else:
                os.mkfifo(world.file(number))
        assert (await world.put(tier, range(150))).statuses == (OK,) * 150
        assert len(world.quarantined()) == 128
    assert (await world.get(tier, range(150))).statuses == (OK,) * 150
    assert len(fs_lines(caplog)) <= 4


async def test_full_quarantine_moves_nothing(world, caplog):
    tier = await world.open()
    (world.namespace / "quarantine").mkdir()
    for number in range(128):
        (world.namespace / "quarantine" / f"notes {number}").touch()
    await world.put(tier, range(20))
    for number in range(20):
        flip(world.file(number), 9)
    for _ in range(3):
        assert (await world.get(tier, range(20))).statuses == (CORRUPT,) * 20
    assert len(world.quarantined()) == 128
    assert all(name.startswith("notes") for name in world.quarantined())
    assert all(world.file(number).exists() for number in range(20))
    assert tier.statistics().quarantined == {}
    assert len(fs_lines(caplog)) == 1
    assert any("full" in line and "not kvtier's" in line for line in fs_lines(caplog))


async def test_replaced_file_stays(world):
    """A reader found a bad file; another engine puts a good one before the reader can move it."""
    tier = await world.open()
    await world.put(tier, [1])
    root_fd = os.open(world.root, os.O_RDONLY)
    try:
        found = f"{world.identity.namespace}_r0", world.key(1), Result.CHECKSUM
        inode = world.file(1).stat().st_ino
        quarantine = Quarantine(root_fd, world.identity.namespace)
        flip(world.file(1), 9)
        await anyio.to_thread.run_sync(quarantine.add, *found, inode + 1)
        assert world.file(1).exists()
        assert quarantine.counts() == {}
        await anyio.to_thread.run_sync(quarantine.add, *found, inode)
        assert not world.file(1).exists()
        assert quarantine.counts() == {"checksum": 1}
    finally:
        os.close(root_fd)


async def test_moves_are_rationed(world, caplog):
    tier = await world.open()
    await world.put(tier, range(150))
    for number in range(150):
        flip(world.file(number), 9)
    assert (await world.get(tier, range(150))).statuses == (CORRUPT,) * 150
    assert len(world.quarantined()) == 128
    assert sum(world.file(number).exists() for number in range(150)) == 22
    assert any("in an hour" in line for line in fs_lines(caplog))


async def test_damaged_epoch_read_keeps_cache(world, monkeypatch):
    tier = await world.open()
    await world.put(tier, range(4))
    await tier.aclose()
    pread, damaged = os.pread, [1]

    def read(fd, *arguments):
        found = pread(fd, *arguments)
        is_epoch = found == layout.epoch_file(0).encode()
        return bytes(len(found)) if is_epoch and damaged and damaged.pop() else found

    monkeypatch.setattr(os, "pread", read)
    tier = await world.open()
    assert damaged == []
    assert (await world.get(tier, range(4))).statuses == (OK,) * 4


async def test_quarantined_file_is_reported(world):
    removed: list[bytes] = []
    tier = await world.open(removed=removed.extend)
    await world.put(tier, [1, 2])
    _truncate(world.file(1), 0)
    await world.get(tier, [1, 2, 3])
    assert removed == [world.key(1)]


def test_reasons_are_declared():
    told = {result.name.lower() for result in Result} - {"ok", "exists", "absent"}
    assert told <= FsTier.reasons.keys() | reasons.TRANSFER.keys()
