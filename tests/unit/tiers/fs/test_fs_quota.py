"""A file system quota that statvfs does not show: chunks make room for new ones, and the log names it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvtier import Identity
from kvtier.errors import TierError
from kvtier.tiers import Status
from kvtier.tiers.fs._maintenance import maintenance
from kvtier.tiers.fs._namespace import OpenNamespace
from tests.unit.tiers.fs.conftest import World
from tests.unit.tiers.fs.disks import Disk

pytestmark = pytest.mark.timeout(120)
OK = Status.OK
QUOTA_BYTES = 12 * 2**20
CHUNKS = 288  # some 19 MiB


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory with a quota, on a real btrfs."""
    disk = Disk(tmp_path, "btrfs")
    yield disk.limited(QUOTA_BYTES)
    disk.close()


async def fill(world: World, tier, numbers) -> list[int]:
    """Put chunks in batches of 16. Return the statuses."""
    statuses: list[int] = []
    for first in range(0, len(numbers), 16):
        statuses += (await world.put(tier, numbers[first : first + 16])).statuses
    return statuses


async def test_hidden_quota_named_once(world, caplog):
    world.chunk_bytes = 65_536
    tier = await world.open(max_bytes=2**50, deadline_s=60)
    statuses = await fill(world, tier, range(CHUNKS))
    assert statuses == [OK] * CHUNKS
    assert (await world.get(tier, range(CHUNKS - 64, CHUNKS))).statuses == (OK,) * 64
    assert tier.statistics().limit_bytes <= QUOTA_BYTES
    lines = [record.message for record in caplog.records if "quota" in record.message]
    assert len(lines) == 1
    assert "edquot" in lines[0]


async def test_roomless_reset_lowers_limit(world, monkeypatch):
    tier = await world.open(max_bytes=2**50)
    await world.put(tier, range(16))

    def refuse(*_):
        raise OSError(errno.EDQUOT, "the quota is used up")

    with monkeypatch.context() as patch:
        patch.setattr(OpenNamespace, "_write_small", refuse)
        with pytest.raises(TierError, match="edquot"):
            await tier.reset()
    assert tier.statistics().limit_bytes <= 2**20
    await world.eventually(lambda: tier.statistics().evicted_bytes > 0)
    await tier.reset()


async def test_full_quota_opener_makes_room(world, monkeypatch):
    """The engine that filled it is gone, and the new model has no directory yet."""
    monkeypatch.setattr(maintenance, "TICK_S", 0.05)
    world.chunk_bytes = 65_536
    tier = await world.open(max_bytes=2**50, eviction="none")
    assert Status.REFUSED in await fill(world, tier, range(CHUNKS))
    await tier.aclose()
    with (world.root.parent / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    other = World(world.root)
    other.chunk_bytes, other.identity = world.chunk_bytes, Identity.make("org/Other", {"dtype": "int8"})
    tier = await other.open(max_bytes=2**50, deadline_s=60)
    assert await fill(other, tier, range(64)) == [OK] * 64
    await other.close_all()
