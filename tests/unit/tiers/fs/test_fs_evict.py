"""Eviction: the order, its exceptions, and the process that evicts."""

from __future__ import annotations

import errno
import os
import stat
import time
from array import array
from contextlib import suppress
from typing import Any

import anyio
import pytest

from kvtier.keys import pack_key
from kvtier.tiers import Knowledge, Outcome, Status
from kvtier.tiers.fs import FsConfig
from kvtier.tiers.fs._files import chunk_files
from kvtier.tiers.fs._files.chunk_files import tree_bytes, tree_remove
from kvtier.tiers.fs._files.native_call import FileCall, StopFlag
from kvtier.tiers.fs._maintenance import maintenance, uses
from kvtier.tiers.fs._maintenance.ages import BUCKETS, bucket_of, new_histogram
from kvtier.tiers.fs._maintenance.evict import Evictor
from kvtier.tiers.fs._maintenance.scan import ChunkScan
from kvtier.tiers.fs._quota import ledger

pytestmark = pytest.mark.timeout(60)
OK, ABSENT, REFUSED = Status.OK, Status.ABSENT, Status.REFUSED
PRESENT = Knowledge.PRESENT
HOUR = 3600


def set_times(path, written_ago_s, used_ago_s=None):
    now = time.time()
    written = now - written_ago_s
    os.utime(path, (now - used_ago_s if used_ago_s is not None else written, written))


@pytest.fixture
def evictor(world):
    """Makes room below the world's root, and records the evicted chunks in ``gone``."""
    world.root.mkdir(exist_ok=True)
    root_fd = os.open(world.root, os.O_RDONLY)
    gone: list[str] = []
    made: Any = Evictor(root_fd, StopFlag(), lambda data_dir, paths: gone.extend(paths))
    made.gone = gone
    yield made
    os.close(root_fd)


async def filled(world, ages_s, **settings):
    """Put chunk n with these ages of its write and its last use."""
    tier = await world.open(**settings)
    await world.put(tier, range(len(ages_s)))
    for number, (written, used) in enumerate(ages_s):
        set_times(world.file(number), written, used)
    return tier


def class_of(path):
    found = path.stat()
    if found.st_atime_ns <= found.st_mtime_ns:
        return 0
    if found.st_mode & 0o077:  # the mode on a file system that gives all files one mode
        return 1
    return 1 + bool(found.st_mode & stat.S_ISVTX) + 2 * bool(found.st_mode & stat.S_IXUSR)


def first_level(world):
    """The directories that a scan lists, relative to the root."""
    data_dir = f"{world.identity.namespace}_r0"
    return [f"{data_dir}/{name}" for name in sorted(os.listdir(world.root / data_dir))]


def left(world, count):
    return [number for number in range(count) if world.file(number).exists()]


async def test_reused_count_from_last_use(world, evictor):
    ages = [
        (9 * HOUR, 2.5 * HOUR),  # used again: as old as a chunk written 1.7 hours ago
        (2 * HOUR, None),
        (1 * HOUR, None),
        (9 * HOUR, 5 * HOUR),  # as old as a chunk written 3.5 hours ago
    ]
    await filled(world, ages)
    one = world.file(0).stat().st_blocks * 512
    for expected in ([0, 1, 2], [0, 2], [2]):
        await anyio.to_thread.run_sync(evictor.make_room, one)
        assert left(world, 4) == expected


async def test_orphans_go_first(world, evictor):
    tier = await filled(world, [(HOUR, None)] * 4)
    await world.until_listed(tier)  # so it has swept, and does nothing more
    orphan = world.root / "model_0123456789abcdef_r0" / "abc" / "de_g0" / "abcdef.bin"
    orphan.parent.mkdir(parents=True)
    orphan.write_bytes(bytes(50_000))
    (world.namespace / "quarantine").mkdir()
    (world.namespace / "quarantine" / "aa_g0.torn.1-1").write_bytes(bytes(50_000))
    old = world.root / f"{world.identity.namespace}_r0.e1" / "abc" / "de_g0" / "abcdef.bin"
    old.parent.mkdir(parents=True)
    old.write_bytes(bytes(50_000))
    (world.namespace / "epoch").write_text("2\n")
    evicted = await anyio.to_thread.run_sync(evictor.make_room, 140_000)
    assert not orphan.exists()
    assert not old.exists()
    assert world.quarantined() == []
    assert evicted.chunks == 0
    assert evicted.leftover_bytes >= 150_000
    assert left(world, 4) == [0, 1, 2, 3]  # of an older epoch that is in use
    assert (await world.get(tier, [1])).statuses == (OK,)


async def test_concurrent_removals_count_once(world):
    """A sweep and an eviction may remove the same old epoch. Bytes counted twice would be false room."""
    tree = world.root / "tree"
    for number in range(600):
        folder = tree / f"{number % 30:03x}" / f"{number % 7:02x}_g0"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:08x}.bin").write_bytes(bytes(4096))
    root_fd = os.open(world.root, os.O_RDONLY)
    removed = []

    def remove():
        with suppress(FileNotFoundError):  # the other remover finished before this one started
            removed.append(tree_remove(root_fd, "tree", StopFlag()))

    try:
        held = await anyio.to_thread.run_sync(tree_bytes, root_fd, "tree", StopFlag())
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(anyio.to_thread.run_sync, remove)
    finally:
        os.close(root_fd)
    assert not tree.exists()
    assert sum(removed) == held


async def test_unremovable_are_replaced(world, evictor):
    await filled(world, [(HOUR * (number + 1), None) for number in range(10)])
    one = world.file(0).stat().st_blocks * 512
    stuck = [str(world.file(number)) for number in (7, 8, 9)]
    if (await anyio.run_process(["chattr", "+i", *stuck], check=False)).returncode:
        pytest.skip("files cannot be made immutable here")
    try:
        evicted = await anyio.to_thread.run_sync(evictor.make_room, 2 * one)
    finally:
        await anyio.run_process(["chattr", "-i", *stuck])
    assert left(world, 10) == [0, 1, 2, 3, 4, 7, 8, 9]
    assert (evicted.chunks, evicted.failures) == (2, {errno.EPERM: 3})


@pytest.mark.blocking(reason="takes the lock of another process on the loop")
async def test_one_process_evicts(world, evictor):
    await filled(world, [(HOUR, None)] * 3)
    with ledger.elected(evictor._root_fd, ledger.EVICTING) as lock:
        assert lock is not None
        assert (await anyio.to_thread.run_sync(evictor.make_room, 10**9)) is None
    assert left(world, 3) == [0, 1, 2]


async def test_sample_is_enough(world, evictor, monkeypatch):
    monkeypatch.setattr("kvtier.tiers.fs._maintenance.evict.SAMPLE_FILES", 40)
    world.chunk_bytes = 4096
    await filled(world, [(60 * (number + 1), None) for number in range(400)])
    one = world.file(0).stat().st_blocks * 512
    need = 80 * one
    while need > 0:  # as maintenance does: a poor sample may leave a little work
        evicted = await anyio.to_thread.run_sync(evictor.make_room, need)
        assert evicted.chunk_bytes
        need -= evicted.chunk_bytes
    stayed = left(world, 400)
    assert 300 <= len(stayed) <= 365  # most chunks are alone in two directories, which are removed, too
    assert set(range(200)) <= set(stayed)  # the younger half is safe even from a poor sample


async def test_scan_adds_up_ages(world):
    times = [(60 * number**3, 60 * number if number % 2 else None) for number in range(1, 40)]
    await filled(world, times)
    for number, mode in enumerate((0o600, 0o1600, 0o700, 0o1700, 0o755) * 7):
        world.file(number).chmod(mode)
    now_ns, expected = time.time_ns(), array("Q", bytes(8 * 5 * BUCKETS))
    for number in range(len(times)):
        found = world.file(number).stat()
        age_us = (now_ns - max(found.st_atime_ns, found.st_mtime_ns)) // 1000
        expected[bucket_of(age_us) + class_of(world.file(number)) * BUCKETS] += found.st_blocks * 512
    histogram = new_histogram()
    scan = ChunkScan(now_ns, histogram)
    root_fd = os.open(world.root, os.O_RDONLY)
    try:
        for folder in first_level(world):
            assert await anyio.to_thread.run_sync(scan.scan, root_fd, folder, StopFlag()) == []
    finally:
        os.close(root_fd)
    assert histogram == expected
    assert scan.seen == 39


NO_CHUNKS = (
    "abc/de_g0/notes.txt",
    "abc/de_g0/abcdef.bin.bak",
    "abc/de_g0/abcde.bin",
    "abc/de_g0/model.bin",
    "abc/de_g0/abcdef.bin_7.tmpx",
    "abc/de_g0/abcdef.bin_.tmp",
    "abc/de_g0/deeper/abcdef.bin",
    "abc/de_gx/abcdef.bin",
    "abc/de_g/abcdef.bin",
    "abc/de_g12345678901/abcdef.bin",
    "abc/xx_g0/abcdef.bin",
    "abc/abcdef.bin",
    "abc/x.seg",
    "notes/de_g0/abcdef.bin",
    "abcdef.bin",
    "abc/de_g0/abcdef.bin_8423.tmp",
)
CHUNKS = (
    "abc/de_g0/abcdef.bin",
    "abc/de_g1234567890/abcdef.bin",
)


async def test_only_chunks_leave(world, evictor):
    await filled(world, [(HOUR, None)])
    place = world.file(0).parents[2]
    for name in (*NO_CHUNKS, *CHUNKS):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(bytes(5000))
        set_times(place / name, HOUR)
    evicted = await anyio.to_thread.run_sync(evictor.make_room, 10**9)
    assert evicted.chunks == 1 + len(CHUNKS)
    assert [name for name in CHUNKS if (place / name).exists()] == []
    assert [name for name in NO_CHUNKS if not (place / name).exists()] == []


async def test_scan_obeys_name_limit(world, monkeypatch):
    monkeypatch.setattr("kvtier.tiers.fs._maintenance.scan.NAMES_BYTES", 200)
    (folder,) = await filled(world, [(HOUR, None)]) and first_level(world)
    leaf = world.file(0).parent
    for number in range(29):
        (leaf / f"{number:064x}.bin").touch()
    root_fd = os.open(world.root, os.O_RDONLY)
    try:
        scan = ChunkScan(time.time_ns(), leaving=bytearray(b"\1" * 5 * BUCKETS), want_bytes=10**9)
        removed = scan.scan(root_fd, folder, StopFlag())
    finally:
        os.close(root_fd)
    assert 0 < len(removed) == scan.removed < 30
    assert len(list(leaf.iterdir())) == 30 - len(removed)


# ------------------------------------------------------------------------------ in the tier


async def put_batches(world, tier, first, count, batch, outcomes):
    for start in range(first, first + count, batch):
        outcomes.append(await world.put(tier, range(start, start + batch)))
        if start - first < 8:  # a burst may end within one tick of the file times' clock
            for number in range(start, start + batch):
                with suppress(FileNotFoundError):
                    os.utime(world.file(number), (1e9, 1e9))


@pytest.mark.parametrize(("engines", "puts_at_once"), [(1, 4), (3, 2)])
async def test_burst_keeps_the_last(world, engines, puts_at_once):
    """A put without room waits part of its deadline for it, wherever the room is made."""
    chunks, file_bytes = 24, world.chunk_bytes + 4 * 4096
    settings = {"max_bytes": chunks * file_bytes, "deadline_s": 100.0}  # a machine may be busy
    tiers = [await world.open(**settings) for _ in range(engines)]
    outcomes: list[Outcome] = []
    async with anyio.create_task_group() as tasks:
        for number in range(engines * puts_at_once):
            tasks.start_soon(put_batches, world, tiers[number % engines], 1000 * number, 48, 4, outcomes)
    assert await world.bytes_below() <= chunks * file_bytes
    assert [outcome.reasons for outcome in outcomes if outcome.reasons] == []
    put = [1000 * first + number for first in range(engines * puts_at_once) for number in range(48)]
    kept = [number for number in put if world.file(number).exists()]
    assert len(kept) >= chunks // 2
    assert all(number % 1000 >= 8 for number in kept)


@pytest.mark.parametrize("who", ["the same engine", "after a restart", "another engine"])
async def test_existing_chunks_evict_nothing(world, monkeypatch, who):
    """Reserving room for chunks that are not written would evict other chunks."""
    monkeypatch.setattr(maintenance, "TICK_S", 1000.0)
    settings = {"max_bytes": 14 * (world.chunk_bytes + 4 * 4096)}
    tier = await world.open(**settings)
    await world.put(tier, range(12))
    there = left(world, 12)
    assert len(there) >= 8
    if who == "after a restart":
        await tier.aclose()
    if who != "the same engine":
        tier = await world.open(**settings)
    evicted = tier.statistics().evicted_bytes
    for _ in range(3):
        assert (await world.put(tier, there)).statuses == (OK,) * len(there)
    assert world.session(tier).quota.excess == 0
    assert left(world, 12) == there
    assert tier.statistics().evicted_bytes == evicted


async def test_hopeless_put_does_not_wait(world):
    tier = await world.open(max_bytes=100_000, eviction="none", deadline_s=1000.0)
    with anyio.fail_after(30):
        assert (await world.put(tier, range(9))).reasons["max_bytes"] >= 4


@pytest.mark.parametrize("is_on_disk", [False, True])
async def test_accounts_match_disk(world, is_on_disk, tmp_path):
    """On each kind of file system: small directories take a block on some, none on others."""
    if is_on_disk:
        world.root = tmp_path / "root"
    tier = await world.open(max_bytes=10**9)
    drift = tier.statistics().used_bytes - await world.bytes_below()
    await world.put(tier, range(64))
    assert tier.statistics().used_bytes - await world.bytes_below() == drift


async def test_unused_for_ttl_leave(world):
    tier = await filled(world, [(HOUR, None), (HOUR, 10), (9 * HOUR, 3 * HOUR), (1, None)])
    assert left(world, 4) == [0, 1, 2, 3]
    await tier.aclose()
    tier = await world.open(ttl_s=1800.0)
    await world.eventually(lambda: left(world, 4) == [1, 3])
    assert (await world.get(tier, range(4))).statuses == (ABSENT, OK, ABSENT, OK)


NO_TIMES = (2**33, 2**34 - 1, 2**50)  # a file system may keep a nearer time


async def times_that_no_clock_shows(world):
    """The nanoseconds of a time after 2262 need 65 bits."""
    tier = await filled(world, [(0, None)] * 3)
    for number, when_s in enumerate(NO_TIMES):
        os.utime(world.file(number), (when_s, when_s))
    return tier


@pytest.mark.parametrize("ttl_s", [1e18, 1e300, float("inf")])
async def test_endless_ttl_keeps_all(world, evictor, ttl_s):
    """The microseconds of a very long duration need 65 bits."""
    tier = await times_that_no_clock_shows(world)
    await anyio.to_thread.run_sync(evictor.expire, ttl_s)
    assert list((await world.get(tier, range(3))).statuses) == [OK] * 3


async def test_future_dates_still_expire(world, evictor):
    tier = await times_that_no_clock_shows(world)
    await anyio.to_thread.run_sync(evictor.expire, HOUR)
    assert list((await world.get(tier, range(3))).statuses) == [ABSENT] * 3


async def test_slightly_fast_clock_is_new(world, evictor):
    tier = await filled(world, [(-60, None), (0, None)])
    await anyio.to_thread.run_sync(evictor.expire, HOUR)
    assert list((await world.get(tier, range(2))).statuses) == [OK] * 2
    evicted = await anyio.to_thread.run_sync(evictor.make_room, 2**40)
    assert evicted.chunks == 2


YEAR = 365 * 24 * HOUR


async def test_clock_set_back_leaves_room(world, monkeypatch):
    monkeypatch.setattr(maintenance, "TICK_S", 0.02)
    tier = await filled(world, [(-YEAR, None), (-YEAR, 10), (-YEAR, -2 * YEAR)] * 8)
    used = await world.bytes_below()
    await tier.aclose()
    tier = await world.open(max_bytes=used)
    for number in range(100, 104):
        assert (await world.put(tier, [number])).statuses == (OK,)
    await world.eventually(lambda: tier.statistics().evicted_chunks >= 4)
    assert (await world.get(tier, range(100, 104))).statuses == (OK,) * 4


async def test_uses_are_shared_by_files(world, monkeypatch):
    monkeypatch.setattr(maintenance, "TICK_S", 0.02)
    tier = await filled(world, [(HOUR, None)] * 4)
    written = [world.file(number).stat().st_mtime_ns for number in range(4)]
    await world.get(tier, [1])
    await tier.touch(world.keys([2, 77]))
    recently = time.time() - 60
    await world.eventually(lambda: all(world.file(number).stat().st_atime > recently for number in (1, 2)))
    assert all(world.file(number).stat().st_atime < time.time() - 1800 for number in (0, 3))
    assert [world.file(number).stat().st_mtime_ns for number in range(4)] == written


async def test_use_count_never_falls(world):
    tier = await filled(world, [(HOUR, None)] * 5)
    place = world.session(tier).epoch.place
    for classes, expected in (
        ((0, 1, 2, 3, 4), [1, 1, 2, 3, 4]),
        ((4, 2, 1, 1, 1), [4, 2, 2, 3, 4]),
        ((7, 4, 3, 4, -1), [4, 4, 3, 4, 4]),
    ):
        call = FileCall(place, world.keys(range(5)))
        await anyio.to_thread.run_sync(chunk_files.touch, call, classes)
        assert list(call.results) == [0] * 5
        assert [class_of(world.file(number)) for number in range(5)] == expected
    await world.put(tier, [5])
    assert class_of(world.file(5)) == 0
    assert (await world.get(tier, range(6))).statuses == (OK,) * 6


async def test_unpublished_read_is_no_use(world, monkeypatch):
    """With relatime, the default of most mounts, one use would count as two."""
    monkeypatch.setattr(maintenance, "TICK_S", 1000.0)
    tier = await filled(world, [(2 * HOUR, 3 * HOUR)])
    before = world.file(0).stat().st_atime_ns
    assert (await world.get(tier, [0])).statuses == (OK,)
    assert world.file(0).stat().st_atime_ns == before


class Clock:
    """A clock in seconds for uses of chunks."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def chunk(number):
    return pack_key(number.to_bytes(32, "big"))


def test_short_ttl_publishes_often():
    clock = Clock()
    seen = uses.Uses(clock, ttl_s=40.0)
    a = chunk(1)
    for published in ([a], [], [a]):
        seen.note([a], in_order=True)
        assert [key for key, _ in seen.take_unpublished(uses.WAITING)] == published
        clock.now += 5.0


def test_uses_are_published_rarely():
    clock = Clock()
    seen = uses.Uses(clock)
    a, b, c = map(chunk, range(3))
    seen.note([a, b], in_order=True)
    assert {key for key, _ in seen.take_unpublished(uses.WAITING)} == {a, b}
    clock.now += uses.PUBLISH_EVERY_S - 1
    seen.note([a, c], in_order=True)
    assert [key for key, _ in seen.take_unpublished(uses.WAITING)] == [c]
    clock.now += 1
    seen.note([a], in_order=True)
    assert [key for key, _ in seen.take_unpublished(uses.WAITING)] == [a]
    for first in range(0, 4 * uses.WAITING, 1000):
        seen.note(list(map(chunk, range(first, first + 1000))), in_order=True)
    assert len(seen.take_unpublished(uses.WAITING)) <= uses.WAITING


def test_many_puts_publish_often():
    seen = uses.Uses(Clock())
    seen.room = 200
    a = chunk(1000)
    for put, published in ((4, [a]), (4, []), (4, []), (4, [a])):
        seen.note([a], in_order=True)
        assert [key for key, _ in seen.take_unpublished(uses.WAITING)] == published
        seen.note_put(list(map(chunk, range(put))))
        seen.take_unpublished(uses.WAITING)


def test_second_put_is_a_use():
    clock = Clock()
    seen = uses.Uses(clock)
    a, b, c = map(chunk, range(3))
    seen.note_put([a, b])
    assert seen.take_unpublished(uses.WAITING) == []
    clock.now += 100.0
    seen.note_put([a])
    assert seen.take_unpublished(uses.WAITING) == [(a, 1)]
    clock.now += 100.0
    seen.note_put([c, b])
    assert set(seen.take_unpublished(uses.WAITING)) == {(c, 1), (b, 1)}, (
        "a chunk is used whenever one behind it is"
    )
    seen.clear()
    seen.note_put([b])
    assert seen.take_unpublished(uses.WAITING) == []


def test_simultaneous_uses_count_once():
    clock = Clock()
    seen = uses.Uses(clock, ttl_s=0.4)
    a = chunk(1)
    seen.note_put([a])
    published = []
    for number in range(40):
        clock.now += 0.25 if number % 2 else 9.75
        seen.note([a], in_order=False)
        published += [class_ for _, class_ in seen.take_unpublished(uses.WAITING)]
    assert published == sorted(published)
    assert [published.count(class_) for class_ in range(5)] == [0, 2, 4, 22, 12]


def rank_of(seen, class_, age_s):
    model = seen.model
    return model.density[class_][model.bin_of(age_s)]


def test_looped_kept_until_due():
    clock = Clock()
    seen = uses.Uses(clock)
    loop = list(map(chunk, range(300)))
    others = iter(range(1000, 10**6))
    seen.room = 1000
    seen.note_put(loop)
    for _ in range(40):
        for _ in range(10):
            clock.now += 60.0
            seen.note_put([chunk(next(others)) for _ in range(30)])
            seen.take_unpublished(uses.WAITING)
        seen.note(loop, in_order=True)
    assert rank_of(seen, 4, 590.0) > 2 * rank_of(seen, 4, 10.0) > 20 * rank_of(seen, 0, 10.0)
    assert rank_of(seen, 0, 10.0) >= rank_of(seen, 0, 2000.0)


def worth_at(seen, class_, age_s):
    return seen.worth()[class_][seen.model.bin_of(age_s)]


def test_hottest_stay_at_any_age():
    """The file records its chunk's first use in each interval; the chunk is used every 10 s."""
    clock = Clock()
    seen = uses.Uses(clock)
    seen.room = 20_000
    hot, numbers = list(map(chunk, range(20))), iter(range(1000, 10**6))
    due: dict[int, list[Any]] = {}
    seen.note_put(hot)
    for step in range(2000):
        clock.now += 2.0
        if step % 5 == 0:
            seen.note(hot, in_order=False)
        seen.note_put(due.setdefault(step + 300, [chunk(next(numbers)) for _ in range(8)]))
        if step % 10 < 3 and step in due:
            seen.note(due[step], in_order=True)
        seen.take_unpublished(uses.WAITING)
        if step > 1000:
            assert min(worth_at(seen, 4, age_s) for age_s in (1, 60, 200)) > worth_at(seen, 0, 300)


def test_restart_keeps_use_counts():
    clock = Clock()
    seen = uses.Uses(clock)
    seen.room = 10_000
    for step in range(300):
        assert worth_at(seen, 4, 1200) > worth_at(seen, 2, 1200) > worth_at(seen, 0, 1200)
        assert worth_at(seen, 4, 1200) > worth_at(seen, 0, 900) > worth_at(seen, 0, 1200)
        clock.now += 2.0
        seen.note_put([chunk(10 * step + number) for number in range(10)])
        seen.take_unpublished(uses.WAITING)


def test_unused_leave_despite_count():
    clock = Clock()
    seen = uses.Uses(clock)
    seen.room = 1000
    often = list(map(chunk, range(20)))
    for _ in range(100):
        clock.now += 310.0
        seen.note(often, in_order=True)
        seen.take_unpublished(uses.WAITING)
    clock.now += 86400.0
    assert worth_at(seen, 4, 86400) < worth_at(seen, 4, 310) / 100


@pytest.mark.parametrize("room", [10**6, 10**7])
def test_large_roots_sample_by_prompt(room):
    clock = Clock()
    seen = uses.Uses(clock)
    seen.room = room
    prompts = [[pack_key(os.urandom(32)) for _ in range(1000)] for _ in range(4)]
    for prompt in prompts:
        seen.note_put(prompt)
    clock.now += 50.0
    assert seen.take_unpublished(uses.WAITING) == []
    for prompt in prompts:
        seen.note_put(prompt)
    known = len(seen.take_unpublished(uses.WAITING))
    assert known > 2000
    assert sum(map(sum, seen.model.reused)) < 4000 * 2**19 / room


async def test_returning_chunk_gets_use_time(world, monkeypatch):
    touched: list[Any] = []
    monkeypatch.setattr(maintenance, "TICK_S", 0.02)

    def touch(call, classes):
        touched.extend(zip(call.keys, classes, strict=True))

    monkeypatch.setattr(chunk_files, "touch", touch)
    tier = await world.open(max_bytes=10**7)
    await world.put(tier, [1, 2])
    await tier.discard(world.keys([1]))
    world.session(tier).maintenance.uses._began_at -= 10.0  # later
    await world.put(tier, [1])
    await world.eventually(lambda: touched)
    assert touched == [(*world.keys([1]), 1)]


async def test_old_epoch_leaves_in_pieces(world, monkeypatch):
    monkeypatch.setattr(maintenance.Maintenance, "_sweep", lambda self: None)
    tier = await world.open(max_bytes=2**50)
    await world.put(tier, range(40))
    await tier.reset()
    session = world.session(tier)
    freed: list[int] = []
    removed = await anyio.to_thread.run_sync(
        Evictor(session.namespace.root_fd, session.closing).make_room, 20 * 20_480, freed.append
    )
    pieces = [nbytes for nbytes in freed if nbytes]
    assert len(pieces) >= 10
    assert removed is not None
    assert sum(pieces) == removed.bytes >= 20 * 20_480
    assert 0 < sum(world.file(number).exists() for number in range(40)) <= 20


async def test_unevictable_root_is_left(world, monkeypatch, caplog):
    monkeypatch.setattr(maintenance, "EVICTION_PAUSE_S", (0.01, 0.04))
    searched: list[int] = []
    make_room = Evictor.make_room

    def counted(self, need, *arguments):
        searched.append(need)
        return make_room(self, need, *arguments)

    monkeypatch.setattr(Evictor, "make_room", counted)
    world.root.mkdir()
    (world.root / "ballast").write_bytes(bytes(300_000))
    tier = await world.open(max_bytes=200_000)
    work = world.session(tier).maintenance
    began = time.monotonic()
    for number in range(200):
        assert (await world.put(tier, [number])).statuses == (REFUSED,)
    await world.eventually(lambda: work._eviction_pause.pause_s == 0.04 or work.make_room_soon())
    assert 1 <= len(searched) <= 6 + (time.monotonic() - began) / 0.04
    await world.eventually(lambda: "no chunks are left to evict" in caplog.text or work.make_room_soon())
    assert sum("no chunks are left to evict" in record.message for record in caplog.records) == 1
    assert (world.root / "ballast").exists()


async def test_eviction_before_a_late_count_shows(world, monkeypatch):
    """A ledger that is far too high delays eviction, for some minutes at most: counting can take hours."""
    monkeypatch.setattr(maintenance, "TICK_S", 1000.0)
    monkeypatch.setattr(maintenance, "_DOUBT_AT_MOST_S", -1.0)
    tier = await world.open(max_bytes=2**40)
    await world.put(tier, range(20))
    monkeypatch.setattr(maintenance.Maintenance, "_count", lambda self: None)
    with world.session(tier).quota._change() as change:
        change.accounts.add(2**41)
    await anyio.to_thread.run_sync(world.session(tier).maintenance._evict)
    assert left(world, 20) == []
    assert tier.statistics().evicted_chunks == 20


def test_bad_watermarks_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"low_watermark is 0\.9, and must be less"):
        FsConfig(root_dir=tmp_path, low_watermark=0.9, high_watermark=0.9)
