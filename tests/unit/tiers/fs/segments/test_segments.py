"""Putting, getting, discarding and losing chunks in segments; what others see of it, and when."""

from __future__ import annotations

import os
import shutil

import pytest

from kvtier import native
from kvtier.keys import OffloadKey, pack_key
from kvtier.memory.heap import HeapMemory
from kvtier.tiers.fs.call import FileCall, Result, StopFlag
from kvtier.tiers.fs.index import fingerprint
from kvtier.tiers.fs.segments import native_segments

pytestmark = pytest.mark.timeout(60)
OK, EXISTS, ABSENT, TORN, CHECKSUM = Result.OK, Result.EXISTS, Result.ABSENT, Result.TORN, Result.CHECKSUM
STOP = StopFlag()


def live(rack, store):
    """Return name, state and living chunks of the segments that a store knows."""
    with store.shelf(rack.place) as shelf:
        return {info.name: (info.state.name, info.live) for info in shelf.segments()}


@pytest.mark.parametrize("chunk_bytes", [4096, 3 * 4096, 65536, 2 * 2**20])
@pytest.mark.parametrize("chunks", [1, 31, 32, 100])
def test_what_is_put_is_got_in_any_order_and_number(new_rack, tmp_path, chunk_bytes, chunks):
    if chunk_bytes * chunks > 2**26:
        chunks = 40
    with new_rack(tmp_path / "root", chunk_bytes=chunk_bytes) as rack:
        store = rack.store()
        assert rack.put(store, range(chunks)) == [OK] * chunks
        assert rack.get(store, reversed(range(chunks))) == [OK] * chunks
        assert rack.get(store, [chunks - 1, chunks, 0]) == [OK, ABSENT, OK]


def test_keys_of_every_length_are_kept(rack):
    store = rack.store()
    keys = [pack_key(b"\xab" * length, 2**32 - 1) for length in (1, 8, 16, 32, 36, 37, 64)]
    memory = HeapMemory(len(keys), rack.place.chunk_bytes)
    for slot in range(len(keys)):
        memory.view(slot)[:] = rack.content(slot)
    call = FileCall(rack.place, keys, rack.call(range(len(keys)), memory).slots, memory)
    store.put(call, 0, len(keys))
    assert list(call.results) == [OK] * len(keys)
    store.close()
    again = FileCall(rack.place, keys)
    rack.store().contains(again, 0, len(keys))
    assert list(again.results) == [OK] * len(keys)


def test_a_chunk_that_is_there_is_not_written_again_by_anybody(rack):
    one, two = rack.store(), rack.store()
    rack.put(one, range(40))
    before = [file.stat().st_blocks for file in rack.files()]
    assert rack.put(one, range(40)) == [EXISTS] * 40
    assert rack.put(two, range(40)) == [EXISTS] * 40
    assert [file.stat().st_blocks for file in rack.files()] == before


def test_chunks_are_found_again_after_closing_and_after_dying(rack):
    closed, dead = rack.store(), rack.store()
    rack.put(closed, range(40))
    closed.close()
    rack.put(dead, range(40, 80))  # and never closes
    later = rack.store()
    assert rack.get(later, range(80)) == [OK] * 80
    states = sorted(state for state, _ in live(rack, later).values())
    assert states == ["GROWING", "SEALED"]


def test_what_is_not_a_key_is_refused_alone(rack):
    store = rack.store()
    call = FileCall(rack.place, [rack.key(1), OffloadKey(b""), OffloadKey(b"x" * 69)])
    store.contains(call, 0, 3)
    assert list(call.results) == [ABSENT, -22, -22]


def test_a_call_that_was_stopped_does_nothing(rack):
    store = rack.store()
    memory = HeapMemory(4, rack.place.chunk_bytes)
    call = rack.call(range(4), memory)
    call.stop.set()
    store.put(call, 0, 4)
    assert list(call.results) == [-125] * 4
    assert rack.contains(store, range(4)) == [ABSENT] * 4


@pytest.mark.parametrize("other_kind", ["native", "python"])
def test_helper_and_fallback_read_each_others_segments(rack, kind, other_kind):
    if native.library is None:
        pytest.skip("the native helper is not built")
    store = rack.store(other_kind)
    rack.put(store, range(70))
    assert rack.get(rack.store(), range(70)) == [OK] * 70  # growing
    rack.discard(store, [3, 69])
    store.close()
    assert rack.get(rack.store(), range(70)) == [ABSENT if n in (3, 69) else OK for n in range(70)]


def test_helper_and_fallback_write_the_same_bytes(new_rack, tmp_path, kind):
    if native.library is None or kind == "python":
        pytest.skip("both are needed, once")
    contents = []
    for one in ("native", "python"):
        with new_rack(tmp_path / one) as rack:
            store = rack.store(one)
            rack.put(store, range(40))
            rack.put(store, [41])
            growing = rack.files()[0].read_bytes()
            store.close()
            sealed = rack.files()[0].read_bytes()
            contents.append((growing, sorted(_blocks(sealed))))  # a footer's order is its writer's
    assert contents[0][0] == contents[1][0]
    assert len(contents[0][1]) == len(contents[1][1])


def _blocks(content):
    return [content[at : at + 4096] for at in range(0, len(content), 4096)]


# ------------------------------------------------------------------------------- discarding


def test_what_is_discarded_is_gone_for_all_openers_and_for_ever(rack):
    one, two = rack.store(), rack.store()
    rack.put(one, range(10))
    rack.get(two, range(10))
    assert rack.discard(one, [2, 3, 99]) == [OK, OK, ABSENT]
    expected = [ABSENT if number in (2, 3) else OK for number in range(10)]
    assert rack.get(one, range(10)) == expected
    assert rack.get(two, range(10)) == expected
    one.close()
    assert rack.get(rack.store(), range(10)) == expected
    assert rack.put(two, [2]) == [OK]
    assert rack.get(rack.store(), [2]) == [OK]


def test_every_copy_of_a_chunk_is_discarded(rack, monkeypatch):
    one, two = rack.store(), rack.store()
    with two.shelf(rack.place) as shelf:
        shelf.load(STOP)
    # Two writers that do not know of each other's chunk yet write it both.
    rack.put(one, [7])
    only = rack.files()[0]
    hidden = only.with_suffix(".hidden")
    only.rename(hidden)
    rack.put(two, [7])
    hidden.rename(only)
    assert len(rack.files()) == 2
    rack.discard(two, [7])
    assert rack.get(rack.store(), [7]) == [ABSENT]


def test_discarding_does_not_make_a_segment_look_younger(rack):
    store = rack.store()
    rack.put(store, range(4))
    store.close()
    (file,) = rack.files()
    os.utime(file, ns=(10**18, 10**18))
    later = rack.store()
    rack.discard(later, [1])
    assert file.stat().st_mtime_ns == 10**18


def test_touching_sets_the_time_of_use_alone(rack):
    store = rack.store()
    rack.put(store, range(4))
    store.close()
    (file,) = rack.files()
    os.utime(file, ns=(10**18, 10**18))
    call = rack.call([0, 1, 5])
    later = rack.store()
    rack.contains(later, range(4))
    later.touch(call, 0, 3)
    assert list(call.results) == [OK, OK, ABSENT]
    assert file.stat().st_mtime_ns == 10**18
    assert file.stat().st_atime_ns > 10**18


# --------------------------------------------------------------------- others remove and add


def test_a_segment_that_somebody_removes_is_a_miss_and_room_for_new_ones(rack):
    one, two = rack.store(), rack.store()
    rack.put(one, range(10))
    assert rack.get(two, range(10)) == [OK] * 10
    for file in rack.files():
        file.unlink()
    assert rack.get(two, range(10)) == [ABSENT] * 10
    assert rack.get(one, range(10)) == [ABSENT] * 10
    assert [rack.put(one, [number]) for number in (0, 1, 2)] == [[OK]] * 3
    rack.wait_for(two, [0, 1, 2])


def test_a_put_into_a_segment_that_was_removed_goes_into_the_next(rack):
    store = rack.store()
    rack.put(store, range(4))
    for number in range(4, 8):
        (file,) = rack.files()
        file.unlink()
        assert rack.put(store, [number]) == [OK]
        assert rack.get(store, [number]) == [OK]


@pytest.mark.parametrize("is_told", [False, True], ids=["not told", "told"])
def test_bytes_of_a_segment_that_was_removed_are_counted_by_who_did_it_alone(rack, is_told):
    store = rack.store()
    added = put_bytes(rack, store, range(6))
    for first in range(6, 30, 6):
        (file,) = rack.files()
        removed = file.stat().st_blocks * 512
        file.unlink()
        if is_told:
            store.forget(rack.place, [f"segments/{file.name}"])
        added += put_bytes(rack, store, range(first, first + 6)) - removed
    assert added == sum(file.stat().st_blocks * 512 for file in rack.files())


def put_bytes(rack, store, numbers):
    """Put chunks; return the bytes that the store says the file system has got more."""
    memory = HeapMemory(len(numbers), rack.place.chunk_bytes)
    for slot, number in enumerate(numbers):
        memory.view(slot)[:] = rack.content(number)
    call = rack.call(numbers, memory)
    added = store.put(call, 0, len(numbers))
    assert list(call.results) == [OK] * len(numbers)
    return added


def test_a_directory_removed_under_the_store_is_made_again(rack):
    store, other = rack.store(), rack.store()
    rack.put(store, range(4))
    rack.get(other, range(4))
    shutil.rmtree(rack.folder.parent)
    assert rack.get(store, range(4)) == [ABSENT] * 4
    rack.put(store, [0])
    assert rack.put(store, [1, 2]) == [OK, OK]
    assert rack.get(store, [1, 2]) == [OK, OK]
    rack.wait_for(other, [1, 2])


def test_chunks_of_evicted_segments_are_told(rack):
    store = rack.store()
    rack.put(store, range(6))
    (file,) = rack.files()
    file.unlink()
    gone = store.forget(rack.place, [f"segments/{file.name}"])
    assert sorted(gone) == sorted(rack.key(number) for number in range(6))
    assert rack.get(store, range(6)) == [ABSENT] * 6


def test_chunks_are_told_where_a_get_has_noticed_the_eviction_first(rack):
    store = rack.store()
    rack.put(store, range(6))
    store.close()
    later = rack.store()
    rack.get(later, range(6))
    (file,) = rack.files()
    file.unlink()
    assert rack.get(later, range(6)) == [ABSENT] * 6
    gone = later.forget(rack.place, [f"segments/{file.name}"])
    assert sorted(gone) == sorted(rack.key(number) for number in range(6))
    assert list(later.forget(rack.place, [f"segments/{file.name}"])) == []


def test_fingerprints_are_those_of_the_index(rack):
    store = rack.store()
    rack.put(store, range(50))
    rack.discard(store, [1])
    marks = rack.store().fingerprints(rack.place, 0, STOP)
    assert sorted(marks) == sorted(fingerprint(rack.key(number)) for number in range(50) if number != 1)
    assert list(store.fingerprints(rack.place, 1, STOP)) == []


def test_what_is_no_segment_of_this_cache_is_left_alone(new_rack, tmp_path):
    with new_rack(tmp_path / "mine") as mine, new_rack(tmp_path / "theirs", digest=b"x" * 16) as theirs:
        for rack in (mine, theirs):
            store = rack.store()
            rack.put(store, range(5))
            store.close()
        shutil.copy(theirs.files()[0], mine.folder)
        (mine.folder / "noise.seg").write_bytes(os.urandom(100_000))
        (mine.folder / "empty.seg").touch()
        (mine.folder / "folder.seg").mkdir()
        (mine.folder / "link.seg").symlink_to(theirs.files()[0])
        store = mine.store()
        assert mine.get(store, range(5)) == [OK] * 5
        assert len(live(mine, store)) == 1
        mine.tend(store)
        assert len(list(mine.folder.iterdir())) == 6


# ------------------------------------------------------------------------------- compaction


def test_a_segment_that_is_mostly_dead_is_copied_and_removed(rack):
    writer = rack.store()
    rack.put(writer, range(100))
    writer.close()
    store = rack.store()
    rack.discard(store, range(60))
    (old,) = rack.files()
    before = old.stat().st_blocks * 512
    freed = -rack.tend(store)
    assert not old.exists()
    (new,) = rack.files()
    # The map's block came with the first discard, and is not known of.
    assert 0 <= before - new.stat().st_blocks * 512 - freed <= 4096
    assert freed > 40 * rack.place.chunk_bytes
    expected = [ABSENT] * 60 + [OK] * 40
    assert rack.get(store, range(100)) == expected
    assert rack.get(rack.store(), range(100)) == expected


def test_a_segment_that_is_mostly_alive_stays(rack):
    writer = rack.store()
    rack.put(writer, range(100))
    writer.close()
    store = rack.store()
    rack.discard(store, range(40))
    before = rack.files()
    assert rack.tend(store) == 0
    assert rack.files() == before


def test_segments_without_a_living_chunk_are_removed(rack):
    writer = rack.store()
    rack.put(writer, range(100))
    writer.close()
    store = rack.store()
    rack.discard(store, range(100))
    assert rack.tend(store) < 0
    assert rack.files() == []


def test_what_fails_its_check_is_not_compacted_away(rack):
    writer = rack.store()
    rack.put(writer, range(100))
    writer.close()
    (file,) = rack.files()
    damage(file, rack.content(99))
    store = rack.store()
    rack.discard(store, range(70))
    rack.tend(store)
    assert file.exists()
    assert rack.get(store, range(70, 100)) == [OK] * 29 + [CHECKSUM]


def damage(file, content):
    """Change one byte in the middle of a chunk."""
    whole = file.read_bytes()
    at = whole.index(content[:64]) + len(content) // 2
    with file.open("r+b") as stream:
        stream.seek(at)
        stream.write(bytes([whole[at] ^ 1]))


def test_a_chunk_that_fails_is_set_aside_with_its_bytes_and_can_be_put_again(rack):
    store = rack.store()
    rack.put(store, range(5))
    (file,) = rack.files()
    damage(file, rack.content(2))
    call = rack.got(store, [2])
    assert list(call.results) == [CHECKSUM]
    (rack.root / "quarantine").mkdir()
    assert store.set_aside(call, 0, "quarantine/it")
    evidence = (rack.root / "quarantine" / "it").read_bytes()
    expected = rack.content(2)
    assert len(evidence) == len(expected) + 4096
    assert sum(a != b for a, b in zip(evidence, expected, strict=False)) == 1
    assert file.name.encode() in evidence[len(expected) :]
    assert rack.get(store, range(5)) == [OK, OK, ABSENT, OK, OK]
    assert rack.get(rack.store(), range(5)) == [OK, OK, ABSENT, OK, OK]
    assert rack.put(store, [2]) == [OK]
    assert rack.get(store, [2]) == [OK]


# ----------------------------------------------------------------------------------- bounds


def test_small_roots_have_small_segments(rack):
    store = rack.store(max_bytes=64 * 2**20)
    rack.put(store, range(300))
    assert len(rack.files()) >= 2
    assert max(file.stat().st_size for file in rack.files()) <= 2 * 2**20
    tiny = rack.store(max_bytes=1)
    assert rack.put(tiny, range(300, 320)) == [OK] * 20


def test_bytes_on_disk_are_reported_as_they_are(rack):
    store = rack.store(max_bytes=64 * 2**20)
    memory = HeapMemory(300, rack.place.chunk_bytes)
    for slot in range(300):
        memory.view(slot)[:] = rack.content(slot)
    added = store.put(rack.call(range(300), memory), 0, 300)
    on_disk = sum(file.stat().st_blocks * 512 for file in rack.files())
    assert abs(added - on_disk) <= 4096 * len(rack.files())
    assert added <= 300 * store.most_bytes(rack.place.chunk_bytes)


def test_few_files_are_open_however_many_segments_there_are(rack, monkeypatch):
    monkeypatch.setattr(native_segments, "MOST_OPEN", 4)
    writer = rack.store(max_bytes=1)
    rack.put(writer, range(100))
    writer.close()
    assert len(rack.files()) > 20
    before = len(os.listdir("/proc/self/fd"))
    store = rack.store()
    for number in range(100):
        assert rack.get(store, [number]) == [OK]
    assert len(os.listdir("/proc/self/fd")) - before <= 2 * 4 + 2
    store.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_the_index_takes_less_than_80_bytes_for_each_of_many_chunks(new_rack, tmp_path, kind):
    if kind == "python":
        pytest.skip("of the helper's index")
    with new_rack(tmp_path / "root", chunk_bytes=4096) as rack:
        store = rack.store()
        for first in range(0, 20_000, 1000):
            memory = HeapMemory(1000, 4096)
            store.put(rack.call(range(first, first + 1000), memory), 0, 1000)
        counts = store.statistics(rack.place)
        assert counts.chunks == 20_000
        assert counts.index_bytes / counts.chunks < 80


def test_closing_seals_and_takes_nothing_where_nothing_was_put(rack):
    store = rack.store()
    rack.contains(store, [1])
    store.close()
    assert not rack.folder.exists()
    other = rack.store()
    rack.put(other, range(3))
    (growing,) = rack.files()
    before = growing.stat().st_size
    other.close()
    assert growing.stat().st_size < before


def test_epochs_that_were_left_are_closed(rack):
    store = rack.store()
    rack.put(store, range(3))
    old, rack.place = (
        rack.place,
        type(rack.place)(
            rack.root_fd, "cache_r0.e1", "cache/.tmp", b"d" * 16, rack.place.chunk_bytes, rack.place.flags
        ),
    )
    assert rack.get(store, range(3)) == [ABSENT] * 3
    rack.put(store, [1])
    rack.tend(store)
    rack.place = old
    states = {state for state, _ in live(rack, rack.store()).values()}
    assert states <= {"SEALED"}
