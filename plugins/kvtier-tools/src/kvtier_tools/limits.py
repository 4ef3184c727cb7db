"""The needs of a configuration on this machine: memory, ``/dev/shm``, disks and locked memory."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from kvtier._build import LEAST_CHUNKS
from kvtier._memory.memory_limits import memory_limits
from kvtier._memory.region import SHARED_MEMORY
from kvtier_tools.report import Bytes


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a setting needs of a place, and the bytes that this machine has there."""

    tier: str
    setting: str
    wanted_bytes: int
    has_bytes: int
    place: Path | str
    remedy: str

    @property
    def is_met(self) -> bool:
        return self.wanted_bytes <= self.has_bytes

    def __str__(self) -> str:
        return f"{self.setting} is {Bytes(self.wanted_bytes)}, and {self.place} has {Bytes(self.has_bytes)}"


def memory_needs(tier: str, wanted_bytes: int, *, is_engine: bool) -> list[Need]:
    """Return what a primary tier needs: of the smallest memory limit, and of an engine's ``/dev/shm``."""
    name = "cpu_bytes_to_use"
    limit = min(memory_limits(), key=lambda limit: limit.limit_bytes)
    less = f"set {name} to less, or run this on the engine's machine"
    needs = [Need(tier, name, wanted_bytes, limit.limit_bytes, limit.path, less)]
    if is_engine and (shared := shutil.disk_usage(SHARED_MEMORY).total):  # 0: no limit
        larger = f"mount -o remount,size={-(-wanted_bytes // 2**20)}M {SHARED_MEMORY}; docker run --shm-size"
        needs.append(Need(tier, name, wanted_bytes, shared, SHARED_MEMORY, f"{larger}; or {less}"))
    return needs


def disk_need(tier: str, max_bytes: int, root: Path) -> Need:
    """Return what a root needs of its disk. OSError if the disk cannot be asked."""
    disk = next(path for path in (root, *root.parents) if path.exists())
    remedy = "set max_bytes to less, or run this on the engine's machine"
    return Need(tier, "max_bytes", max_bytes, shutil.disk_usage(disk).total, disk, remedy)


def chunks_need(tier: str, max_bytes: int, chunk_bytes: int) -> Need:
    """Return what the least number of chunks needs of a root's limit."""
    wanted = LEAST_CHUNKS * chunk_bytes
    return Need(tier, f"room for {LEAST_CHUNKS} chunks", wanted, max_bytes, "max_bytes", "raise max_bytes")
