"""The figures sampled of processes and folders, and whether each stays flat over a run.

Samples are taken at rest: all faults are over, all stores, puts and gets have ended. The first third of the
samples is warm-up (pools fill, buffers grow) and is ignored. The level of the second third is compared
with the level of the last. The level is the lower quartile: a leak raises it for good, while a connection
that was just lost, or a thread that ends, moves single samples.

A figure may grow by a constant, which covers pools, and by a rate per event that could leak (a request, a
kill). ``visible`` is the smallest leak that a run of this length would have found.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles

from tests.common import children, is_alive

FEWEST_SAMPLES = 9
"""Three in each third; with fewer samples there is no verdict."""


@dataclass(frozen=True)
class Sample:
    """All figures at one moment.

    Attributes:
        at_s: seconds since the start.
        events: number of requests, kills and so on so far.
        figures: the values by name.
    """

    at_s: float
    events: Mapping[str, int]
    figures: Mapping[str, float]


@dataclass(frozen=True)
class Bound:
    """The growth that a figure may have from the second third of a run to the last.

    Attributes:
        constant: growth allowed in runs of any length.
        event: the event that could leak it.
        for_each: growth allowed for each such event between the middles of the two thirds.
        most: limit of every single sample; None for no limit.
    """

    constant: float
    event: str
    for_each: float = 0.0
    most: float | None = None


@dataclass(frozen=True)
class Trend:
    """Figures, by their level in the second and the last third of the samples

    Attributes:
        name: the figure's name.
        second, last: its level in the second and in the last third of the samples.
        peak: the greatest of all samples.
        allowed: the permitted growth.
        visible: the smallest leak for each event that would have been found; None without an event.
        is_flat: whether it stayed within its bound.
    """

    name: str
    second: float
    last: float
    peak: float
    allowed: float
    visible: float | None
    is_flat: bool


def judge(samples: Sequence[Sample], bounds: Mapping[str, Bound]) -> list[Trend]:
    """Judge each figure that has a bound.

    Raises:
        ValueError: there are too few samples.
    """
    if len(samples) < FEWEST_SAMPLES:
        raise ValueError(f"{len(samples)} samples are too few to judge by: give it more time")
    third = len(samples) // 3
    second, last = samples[third : 2 * third], samples[-third:]
    trends = []
    for name, bound in bounds.items():
        before, after = (
            quantiles([sample.figures[name] for sample in part], n=4, method="inclusive")[0]
            for part in (second, last)
        )
        events = last[third // 2].events[bound.event] - second[third // 2].events[bound.event]
        allowed = bound.constant + bound.for_each * events
        peak = max(sample.figures[name] for sample in samples)
        is_flat = after - before <= allowed and (bound.most is None or peak <= bound.most)
        visible = allowed / events if events else None
        trends.append(Trend(name, before, after, peak, allowed, visible, is_flat))
    return trends


# --- the samples ---


@dataclass(frozen=True)
class ProcessStats:
    """One process.

    Attributes:
        memory_bytes: anonymous memory, resident or swapped out, without memory shared through files. A page
            shared with the parent of a fork counts the same after a write to it.
        disk_files: open descriptors of files below the named directory.
        other_files: all other descriptors: sockets, pipes, shared memory, the engine's own files.
        threads: the kernel's count of threads.
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


def shared_memory() -> set[Path]:
    """Return the files in shared memory, including other programs'."""
    return set(_listed(Path("/dev/shm")))


def on_disk(root: Path) -> tuple[int, int]:
    """Return how many files and directories lie below ``root``, and their size in bytes. A file that is

    renamed meanwhile counts once; every chunk is renamed when it is whole.
    """
    found: dict[int, int] = {}
    for parent, folders, names in os.walk(root):
        for name in (*folders, *names):
            with suppress(OSError):
                its = os.lstat(os.path.join(parent, name))
                found[its.st_ino] = its.st_blocks * 512
    return len(found), sum(found.values())


def zombies_of(pid: int) -> int:
    """Return how many children of a process are zombies."""
    return sum(not is_alive(child) for child in children(pid))


def _opened(pid: int) -> list[Path]:
    """Return the target of each open descriptor of a process."""
    found = []
    for link in _listed(Path("/proc", str(pid), "fd")):
        with suppress(OSError):
            found.append(Path(os.readlink(link)))
    return found


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
