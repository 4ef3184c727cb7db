"""Segments that are cut off, damaged, half written, or left by writers that were killed."""

from __future__ import annotations

import errno
import itertools
import os
import random
import resource
import signal
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.tiers.fs.call import Result

pytestmark = pytest.mark.timeout(120)
OK, ABSENT = Result.OK, Result.ABSENT
ILL = {Result.TORN, Result.FOREIGN, Result.CHECKSUM}
CHUNKS = 6
KILLS = 40
limits = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, *HealthCheck]
)


def written(rack, *, sealed):
    """Return the bytes of a segment with some chunks in two extents, and where its extents end."""
    store = rack.store()
    rack.put(store, range(4))
    rack.put(store, range(4, CHUNKS))
    (file,) = rack.files()
    end = (2 + 1 + 4 * 4 + 1 + 2 * 4) * 4096
    if sealed:
        store.close()
    content = file.read_bytes()
    file.unlink()
    return content if sealed else content[: end + 8192], end


@pytest.fixture(params=[False, True], ids=["growing", "sealed"])
def sealed(request):
    """Whether the segment was sealed before harm came to it."""
    return request.param


def check_harmless(rack, store):
    """Whatever is in the file: what is given is right, and the store goes on."""
    first = rack.get(store, range(CHUNKS))  # asserts that the bytes of what is there are right
    assert set(first) <= {OK, ABSENT} | ILL
    rack.tend(store)
    assert set(rack.get(store, range(CHUNKS))) <= {OK, ABSENT} | ILL
    assert rack.put(store, [100]) == [OK]
    assert rack.get(store, [100]) == [OK]
    return first


def test_a_segment_cut_off_at_any_byte_is_harmless(new_rack, tmp_path, sealed):
    numbers = itertools.count()
    with new_rack(tmp_path / "origin") as origin:
        content, end = written(origin, sealed=sealed)
    edges = [block * 4096 + more for block in range(len(content) // 4096 + 1) for more in (-1, 0, 1)]

    @limits
    @given(st.one_of(st.sampled_from(edges), st.integers(0, len(content))))
    def cut(length):
        length = min(max(0, length), len(content))
        with new_rack(tmp_path / f"{next(numbers)}") as rack:
            rack.folder.mkdir(parents=True)
            (rack.folder / "left.seg").write_bytes(content[:length])
            results = check_harmless(rack, rack.store())
            if length >= end:
                assert results == [OK] * CHUNKS  # without its footer, too
            whole = sum(1 for block in (3, 7, 11, 15, 20, 24) if length >= (block + 4) * 4096)
            assert results.count(OK) <= whole
            assert not set(results) & ILL  # what ends early is a miss, and no damage

    cut()


def test_any_byte_may_be_another_and_nothing_wrong_is_given(new_rack, tmp_path, sealed):
    numbers = itertools.count()
    with new_rack(tmp_path / "origin") as origin:
        content, _ = written(origin, sealed=sealed)

    @limits
    @given(st.integers(0, len(content) - 1), st.integers(1, 255), st.integers(1, 5000))
    def flip(at, mask, length):
        harmed = bytearray(content)
        for i in range(at, min(at + length, len(harmed))):
            harmed[i] ^= mask
        with new_rack(tmp_path / f"{next(numbers)}") as rack:
            rack.folder.mkdir(parents=True)
            (rack.folder / "left.seg").write_bytes(bytes(harmed))
            check_harmless(rack, rack.store())

    flip()


def blocks_of(chunk):
    """The blocks of a chunk in what ``written`` has made: the head of its extent, and its bytes."""
    head, first = (2, 3 + 4 * chunk) if chunk < 4 else (19, 20 + 4 * (chunk - 4))
    return {head, *range(first, first + 4)}


def test_any_block_of_a_write_may_be_missing_and_all_that_is_whole_is_given(new_rack, tmp_path):
    """A power cut or a kill leaves any of the blocks unwritten that were under way, and others behind."""
    numbers = itertools.count()
    with new_rack(tmp_path / "origin") as origin:
        content, end = written(origin, sealed=False)

    @limits
    @given(st.sets(st.integers(2, end // 4096 - 1), min_size=1))
    def lose(blocks):
        harmed = bytearray(content)
        for block in blocks:
            harmed[block * 4096 : (block + 1) * 4096] = bytes(4096)
        with new_rack(tmp_path / f"{next(numbers)}") as rack:
            rack.folder.mkdir(parents=True)
            (rack.folder / "left.seg").write_bytes(bytes(harmed))
            results = check_harmless(rack, rack.store())
            assert not set(results) & ILL  # its writer may not have finished: no damage
            whole = [not blocks & blocks_of(chunk) for chunk in range(CHUNKS)]
            assert [result == OK for result in results] == whole

    lose()


def test_what_was_put_behind_an_unfinished_extent_stays_when_a_dead_writers_segment_is_sealed(
    new_rack, tmp_path
):
    with new_rack(tmp_path / "origin") as origin:
        content, _ = written(origin, sealed=False)
    with new_rack(tmp_path / "left") as rack:
        rack.folder.mkdir(parents=True)
        (rack.folder / "left.seg").write_bytes(content[:8192] + bytes(4096) + content[3 * 4096 :])
        store = rack.store()
        rack.tend(store)
        assert rack.get(store, range(CHUNKS)) == [ABSENT] * 4 + [OK] * 2
        store.close()
        store = rack.store()
        assert rack.get(store, range(CHUNKS)) == [ABSENT] * 4 + [OK] * 2


def test_a_dead_writers_segment_is_sealed_and_its_unused_length_given_back(rack):
    dead = rack.store()
    rack.put(dead, range(10))
    (file,) = rack.files()
    content = file.read_bytes()
    file.unlink()
    (rack.folder / "dead.seg").write_bytes(content)
    store = rack.store()
    assert rack.get(store, range(10)) == [OK] * 10
    rack.tend(store)
    assert (rack.folder / "dead.seg").stat().st_size < len(content)
    later = rack.store()
    assert rack.get(later, range(10)) == [OK] * 10
    with later.shelf(rack.place) as shelf:
        assert [info.state.name for info in shelf.segments()] == ["SEALED"]


def test_a_living_writers_segment_is_not_sealed_by_another(rack):
    writer, other = rack.store(), rack.store()
    rack.put(writer, range(10))
    rack.get(other, range(10))
    before = rack.files()[0].stat().st_size
    rack.tend(other)
    assert rack.files()[0].stat().st_size == before
    assert rack.put(writer, range(10, 20)) == [OK] * 10
    rack.wait_for(other, range(20))


def start_writer(rack, first):
    """Fork a process that puts and discards until it is killed. Returns its id."""
    ready, told = os.pipe()
    process = os.fork()
    if process:
        os.close(told)
        assert os.read(ready, 1) == b"x"
        os.close(ready)
        return process
    try:
        mine = type(rack)(rack.root, rack.kind)
        store = mine.store(max_bytes=2**24)
        os.write(told, b"x")
        for number in itertools.count(first, 7):
            mine.put(store, range(number, number + 7))
            if number % 3 == 0:
                mine.discard(store, [number + 1])
    finally:
        os._exit(1)


def kill(process):
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def test_writers_killed_at_any_moment_leave_whole_chunks_or_none(rack):
    dice = random.Random(7)
    reader, seen = rack.store(), set()
    for turn in range(KILLS):
        process = start_writer(rack, turn * 100_000)
        time.sleep(dice.uniform(0, 0.05))
        mine = [turn * 100_000 + i for i in range(140)]
        seen |= {n for n, result in zip(mine, rack.get(reader, mine), strict=True) if result == OK}
        kill(process)
        if turn % 5 == 4:
            rack.tend(reader)
    everything = [turn * 100_000 + i for turn in range(KILLS) for i in range(140)]
    later = rack.store()
    rack.tend(later)
    for store in (reader, later):
        results = rack.get(store, everything)  # asserts that the bytes of what is there are right
        assert set(results) <= {OK, ABSENT}
        found = {n for n, result in zip(everything, results, strict=True) if result == OK}
        discarded = {n for n in everything if (n % 100_000) % 7 == 1}
        assert seen - discarded <= found  # what was there once stays, unless it was discarded
    with later.shelf(rack.place) as shelf, reader.shelf(rack.place) as living:
        unsealed = {info.name for info in shelf.segments() if info.state.name != "SEALED"}
        # What the reader has saved from segments of little use it has put into one of its own.
        assert unsealed <= {info.name for info in living.segments() if info.state.name == "WRITING"}


def test_processes_read_what_others_write_meanwhile(rack):
    process = start_writer(rack, 0)
    try:
        store, found = rack.store(), 0
        until = time.monotonic() + 100  # on a busy machine looks take long, and then are few
        while found < 300 and time.monotonic() < until:
            numbers = [n for n in range(found, found + 200) if n % 7 != 1]
            results = rack.get(store, numbers)
            assert set(results) <= {OK, ABSENT}
            found += 50 if results[:40] == [OK] * 40 else 0
        assert found >= 300
    finally:
        kill(process)


def test_chunks_are_got_while_their_segments_are_compacted_and_removed(rack):
    store = rack.store(max_bytes=2**24)
    rack.put(store, range(400))
    rack.discard(store, [n for n in range(400) if n % 3])
    stop, failures = threading.Event(), []

    def read():
        while not stop.is_set():
            numbers = random.sample(range(0, 400, 3), 20)
            results = rack.get(store, numbers)
            if results != [OK] * 20:
                failures.append(results)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    before = set(rack.files())
    for _ in range(10):
        rack.tend(store)
    stop.set()
    for thread in threads:
        thread.join()
    assert before - set(rack.files())  # some were removed
    # A get that finds its segment gone looks once more, and may be unlucky twice: a miss.
    assert all(set(results) <= {OK, ABSENT} for results in failures)
    assert len(failures) <= 5
    assert rack.get(store, range(0, 400, 3)) == [OK] * 134


def test_a_chunk_discarded_while_it_is_copied_stays_discarded(rack):
    store = rack.store(max_bytes=2**24)
    rack.put(store, range(300))
    rack.discard(store, [n for n in range(300) if n % 3])
    victims = list(range(0, 300, 6))
    thread = threading.Thread(target=lambda: [rack.discard(store, [n]) for n in victims])
    thread.start()
    for _ in range(5):
        rack.tend(store)
    thread.join()
    expected = [ABSENT if n % 3 or n % 6 == 0 else OK for n in range(300)]
    assert rack.get(store, range(300)) == expected
    store.close()
    assert rack.get(rack.store(), range(300)) == expected


def test_a_full_disk_is_a_reason_and_loses_nothing_that_was_there(rack):
    store = rack.store()
    assert rack.put(store, range(4)) == [OK] * 4
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20 * 4096, hard))
    try:
        results = rack.put(store, range(10, 20))
        again = rack.put(store, range(20, 24))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert set(results) <= {-errno.EFBIG, -errno.EIO}
    assert set(again) <= {-errno.EFBIG, -errno.EIO}
    assert rack.get(store, range(4)) == [OK] * 4
    assert rack.get(store, range(10, 24)) == [ABSENT] * 14
    assert rack.put(store, range(10, 20)) == [OK] * 10
    store.close()
    assert rack.get(rack.store(), [*range(4), *range(10, 20)]) == [OK] * 14


def test_a_directory_that_cannot_be_written_gives_what_it_holds(rack):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    writer = rack.store()
    rack.put(writer, range(4))
    writer.close()
    rack.folder.chmod(0o500)
    try:
        store = rack.store()
        assert rack.get(store, range(4)) == [OK] * 4
        assert rack.put(store, [9]) == [-errno.EACCES]
    finally:
        rack.folder.chmod(0o700)


def test_many_threads_put_and_get_at_once(rack):
    store = rack.store(max_bytes=2**24)
    problems = []

    def work(first):
        mine = range(first, first + 40)
        for number in mine:
            if rack.put(store, [number]) != [OK]:
                problems.append(number)
        if rack.get(store, mine) != [OK] * 40:
            problems.extend(mine)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(0, 400, 40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    store.close()
    later = rack.store()
    assert rack.get(later, range(400)) == [OK] * 400
