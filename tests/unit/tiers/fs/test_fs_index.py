"""The index: what is known without asking, how it is found again, and that it may be wrong."""

from __future__ import annotations

import os
import random
import shutil
import threading
from array import array

import anyio
import pytest

from kvtier import _native as native
from kvtier.keys import pack_key
from kvtier.tiers._base import Knowledge, Status
from kvtier.tiers.fs._files.index import Index, NativeIndex, fingerprint

pytestmark = pytest.mark.timeout(60)
PRESENT, UNKNOWN = Knowledge.PRESENT, Knowledge.UNKNOWN


def test_keys_that_differ_in_hash_or_group_have_other_fingerprints():
    chosen = random.Random(2)
    keys = {pack_key(chosen.randbytes(32), group) for _ in range(3000) for group in (0, 1, 7)}
    keys |= {pack_key(number.to_bytes(32, order)) for number in range(1, 3000) for order in ("big", "little")}
    assert len({fingerprint(key) for key in keys}) == len(keys)


@pytest.fixture(params=["native", "python"])
def index(request) -> Index:
    if request.param == "python":
        return Index()
    if native.library is None:
        pytest.skip("the native helper is not built")
    return NativeIndex(native.library)


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


class Unlistable:
    """Work on files whose lists do not come before they may, or not at all."""

    def __init__(self, inner):
        self.inner = inner
        self.may = threading.Event()
        self.asked = threading.Event()
        self.fails = False

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def fingerprints(self, place, part, stop):
        self.asked.set()
        self.may.wait()
        if self.fails:
            raise OSError("no list today")
        return self.inner.fingerprints(place, part, stop)


@pytest.fixture
def unlistable(world):
    made = Unlistable(world.work)
    yield made
    made.may.set()


async def test_until_it_is_listed_the_disk_is_asked(world, unlistable):
    tier = await world.open()
    await world.put(tier, range(4))
    await tier.aclose()
    tier = await world.open(unlistable)
    await anyio.to_thread.run_sync(unlistable.asked.wait, 20)
    assert list(tier.known(world.keys([1]))) == [UNKNOWN]
    assert list(await tier.contains(world.keys([1, 9]))) == [True, False]
    assert list(tier.known(world.keys([1, 9]))) == [PRESENT, UNKNOWN]
    assert (await world.get(tier, range(4))).statuses == (Status.OK,) * 4


async def test_what_leaves_while_it_is_listed_is_not_known_afterwards(world, unlistable):
    tier = await world.open()
    await world.put(tier, range(4))
    await tier.aclose()
    real, listed = world.work.fingerprints, threading.Event()

    def list_and_wait(place, part, stop):
        marks = real(place, part, stop)
        if marks:
            listed.set()
            unlistable.may.wait()
        return marks

    unlistable.fingerprints = list_and_wait
    tier = await world.open(unlistable)
    await anyio.to_thread.run_sync(listed.wait, 20)
    await tier.discard(world.keys(range(4)))
    unlistable.may.set()
    await world.eventually(lambda: tier._maintenance._watched.listed >= 0)
    assert list(tier.known(world.keys(range(4)))) == [UNKNOWN] * 4


async def test_nothing_of_an_old_epoch_is_known(world):
    tier = await world.open()
    await world.put(tier, range(4))
    place = tier._maintenance._watched.place
    await tier.reset()
    assert list(tier.known(world.keys(range(4)))) == [UNKNOWN] * 4
    tier._maintenance.learn(place, world.keys(range(4)))  # a put of before the reset that ends now
    assert list(tier.known(world.keys(range(4)))) == [UNKNOWN] * 4


async def test_an_old_epoch_that_is_listed_late_is_not_taken_for_the_new_one(world, unlistable):
    before = await world.open()
    await world.put(before, range(4))
    await before.aclose()
    tier = await world.open(unlistable)
    assert await anyio.to_thread.run_sync(unlistable.asked.wait, 20)
    old = tier._maintenance._watched
    await tier.reset()
    unlistable.may.set()  # only now is the old one listed
    await world.eventually(lambda: tier._maintenance._watched.listed >= 0)
    assert old.listed == 4
    assert list(tier.known(world.keys(range(4)))) == [UNKNOWN] * 4


async def test_a_damaged_or_missing_directory_of_the_list_is_no_error(world, work):
    tier = await world.open()
    await world.put(tier, range(20))
    await tier.aclose()
    shutil.rmtree(world.file(3).parent)
    world.file(3).parent.write_bytes(b"a file where a directory was")
    (world.file(4).parent / "not-a-chunk").touch()
    os.symlink("/etc", world.file(5).parent.parent / "ab_g0")
    tier = await world.open()
    await world.eventually(lambda: tier.statistics().known_chunks == 19)
    assert list(tier.known(world.keys([3, 4]))) == [UNKNOWN, PRESENT]
