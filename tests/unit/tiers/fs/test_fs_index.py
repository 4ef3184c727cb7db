"""The index: lookups without I/O, recovery, and stale entries."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import threading
from array import array

import anyio
import pytest

from kvtier.keys import pack_key
from kvtier.tiers import Knowledge, Status
from kvtier.tiers.fs._files import chunk_files
from kvtier.tiers.fs._files.index import Index
from tests.unit.tiers.fs.library import patch_library

pytestmark = pytest.mark.timeout(60)
PRESENT, UNKNOWN = Knowledge.PRESENT, Knowledge.UNKNOWN


def fingerprint(key):
    function = chunk_files.require_library().kvt_fingerprint
    function.restype, function.argtypes = ctypes.c_uint64, (ctypes.c_char_p, ctypes.c_size_t)
    return function(key, len(key))


def test_fingerprints_differ():
    chosen = random.Random(2)
    keys = {pack_key(chosen.randbytes(32), group) for _ in range(3000) for group in (0, 1, 7)}
    keys |= {pack_key(number.to_bytes(32, order)) for number in range(1, 3000) for order in ("big", "little")}
    assert len({fingerprint(key) for key in keys}) == len(keys)


def add(index, keys):
    index.add_listed(array("Q", map(fingerprint, keys)))


@pytest.fixture
def index():
    return Index()


def test_index_is_a_set(index):
    chosen = random.Random(5)
    keys = [pack_key(chosen.randbytes(8 + number % 57), chosen.getrandbits(32)) for number in range(30_000)]
    keys.append(pack_key(bytes(8)))  # a fingerprint of 0
    keys += [pack_key(b"\xff" * length, 2**32 - 1) for length in (8, 9, 16, 64)]
    truth: set[int] = set()
    for _ in range(60):  # tables grow, and have long runs of marks with holes in them
        some = chosen.sample(range(len(keys)), 1500)
        if chosen.random() < 0.6:
            add(index, [keys[number] for number in some])
            truth.update(some)
        else:
            index.discard([keys[number] for number in some])
            truth.difference_update(some)
    assert list(index.known(keys)) == [number in truth for number in range(len(keys))]
    assert len(index) == len(truth)


async def put_before(world, numbers):
    tier = await world.open()
    await world.put(tier, numbers)
    await tier.aclose()


async def entered(gate):
    await anyio.to_thread.run_sync(gate.entered.acquire)


async def test_unlisted_asks_disk(world, gate, monkeypatch):
    await put_before(world, range(4))
    patch_library(monkeypatch, gate, "kvt_chunks_list")
    tier = await world.open()
    await entered(gate)
    assert list(tier.known(world.keys([1]))) == [UNKNOWN]
    assert list(await tier.contains(world.keys([1, 9]))) == [True, False]
    assert list(tier.known(world.keys([1, 9]))) == [PRESENT, UNKNOWN]
    assert (await world.get(tier, range(4))).statuses == (Status.OK,) * 4


async def test_removal_during_list_counts(world, gate, monkeypatch):
    await put_before(world, range(4))
    listed, real = threading.Event(), chunk_files.fingerprints

    def list_and_wait(place, part, stop):
        marks = real(place, part, stop)
        if marks:
            listed.set()
            gate()
        return marks

    monkeypatch.setattr(chunk_files, "fingerprints", list_and_wait)
    tier = await world.open()
    await anyio.to_thread.run_sync(listed.wait, 20)
    await tier.discard(world.keys(range(4)))
    gate.open()
    await world.until_listed(tier)
    assert list(tier.known(world.keys(range(4)))) == [UNKNOWN] * 4


async def test_put_before_reset_is_unknown(world, gate, monkeypatch):
    patch_library(monkeypatch, gate, "kvt_files_put")
    tier = await world.open()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.put, tier, range(4))
        await entered(gate)
        await tier.reset()
        gate.open()
    assert list(tier.known(world.keys(range(4)))) == [UNKNOWN] * 4


async def test_old_epoch_is_not_the_new(world, gate, monkeypatch):
    await put_before(world, range(4))
    patch_library(monkeypatch, gate, "kvt_chunks_list")
    tier = await world.open()
    await entered(gate)
    old = world.session(tier).epoch
    await tier.reset()
    gate.open()  # only now is the old one listed
    await world.until_listed(tier)
    assert old.listed == 4
    assert list(tier.known(world.keys(range(4)))) == [UNKNOWN] * 4


async def test_damaged_list_is_no_error(world):
    await put_before(world, range(20))
    shutil.rmtree(world.file(3).parent)
    world.file(3).parent.write_bytes(b"a file where a directory was")
    (world.file(4).parent / "not-a-chunk").touch()
    os.symlink("/etc", world.file(5).parent.parent / "ab_g0")
    tier = await world.open()
    await world.eventually(lambda: tier.statistics().known_chunks == 19)
    assert list(tier.known(world.keys([3, 4]))) == [UNKNOWN, PRESENT]


async def test_unlistable_hides_no_others(world, caplog):
    tier = await world.open(max_bytes=2**50)
    await world.put(tier, range(20))
    await tier.aclose()
    part = world.file(1).parents[1]
    shutil.rmtree(part)
    part.touch()
    there = sum(world.file(number).exists() for number in range(20) if world.file(number).parents[1] != part)
    tier = await world.open(max_bytes=2**50)
    await world.until_listed(tier)
    assert tier.statistics().known_chunks == there >= 10
    await world.eventually(lambda: "1 directories cannot be read (enotdir)" in caplog.text)
    assert "Traceback" not in caplog.text
