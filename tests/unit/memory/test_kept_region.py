"""A region outlives its engine for a while: the next engine gets it once no process uses it."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier._core.slot_trailers import slot_trailers_bytes
from kvtier._memory._locked_file import kept_files, remove_kept
from kvtier._memory.region import Region
from tests.common import wait_until
from tests.unit.memory.conftest import PAGE, Holder, Holding, Mounted
from tests.unit.memory.test_guard import guards

LONG_S = 600.0


@contextmanager
def engine(holding: Holding, keep_s: float = LONG_S) -> Iterator[Holder]:
    """Run a process with a guarded region that has four bytes in slot 1."""
    with holding("engine", keep_s=keep_s) as holder:
        assert (holder.answer(), holder.tell("claim"), holder.tell("guard")) == ("open", "claimed", "guarded")
        assert holder.tell("write 1 abcd") == "written"
        yield holder


def open_region(
    shm: Path, name: str = "next", slots: int = 4, contents: str = "same 4 slots", *, is_first: bool = True
) -> Region:
    nbytes = slot_trailers_bytes(slots)
    return Region.open(name, slots, PAGE, shm, nbytes, contents, keep_s=LONG_S, is_first=is_first)


def kill_guards(shm: Path) -> None:
    for pid in guards(shm):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not guards(shm))


@pytest.fixture(autouse=True)
def _no_guard_stays(shm: Path) -> Iterator[None]:
    yield
    kill_guards(shm)


@pytest.mark.parametrize("end", ["killed", "closed", "with its guard"])
def test_next_engine_gets_region(shm: Path, holding: Holding, end: str) -> None:
    with engine(holding) as holder:
        if end == "with its guard":
            kill_guards(shm)
        if end == "closed":
            assert holder.tell("close") == "closed"
        holder.kill()
    if end != "with its guard":
        wait_until(lambda: os.listdir(shm) == ["kvtier_engine.kept"])
    with open_region(shm) as region:
        assert os.listdir(shm) == ["kvtier_next"]
        assert bytes(region.view(1)[:4]) == b"abcd"
        region.claim()
        wait_until(lambda: guards(shm) == [])
        with open_region(shm, is_first=False) as worker:
            assert bytes(worker.view(1)[:4]) == b"abcd"


def test_region_in_use_is_not_taken(shm: Path, holding: Holding) -> None:
    with engine(holding) as holder, open_region(shm) as region:
        assert bytes(region.view(1)[:4]) != b"abcd"
        assert holder.tell("read 1") == "abcd"


def test_region_that_a_worker_uses_is_not_taken(shm: Path, holding: Holding) -> None:
    with engine(holding) as holder, open_region(shm, "engine", is_first=False) as worker:
        holder.kill()
        with open_region(shm) as region:
            assert bytes(region.view(1)[:4]) != b"abcd"
        assert bytes(worker.view(1)[:4]) == b"abcd"


@pytest.mark.parametrize("writer", ["hung tier process", "stuck copy"])
def test_region_that_may_still_be_written_is_not_taken(shm: Path, writer: str) -> None:
    """Even an engine that stops in an orderly way can leave such a writer behind."""
    region, nbytes = open_region(shm, "engine"), slot_trailers_bytes(4)
    region.view(1)[:4] = b"abcd"
    tiers = Region.borrowed(os.dup(region.fileno()), 4, PAGE, nbytes)
    copy = region.view(1)
    (copy.release if writer == "hung tier process" else tiers.close)()
    region.close()
    with open_region(shm) as other:
        assert bytes(other.view(1)[:4]) != b"abcd"
    copy.release()
    tiers.close()
    del region
    with open_region(shm, "last") as other:
        assert bytes(other.view(1)[:4]) == b"abcd"


@pytest.mark.parametrize(
    ("owner", "left"), [("same", ["kvtier_next"]), ("other", ["kvtier_engine.kept", "kvtier_next"])]
)
def test_kept_region_of_another_size_goes_with_its_owner(
    shm: Path, holding: Holding, owner: str, left: list[str]
) -> None:
    with engine(holding) as holder:
        holder.kill()
    wait_until(lambda: os.listdir(shm) == ["kvtier_engine.kept"])
    with open_region(shm, slots=5, contents=f"{owner} 5 slots") as region:
        assert bytes(region.view(1)[:4]) != b"abcd"
        assert sorted(os.listdir(shm)) == left


@pytest.mark.parametrize("was_kept", [False, True])
def test_engine_spares_memory_of_another_without_a_guard(shm: Path, holding: Holding, was_kept: bool) -> None:
    """This happens after a restart of their container, if the other one starts first."""
    with engine(holding) as holder:
        if not was_kept:
            kill_guards(shm)
        holder.kill()
    if was_kept:
        wait_until(lambda: os.listdir(shm) == ["kvtier_engine.kept"])
        kill_guards(shm)
    with open_region(shm, "other", contents="other 4 slots"), open_region(shm) as region:
        assert bytes(region.view(1)[:4]) == b"abcd"
        assert sorted(os.listdir(shm)) == ["kvtier_next", "kvtier_other"]


def test_memory_that_is_not_to_be_kept_goes(shm: Path, holding: Holding) -> None:
    with holding("engine") as holder:
        assert holder.answer() == "open"
        holder.kill()
    with open_region(shm):
        assert os.listdir(shm) == ["kvtier_next"]


def test_failed_start_keeps_memory(shm: Path, holding: Holding) -> None:
    """It is killed before it has a scheduler."""
    kept = shm / "kvtier_engine.kept"
    with engine(holding) as holder:
        holder.kill()
    wait_until(kept.exists)
    with holding("engine", keep_s=LONG_S) as worker:
        assert (worker.answer(), worker.tell("guard first")) == ("open", "guarded")
        assert not kept.exists()
        worker.kill()
    wait_until(kept.exists)
    with open_region(shm) as region:
        assert bytes(region.view(1)[:4]) == b"abcd"


def test_memory_without_a_guard_gets_one(shm: Path, holding: Holding) -> None:
    with engine(holding) as holder:
        kill_guards(shm)
        holder.kill()
    with Region.open("other", 4, PAGE, shm, slot_trailers_bytes(4), "other 4 slots", keep_s=0.2):
        wait_until(lambda: os.listdir(shm) == ["kvtier_other"])


def test_memory_with_another_name_is_left(shm: Path, holding: Holding) -> None:
    """An engine was killed between the two calls that rename the file."""
    with engine(holding) as holder:
        holder.kill()
    kept, other = shm / "kvtier_engine.kept", shm / "kvtier_next"
    wait_until(kept.exists)
    os.link(kept, other)
    nbytes = other.stat().st_size
    assert remove_kept(kept)
    assert not kept.exists()
    assert other.stat().st_size == nbytes


def test_other_things_are_not_kept(shm: Path) -> None:
    """Any user may create files in /dev/shm."""
    os.mkfifo(shm / "kvtier_fifo.kept")
    (shm / "kvtier_folder.kept").mkdir()
    (shm / "kvtier_link.kept").symlink_to("/proc/self/mem")
    assert kept_files(shm) == []


def test_region_is_removed_after_its_time(shm: Path, holding: Holding) -> None:
    with engine(holding, keep_s=0.1) as holder:
        holder.kill()
    wait_until(lambda: os.listdir(shm) == [])


def test_engine_that_keeps_nothing_takes_nothing(shm: Path, holding: Holding) -> None:
    with engine(holding) as holder:
        holder.kill()
    wait_until(lambda: os.listdir(shm) == ["kvtier_engine.kept"])
    with Region.open("next", 4, PAGE, shm) as region:
        assert bytes(region.view(1)[:4]) != b"abcd"


def test_kept_memory_makes_room_at_once(mounted: Mounted) -> None:
    """Its guard, here this test, may have it open for a while longer."""
    with mounted("size=32m") as folder, (folder / "kvtier_other.kept").open("wb") as guarded:
        os.posix_fallocate(guarded.fileno(), 0, 24 * 2**20)
        fcntl.flock(guarded, fcntl.LOCK_SH)
        with Region.open("next", 4096, PAGE, folder) as region:
            assert region.path == folder / "kvtier_next"
            assert os.listdir(folder) == ["kvtier_next"]


def test_region_of_a_stuck_worker_is_removed_after_its_time(shm: Path, holding: Holding) -> None:
    with engine(holding, keep_s=0.1) as holder, open_region(shm, "engine", is_first=False):
        holder.kill()
        wait_until(lambda: os.listdir(shm) == [])
