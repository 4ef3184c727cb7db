"""Putting, getting, looking up and discarding files."""

from __future__ import annotations

import os
import threading

import anyio
import pytest

from kvtier import HeapMemory
from kvtier import _native as native
from kvtier.errors import StateError, TierError
from kvtier.keys import pack_key
from kvtier.tiers import Batch, Knowledge, Status, TierContext
from kvtier.tiers import _registry as registry
from kvtier.tiers.fs import FsConfig, FsTier

pytestmark = pytest.mark.timeout(60)
OK, ABSENT, REFUSED, FAILED = Status.OK, Status.ABSENT, Status.REFUSED, Status.FAILED


@pytest.fixture
def place(tmp_path):
    """On a disk, for direct I/O."""
    return tmp_path


@pytest.mark.parametrize("chunk_bytes", [4096, 3 * 4096, 2 * 2**20])
@pytest.mark.parametrize("direct_io", ["auto", "never"])
async def test_what_is_put_is_got(world, chunk_bytes, direct_io):
    world.chunk_bytes = chunk_bytes
    tier = await world.open(direct_io=direct_io)
    assert (await world.put(tier, range(6))).statuses == (OK,) * 6
    batch = world.to_get(range(6))
    outcome = await tier.get(batch)
    assert (outcome.statuses, dict(outcome.reasons)) == ((OK,) * 6, {})
    assert world.got(batch) == [world.content(number) for number in range(6)]


async def test_short_hashes_have_files(world):
    tier = await world.open()
    keys = [pack_key(b"\xab"), pack_key(b"\xab\xcd", 2**32 - 1)]
    memory = HeapMemory(2, world.chunk_bytes)
    assert (await tier.put(Batch(keys, range(2), memory))).statuses == (OK,) * 2
    folder = world.root / f"{world.identity.namespace}_r0"
    assert (folder / "ab0" / "00_g0" / "ab.bin").exists()
    assert (folder / "abc" / "d0_g4294967295" / "abcd.bin").exists()


async def test_index_never_denies(world):
    tier, other = await world.open(), await world.open()
    await world.put(tier, [1, 2, 3])
    unknown, present = Knowledge.UNKNOWN, Knowledge.PRESENT
    assert list(tier.known(world.keys([1, 2, 3, 4]))) == [present] * 3 + [unknown]
    await world.get(other, [1, 4])
    await other.contains(world.keys([2]))
    assert list(other.known(world.keys([1, 2, 4]))) == [present, present, unknown]
    await other.discard(world.keys([1]))
    assert list(other.known(world.keys([1]))) == [unknown]
    assert (await world.get(tier, [1])).statuses == (ABSENT,)
    assert list(tier.known(world.keys([1]))) == [unknown]


async def test_other_shape_is_refused(world):
    tier = await world.open()
    with pytest.raises(ValueError, match="8192 bytes"):
        await tier.put(Batch(world.keys([1]), [0], HeapMemory(1, 8192)))


@pytest.mark.parametrize("chunk_bytes", [0, 4095, 5000])
async def test_partial_blocks_are_refused(tmp_path, world, chunk_bytes):
    tier = FsTier(FsConfig(root_dir=tmp_path))
    with pytest.raises(TierError, match=f"chunk_bytes is {chunk_bytes}"):
        await tier.open(TierContext("files", world.identity, chunk_bytes))


def test_missing_library_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "library", None)
    monkeypatch.setattr(native, "missing_because", "there is none")
    monkeypatch.delenv("KVTIER_NATIVE", raising=False)  # a library under a sanitizer
    with pytest.raises(TierError, match=r"not loaded \(there is none\): install .* kvtier._native.build"):
        registry.validate({"type": "fs", "root_dir": str(tmp_path)})


async def test_closed_tier_says_so(tmp_path, world):
    with pytest.raises(StateError, match="not open"):
        FsTier(FsConfig(root_dir=tmp_path)).statistics()


async def test_hung_disk_reports_usage(world, monkeypatch):
    tier = await world.open(max_bytes=1 << 20)
    await world.put(tier, [1, 2, 3])
    asked, answered = threading.Event(), threading.Event()

    def hang(fd):
        asked.set()
        answered.wait(20)
        return real(fd)

    real = os.fstatvfs
    monkeypatch.setattr(os, "fstatvfs", hang)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.put, tier, [4])
        await anyio.to_thread.run_sync(asked.wait, 20)
        usage = tier.usage()
        answered.set()
    assert usage.capacity_bytes == 1 << 20
    assert 3 * world.chunk_bytes < usage.used_bytes <= tier.statistics().used_bytes
