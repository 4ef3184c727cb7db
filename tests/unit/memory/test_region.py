"""One process: slots, views, names, room, population."""

from __future__ import annotations

import ctypes
import errno
import gc
import logging
import mmap
import os
import queue
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvtier import _native as native
from kvtier._memory import _locked_file, pages
from kvtier._memory import region as regions
from kvtier._memory.population import PIECE_BYTES
from kvtier._memory.region import Region
from kvtier.errors import RegionError, StateError

if TYPE_CHECKING:
    from tests.unit.memory.conftest import Mounted

PAGE = mmap.PAGESIZE
MIB = 2**20


@pytest.fixture
def small_tmpfs(mounted: Mounted) -> Iterator[Path]:
    """A file system of 160 MiB in memory."""
    with mounted("size=160m") as path:
        yield path
        gc.collect()


def test_slots_are_contiguous(shm: Path) -> None:
    with Region.open("a", 3, 2 * PAGE, shm) as region:
        assert (region.slots, region.chunk_bytes, region.nbytes) == (3, 2 * PAGE, 6 * PAGE)
        assert region.address % PAGE == 0
        for slot in range(3):
            view = region.view(slot)
            assert (view.format, view.ndim, view.nbytes, view.readonly) == ("B", 1, 2 * PAGE, False)
            ctypes.memset(region.address + slot * 2 * PAGE, slot + 1, 2 * PAGE)
            assert view == bytes([slot + 1]) * 2 * PAGE


@pytest.mark.parametrize("slot", [-1, 3])
def test_no_such_slot(slot: int) -> None:
    with Region.anonymous(3, PAGE) as region, pytest.raises(IndexError, match=f"slot is {slot}"):
        region.view(slot)


def test_same_name_shares_bytes(shm: Path) -> None:
    first = Region.open("same", 2, PAGE, shm)
    second = Region.open("same", 2, PAGE, shm)
    assert first.address != second.address
    first.view(1)[:3] = b"abc"
    assert bytes(second.view(1)[:3]) == b"abc"
    assert os.listdir(shm) == ["kvtier_same"]
    first.close()
    assert os.listdir(shm) == ["kvtier_same"]
    third = Region.open("same", 2, PAGE, shm)
    assert bytes(third.view(1)[:3]) == b"abc"
    third.close()
    second.close()
    assert os.listdir(shm) == []


def test_close_is_idempotent(shm: Path) -> None:
    region = Region.open("a", 1, PAGE, shm)
    region.close()
    region.close()
    for use in (region.claim, lambda: region.view(0), lambda: region.address, lambda: region.populate(print)):
        with pytest.raises(StateError, match="closed"):
            use()


def test_views_outlive_the_region(shm: Path) -> None:
    region = Region.open("a", 2, PAGE, shm)
    view = region.view(1)
    view[:] = b"v" * PAGE
    region.claim()
    region.close()
    assert os.listdir(shm) == []
    assert view == b"v" * PAGE
    with Region.open("a", 2, PAGE, shm) as successor:
        successor.claim()  # the view keeps neither lock nor claim
        assert successor.view(1) == bytes(PAGE)
        view[:] = b"w" * PAGE
        assert successor.view(1) == bytes(PAGE)


def test_forgotten_region_leaves_no_file(shm: Path) -> None:
    region = Region.open("a", 1, PAGE, shm)
    assert os.listdir(shm) == ["kvtier_a"]
    del region
    gc.collect()
    assert os.listdir(shm) == []


def test_other_size_names_both(shm: Path) -> None:
    with Region.open("a", 2, PAGE, shm) as region:
        with pytest.raises(RegionError, match=rf"{2 * PAGE} bytes, this process needs {3 * PAGE}"):
            Region.open("a", 3, PAGE, shm)
        region.view(0)[:1] = b"x"
        assert os.listdir(shm) == ["kvtier_a"]


@pytest.mark.parametrize(
    ("slots", "chunk_bytes", "message"),
    [(0, PAGE, "cpu_bytes_to_use"), (1, PAGE + 1, "multiple of 4096"), (1, 0, "multiple of 4096")],
)
def test_impossible_shapes(shm: Path, slots: int, chunk_bytes: int, message: str) -> None:
    with pytest.raises(RegionError, match=message):
        Region.open("a", slots, chunk_bytes, shm)
    with pytest.raises(RegionError, match=message):
        Region.anonymous(slots, chunk_bytes)
    assert os.listdir(shm) == []


def test_no_room_names_remedy(shm: Path) -> None:
    system = os.statvfs(shm)
    free = system.f_bavail * system.f_frsize
    slots = 2 * free // PAGE
    with pytest.raises(RegionError) as caught:
        Region.open("a", slots, PAGE, shm)
    for part in (str(slots * PAGE), "bytes are free", str(shm), "cpu_bytes_to_use"):
        assert part in str(caught.value)
    assert os.listdir(shm) == []


@pytest.mark.parametrize("name", ["../evil", "a/b", "a b", "ä", "", "x" * 400, "\0", "a\nb"])
def test_any_name_is_a_file_name(shm: Path, name: str) -> None:
    with Region.open(name, 1, PAGE, shm) as region:
        assert [shm / found for found in os.listdir(shm)] == [region.path]


def test_similar_names_stay_apart(shm: Path) -> None:
    with Region.open("a/b", 1, PAGE, shm) as one, Region.open("a b", 1, PAGE, shm) as other:
        assert one.path != other.path


def test_links_are_not_followed(shm: Path) -> None:
    (shm / "target").write_bytes(bytes(PAGE))
    (shm / "kvtier_a").symlink_to(shm / "target")
    with pytest.raises(RegionError, match="kvtier_a"):
        Region.open("a", 1, PAGE, shm)


def test_close_removes_own_file(shm: Path) -> None:
    old = Region.open("a", 1, PAGE, shm)
    (shm / "kvtier_a").unlink()
    with Region.open("a", 2, PAGE, shm):
        old.close()
        assert (shm / "kvtier_a").stat().st_size == 2 * PAGE


def test_orphaned_region_is_not_joined(shm: Path) -> None:
    path = shm / "kvtier_a"
    path.write_bytes(b"g" * PAGE)
    file = _locked_file.create_or_join(path, PAGE)
    assert path.read_bytes() == bytes(PAGE)
    _locked_file.release(file)
    assert os.listdir(shm) == []


def ready_slots(region: Region, count: int) -> list[range]:
    """Populate in one thread, and return the pieces until ``count`` slots are ready."""
    pieces: queue.Queue[range] = queue.Queue()
    region.populate(pieces.put, threads=1)
    seen: list[range] = []
    while sum(map(len, seen)) < count:
        seen.append(pieces.get(timeout=30))
    return seen


@pytest.mark.parametrize(
    ("slots", "chunk_bytes", "pieces"),
    [(5, 24 * MIB, [range(2), range(2, 4), range(4, 5)]), (1, PIECE_BYTES + PAGE, [range(1)])],
)
def test_population_has_whole_slots(shm: Path, slots: int, chunk_bytes: int, pieces: list[range]) -> None:
    with Region.open("a", slots, chunk_bytes, shm) as region:
        assert ready_slots(region, slots) == pieces
        assert region.path is not None
        assert region.path.stat().st_blocks * 512 == region.nbytes


def test_population_keeps_data(shm: Path) -> None:
    with Region.open("a", 8, PAGE, shm) as creator, Region.open("a", 8, PAGE, shm) as joiner:
        creator.view(3)[:] = b"k" * PAGE
        for region in (joiner, creator, joiner):
            assert ready_slots(region, 8) == [range(8)]
        assert joiner.view(3) == b"k" * PAGE


@pytest.mark.parametrize("helper", [True, False])
@pytest.mark.parametrize("make", [Region.anonymous, Region.unnamed])
def test_unnamed_memory_is_populated(
    make: Callable[[int, int], Region], helper: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not helper:
        monkeypatch.setattr(native, "library", None)
    with make(8, PAGE) as region:
        assert region.path is None
        region.claim()
        assert ready_slots(region, 8) == [range(8)]


@pytest.mark.parametrize("make", [Region.anonymous, Region.unnamed])
def test_core_dumps_lack_slots(make: Callable[[int, int], Region]) -> None:
    with make(8, PAGE) as region:
        places = re.findall(
            r"^(\w+)-(\w+) .*?^VmFlags: (.*?)$",
            Path("/proc/self/smaps").read_text(),
            re.MULTILINE | re.DOTALL,
        )
        at = region.address
        flags = [flags for start, end, flags in places if int(start, 16) <= at < int(end, 16)]
        assert "dd" in flags[0].split()


def test_close_stops_population(shm: Path) -> None:
    seen: list[range] = []
    first = threading.Event()

    def on_ready(piece: range) -> None:
        seen.append(piece)
        region.close()
        first.set()

    with Region.open("a", 4, PIECE_BYTES, shm) as region:
        region.populate(on_ready, threads=1)
        assert first.wait(30)
    assert seen == [range(1)]


def test_populating_memory_stays_mapped(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "_JOIN_S", 0.01)
    begun, go_on = threading.Event(), threading.Event()
    back = pages.back

    def slow(*arguments: Any, **more: Any) -> int:
        begun.set()
        assert go_on.wait(30)
        return back(*arguments, **more)

    monkeypatch.setattr(pages, "back", slow)
    region = Region.open("a", 1, PIECE_BYTES, shm)
    pieces: list[range] = []
    others = set(threading.enumerate())
    region.populate(pieces.append, threads=1)
    (thread,) = set(threading.enumerate()) - others
    assert begun.wait(30)
    region.close()
    with pytest.raises(StateError):
        region.view(0)
    assert len(mapped(shm)) == 1
    go_on.set()
    thread.join(30)
    assert mapped(shm) == []
    assert os.listdir(shm) == []
    assert pieces == []


def test_close_awaits_allocation(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would write to another file, which got the descriptor's number meanwhile."""
    region = Region.open("a", 1, PAGE, shm)
    closer, own = threading.Thread(target=region.close), os.fstat(region.fileno())
    files: list[os.stat_result] = []

    def back(address: int, nbytes: int, fd: int, *arguments: object, **more: object) -> int:
        closer.start()
        closer.join(0.1)  # it ends at once unless it waits
        with (shm / "other").open("wb"):
            files.append(os.fstat(fd))
        return 0

    monkeypatch.setattr(pages, "back", back)
    region.back(range(1))
    closer.join(30)
    assert os.path.samestat(files[0], own)


def mapped(folder: Path) -> list[str]:
    """Return the files of a folder that this process has mapped."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


@pytest.mark.parametrize("fails", [False, True])
def test_population_end_told_once(fails: bool, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Semaphore(0)
    if fails:
        monkeypatch.setattr(pages, "back", lambda *_, **__: errno.ENOSPC)
    pieces: list[range] = []

    def on_ready(piece: range) -> None:
        pieces.append(piece)
        if not piece:
            ended.release()

    with Region.open("a", 3, PIECE_BYTES, shm) as region:
        region.populate(on_ready, threads=2)
        assert ended.acquire(timeout=30)
        assert sorted(piece.start for piece in pieces[:-1]) == ([] if fails else [0, 1, 2])
    assert not ended.acquire(blocking=False)


def test_short_memory_has_fewer_slots(small_tmpfs: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "kvtier.memory")
    with Region.open("a", 4, 32 * MIB, small_tmpfs) as region:
        with (small_tmpfs / "other").open("wb") as other:
            os.posix_fallocate(other.fileno(), 0, 60 * MIB)
        pieces: queue.Queue[range] = queue.Queue()
        region.populate(pieces.put, threads=1)
        assert [pieces.get(timeout=30) for _ in range(2)] == [range(2), range(0)]
        region.view(1)[:] = b"x" * 32 * MIB
    assert pieces.empty()
    (record,) = caplog.records
    assert f"lacks {64 * MIB} of {128 * MIB} bytes (ENOSPC)" in record.getMessage()
    assert "2 of 4 slots" in record.getMessage()


@pytest.mark.parametrize("theirs", ["3 slots", ""])
def test_equal_size_is_not_enough(shm: Path, theirs: str) -> None:
    # The same total bytes, split differently: one slot here overlaps two slots there.
    with Region.open("a", 3, 2 * PAGE, shm, contents=theirs):
        with pytest.raises(RegionError, match=f"{theirs}.*6 slots.* need the same settings"):
            Region.open("a", 6, PAGE, shm, contents="6 slots")
        Region.open("a", 3, 2 * PAGE, shm, contents=theirs).close()
    assert os.listdir(shm) == []
