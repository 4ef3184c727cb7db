"""What a process holds, as the kernel counts it, and what is in a directory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class ProcessStats:
    """One process.

    Attributes:
        memory_bytes: resident anonymous memory, what is swapped out included. Not what is shared through
            files; and a page that was shared with the parent of a fork counts the same after a write to it.
        disk_files: open descriptors of what is below the directory that was named.
        other_files: all the others: sockets, pipes, shared memory, what the engine itself has open.
        threads: as the kernel counts them.
    """

    memory_bytes: int
    disk_files: int
    other_files: int
    threads: int

    @staticmethod
    def of(pid: int, disk: Path) -> ProcessStats:
        """Look at a process.

        Raises:
            OSError: it has ended.
        """
        folder = Path("/proc", str(pid))
        opened = _opened(pid)
        on_disk = sum(path.is_relative_to(disk) for path in opened)
        kib = dict(
            (name, int(rest.split()[0]))
            for name, _, rest in (
                line.partition(":") for line in (folder / "smaps_rollup").read_text().splitlines()[1:]
            )
        )
        return ProcessStats(
            (kib["Anonymous"] + kib["Swap"]) * 1024,
            on_disk,
            len(opened) - on_disk,
            len(os.listdir(folder / "task")),
        )


class SharedMemory:
    """The files in shared memory that some processes use, or have used and left behind.

    Others use shared memory as well, so what was there before is not looked at, and a new file counts from
    the moment on that one of the processes was seen with it.
    """

    def __init__(self) -> None:
        self._earlier = set(_files(SHARED_MEMORY))
        self._ours: set[Path] = set()

    def look(self, pids: Iterable[int]) -> None:
        """Note which files the processes have mapped or opened."""
        for pid in pids:
            self._ours |= _used(pid) - self._earlier

    def left(self) -> tuple[int, int]:
        """Return how many files there are of those that were noted so far, and the bytes they take."""
        sizes = []
        for path in self._ours:
            with suppress(OSError):
                sizes.append(path.stat().st_blocks * 512)
        return len(sizes), sum(sizes)


def on_disk(root: Path) -> tuple[int, int]:
    """Return how many files and directories lie below ``root``, and the bytes that they take.

    One that is renamed meanwhile, as every chunk is when it is whole, counts once.
    """
    found: dict[int, int] = {}
    for parent, folders, names in os.walk(root):
        for name in (*folders, *names):
            with suppress(OSError):
                its = os.lstat(os.path.join(parent, name))
                found[its.st_ino] = its.st_blocks * 512
    return len(found), sum(found.values())


def zombies_of(pid: int) -> int:
    """Return how many children of a process have ended and were not waited for."""
    count = 0
    for task in _listed(Path("/proc", str(pid), "task")):
        with suppress(OSError):
            for child in (task / "children").read_text().split():
                count += _state(int(child)) == "Z"
    return count


def _state(pid: int) -> str:
    with suppress(OSError):
        return Path("/proc", str(pid), "stat").read_text().rpartition(") ")[2].split()[0]
    return ""


def _used(pid: int) -> set[Path]:
    folder = Path("/proc", str(pid))
    found = set()
    with suppress(OSError):
        for line in (folder / "maps").read_text().splitlines():
            found.add(Path("/" + line.partition("/")[2]))
    return {path for path in (*found, *_opened(pid)) if path.parent == SHARED_MEMORY}


def _opened(pid: int) -> list[Path]:
    """Return what each open descriptor of a process stands for."""
    found = []
    for link in _listed(Path("/proc", str(pid), "fd")):
        with suppress(OSError):
            found.append(Path(os.readlink(link)))
    return found


def _files(folder: Path) -> list[Path]:
    return [path for path in _listed(folder) if path.is_file()]


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
