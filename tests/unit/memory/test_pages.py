"""Huge pages if available, and NUMA nodes if present."""

from __future__ import annotations

import logging
import mmap
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvtier._memory import numa, pages
from kvtier._memory.population import SlotPart
from kvtier._memory.region import Region

if TYPE_CHECKING:
    from tests.unit.memory.conftest import Mounted

MIB = 2**20
PAGE = mmap.PAGESIZE


@pytest.fixture(params=["advise", "never"])
def tmpfs(request: pytest.FixtureRequest, mounted: Mounted) -> Iterator[tuple[Path, str]]:
    """A file system in memory, and its option ``huge``."""
    with mounted(f"size=64m,huge={request.param}") as path:
        yield path, request.param


def populate(region: Region, parts: list[SlotPart] | None = None, threads: int = 1) -> list[int]:
    """Populate a region and return the slots in the order in which they became ready."""
    ready: queue.SimpleQueue[range] = queue.SimpleQueue()
    region.populate(ready.put, parts or [], threads)
    slots: list[int] = []
    while len(slots) < region.slots:
        slots += ready.get(timeout=20)
    return slots


def test_huge_pages_are_reported(tmpfs: tuple[Path, str], caplog: pytest.LogCaptureFixture) -> None:
    directory, option = tmpfs
    caplog.set_level(logging.INFO, "kvtier.memory")
    granted = option == "advise"
    with Region.open("a", 8, 4 * MIB, directory) as region:
        populate(region)
        region.close()
    assert pages.grants_huge(directory / "file") is granted
    assert f"8 slots, {32 * MIB} bytes, {'with' if granted else 'without'} huge pages" in caplog.text


@pytest.mark.parametrize(("setting", "granted"), [("advise", True), ("never", False), ("deny", False)])
def test_shmem_setting_decides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, setting: str, granted: bool
) -> None:
    (tmp_path / "enabled").write_text("[madvise] never")
    (tmp_path / "shmem_enabled").write_text(f"always [{setting}]")
    monkeypatch.setattr(pages, "_SETTINGS", tmp_path)
    assert pages.grants_huge(None, shared=True) is granted
    assert pages.grants_huge(None)


def test_parts_come_from_their_nodes(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int | None, int, int]] = []
    node: list[int | None] = [None]

    class Preferring:
        def __init__(self, wanted: int | None) -> None:
            node[0] = wanted

        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None:
            node[0] = None

    def back(address: int, nbytes: int, file: object, offset: int, *, huge: bool) -> int:
        asked.append((node[0], offset, nbytes))
        return 0

    monkeypatch.setattr(numa, "preferring", Preferring)
    monkeypatch.setattr(pages, "back", back)
    size = 3 * PAGE
    with Region.open("a", 2, size, shm) as region:
        populate(region, [SlotPart(0, PAGE + 100, 0), SlotPart(PAGE + 100, PAGE, 1)])
    assert asked == [
        (0, 0, 2 * PAGE),
        (0, size, 2 * PAGE),
        (1, PAGE, 2 * PAGE),
        (1, size + PAGE, 2 * PAGE),
    ]


def test_preferred_node_is_asked() -> None:
    if not numa.online():
        pytest.skip("the kernel tells of no NUMA nodes")
    node = min(numa.online())

    def policy() -> str:
        return Path("/proc/thread-self/numa_maps").read_text()

    if not Path("/proc/thread-self/numa_maps").exists():
        pytest.skip("the kernel has no NUMA policies")
    with numa.preferring(node):
        assert f"prefer:{node}" in policy() or f"prefer={node}" in policy()
    assert "prefer" not in policy()


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    for node, cpus in {0: (0, 1), 1: (2, 3)}.items():
        for cpu in cpus:
            (tmp_path / f"node{node}" / f"cpu{cpu}").mkdir(parents=True)
    (tmp_path / "node1x").mkdir()
    (tmp_path / "possible").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("cpus", "node"), [({0}, 0), ({2, 3}, 1), ({1, 2}, None), ({9}, None), (set(), None)]
)
def test_cpus_have_a_node(two_nodes: Path, cpus: set[int], node: int | None) -> None:
    assert numa.online(two_nodes) == {0, 1}
    assert numa.node_of_cpus(cpus, two_nodes) == node


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("-1\n", None), ("", None), (None, None)])
def test_kernel_tells_device_node(tmp_path: Path, text: str | None, node: int | None) -> None:
    device = tmp_path / "0000:3b:00.0"
    device.mkdir()
    if text is not None:
        (device / "numa_node").write_text(text)
    assert numa.node_of_pci("0000:3b:00.0", tmp_path) == node
