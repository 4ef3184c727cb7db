"""Real disks that lose power under a tier, with every durability.

The kernel itself takes the disk away: the ioctl that file system testers use shuts down a file system in
an image. Unflushed data is lost and later calls fail. The image, mounted again, has the contents that a
power cut would have left.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from kvtier.tiers import Status
from kvtier.tiers.fs import FsTier
from kvtier.tiers.fs._maintenance import maintenance
from tests.unit.tiers.fs.disks import Disk

pytestmark = pytest.mark.timeout(60)
OK, ABSENT, REFUSED, FAILED, CORRUPT = (
    Status.OK,
    Status.ABSENT,
    Status.REFUSED,
    Status.FAILED,
    Status.CORRUPT,
)
LOST = {"eio", "erofs"}  # errors of file systems that were shut down
MAX_CHUNKS = 5000  # chunks: more than fit before a busy machine takes the disk away, fewer than fill it


@pytest.fixture
def disk(tmp_path: Path, kind: str) -> Iterator[Disk]:
    """A disk; the test is skipped if none can be mounted."""
    made = Disk(tmp_path, kind)
    yield made
    made.close()


async def put_until_it_fails(world, tier: FsTier, numbers: list[int], kept: set[int]) -> Counter[str]:
    """Put chunks, a few at a time; record the stored ones in ``kept``. Return the reasons of failures."""
    reasons: Counter[str] = Counter()
    while numbers and not reasons:
        some, numbers[:] = numbers[:4], numbers[4:]
        outcome = await world.put(tier, some)
        assert set(outcome.statuses) <= {OK, FAILED}
        kept.update(number for number, status in zip(some, outcome.statuses, strict=True) if status == OK)
        reasons.update(outcome.reasons)
    return reasons


@pytest.mark.parametrize(
    ("kind", "durability"), [("ext4", "none"), ("ext4", "data"), ("ext4", "full"), ("xfs", "full")]
)
async def test_power_cut_keeps_durability(world, disk, monkeypatch, durability):
    monkeypatch.setattr(maintenance, "TICK_S", 0.01)
    world.root = disk.point / "root"
    settings = {"durability": durability, "max_bytes": 10**9, "recount_s": 0.05}
    tier = await world.open(**settings)
    numbers, reasons = list(range(MAX_CHUNKS)), []
    kept: set[int] = set()
    enough = random.Random().randrange(8, 160)

    async def put():
        reasons.append(await put_until_it_fails(world, tier, numbers, kept))

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(put)
        while len(kept) < enough:
            await anyio.lowlevel.checkpoint()
        promised = sorted(kept)  # a flush that the shutdown overtakes may report success
        disk.lose_power()  # not in a thread: everything could be finished before it starts
    begun = MAX_CHUNKS - len(numbers)
    assert numbers, "the disk was lost when all was done"
    assert all(set(found) <= LOST and found for found in reasons), reasons  # each writer gets the reason
    gone = await world.get(tier, range(begun))
    assert set(gone.statuses) <= {OK, ABSENT, FAILED}
    assert set(gone.reasons) <= LOST
    await tier.aclose()
    disk.unmount()

    disk.mount()
    tier = await world.open(**settings)
    statuses = (await world.get(tier, range(begun))).statuses  # it checks the bytes
    assert set(statuses) <= ({OK, ABSENT, CORRUPT} if durability == "none" else {OK, ABSENT})
    quarantined = await anyio.to_thread.run_sync(world.quarantined)
    assert len(quarantined) == statuses.count(CORRUPT)
    if durability == "full":
        assert [number for number in promised if statuses[number] != OK] == []
    assert set((await world.put(tier, range(begun))).statuses) == {OK}
    assert set((await world.get(tier, range(begun))).statuses) == {OK}
    await tier.aclose()
