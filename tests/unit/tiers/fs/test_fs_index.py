"""The index: what is known without asking, how it is found again, and that it may be wrong."""

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
from kvtier.tiers._base import Knowledge, Status
from kvtier.tiers.fs._files import require_library
from kvtier.tiers.fs._files.call import FileCall, Result
from kvtier.tiers.fs._files.index import Index
from tests.unit.tiers.fs.library import files_with

pytestmark = pytest.mark.timeout(60)
PRESENT, UNKNOWN = Knowledge.PRESENT, Knowledge.UNKNOWN


def fingerprint(key):
    function = require_library().kvt_fingerprint
    function.restype, function.argtypes = ctypes.c_uint64, (ctypes.c_char_p, ctypes.c_size_t)
    return function(key, len(key))


def test_keys_that_differ_in_hash_or_group_have_other_fingerprints():
    chosen = random.Random(2)
    keys = {pack_key(chosen.randbytes(32), group) for _ in range(3000) for group in (0, 1, 7)}
    keys |= {pack_key(number.to_bytes(32, order)) for number in range(1, 3000) for order in ("big", "little")}
    assert len({fingerprint(key) for key in keys}) == len(keys)


@pytest.fixture
def index():
    return Index()


def test_the_index_is_a_set_whatever_comes_and_goes(index):
    chosen = random.Random(5)
    keys = [pack_key(chosen.randbytes(8 + number % 57), number % 3) for number in range(30_000)]
    truth: set[int] = set()
    for _ in range(60):  # tables grow, and have long runs of marks with holes in them
        some = chosen.sample(range(len(keys)), 1500)
        if chosen.random() < 0.6:
            index.add([keys[number] for number in some])
            truth.update(some)
        else:
            index.discard([keys[number] for number in some])
            truth.difference_update(some)
    assert list(index.known(keys)) == [number in truth for number in range(len(keys))]
    assert len(index) == len(truth)


def test_what_was_listed_is_known_by_its_key(index):
    chosen = random.Random(6)
    keys = [pack_key(chosen.randbytes(1 + number % 64), chosen.getrandbits(32)) for number in range(500)]
    keys += [pack_key(bytes(length)) for length in (1, 8, 32)]  # a fingerprint of 0
    keys += [pack_key(b"\xff" * length, 2**32 - 1) for length in (8, 9, 16, 64)]
    index.add_listed(array("Q", map(fingerprint, keys[::2])))
    assert list(index.known(keys[::2])) == [1] * len(keys[::2])
    index.discard(keys)
    assert len(index) == 0
    assert list(index.known([])) == []


def test_threads_that_note_at_once_lose_nothing(index):
    chosen = random.Random(7)
    keys = [[pack_key(chosen.randbytes(32))] for _ in range(20_000)]
    threads = [
        threading.Thread(target=lambda mine=keys[which::4]: [index.add(one) for one in mine])
        for which in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(index) == len(keys)
    assert all(index.known([key for (key,) in keys]))


@pytest.fixture
def unlistable(gate):
    """Work on files whose lists do not come before the gate opens."""
    return files_with(gate, "kvt_chunks_list")


async def put_before(world, numbers):
    tier = await world.open()
    await world.put(tier, numbers)
    await tier.aclose()


async def entered(gate):
    await anyio.to_thread.run_sync(gate.entered.acquire)


async def test_until_it_is_listed_the_disk_is_asked(world, gate, unlistable):
    await put_before(world, range(4))
    tier = await world.open(unlistable)
    await entered(gate)
    assert list(tier.known(world.keys([1]))) == [UNKNOWN]
    assert list(await tier.contains(world.keys([1, 9]))) == [True, False]
    assert list(tier.known(world.keys([1, 9]))) == [PRESENT, UNKNOWN]
    assert (await world.get(tier, range(4))).statuses == (Status.OK,) * 4


async def test_what_leaves_while_it_is_listed_is_not_known_afterwards(world, gate):
    await put_before(world, range(4))
    files, listed = files_with(lambda: None), threading.Event()
    real = files.fingerprints

    def list_and_wait(place, part, stop):
        marks = real(place, part, stop)
        if marks:
            listed.set()
            gate()
        return marks

    files.fingerprints = list_and_wait
    tier = await world.open(files)
    await anyio.to_thread.run_sync(listed.wait, 20)
    await tier.discard(world.keys(range(4)))
    gate.open()
    await world.eventually(lambda: tier._session.maintenance.is_listed)
    assert list(tier.known(world.keys(range(4)))) == [UNKNOWN] * 4


async def test_nothing_of_an_old_epoch_is_known(world):
    tier = await world.open()
    await world.put(tier, range(4))
    call = FileCall(tier._session.epoch.place, world.keys(range(4)))
    await tier.reset()
    assert list(tier.known(call.keys)) == [UNKNOWN] * 4
    assert set(call.results) == {Result.OK}
    tier._session.maintenance.learn(call)  # a put of before the reset that ends now
    assert list(tier.known(call.keys)) == [UNKNOWN] * 4


async def test_an_old_epoch_that_is_listed_late_is_not_taken_for_the_new_one(world, gate, unlistable):
    await put_before(world, range(4))
    tier = await world.open(unlistable)
    await entered(gate)
    old = tier._session.maintenance._known
    await tier.reset()
    gate.open()  # only now is the old one listed
    await world.eventually(lambda: tier._session.maintenance.is_listed)
    assert old.listed == 4
    assert list(tier.known(world.keys(range(4)))) == [UNKNOWN] * 4


async def test_a_damaged_or_missing_directory_of_the_list_is_no_error(world):
    await put_before(world, range(20))
    shutil.rmtree(world.file(3).parent)
    world.file(3).parent.write_bytes(b"a file where a directory was")
    (world.file(4).parent / "not-a-chunk").touch()
    os.symlink("/etc", world.file(5).parent.parent / "ab_g0")
    tier = await world.open()
    await world.eventually(lambda: tier.statistics().known_chunks == 19)
    assert list(tier.known(world.keys([3, 4]))) == [UNKNOWN, PRESENT]
