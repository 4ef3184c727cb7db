"""How soon a file tier answers that is opened on a root which holds many chunks.

The chunks are put by the tier itself, without being measured. Then it is closed and opened again, with the
kernel's caches as they are: warm. Measured from the call that opens it: until it is open, until the first
chunks that are there and the first that are not have been looked up, and until it knows all chunks without
asking the disk.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import anyio

from kvtier.cli import room
from kvtier.cli.report import progress
from kvtier.errors import ConfigError
from kvtier.identity import Identity
from kvtier.keys import OffloadKey, pack_key
from kvtier.testing.memory import HeapMemory
from kvtier.tiers.base import Batch, Status, TierContext
from kvtier.tiers.fs import FsConfig, FsTier
from kvtier.tiers.fs.layout import BLOCK_BYTES

CHUNKS = 100_000
ROUNDS = 3
CHUNK_BYTES = BLOCK_BYTES
_LEAST_BYTES = 2 * BLOCK_BYTES
"""What one chunk takes on every file system: its file with the trailer."""

LOOKED_UP = 64
_AT_ONCE = 512
_PAUSE_S = 0.01
_PATIENCE_S = 3600.0
_CONTEXT = TierContext("bench", Identity.make("kvtier-bench", {"purpose": "a measurement"}), CHUNK_BYTES)


@dataclass(frozen=True)
class RootStart:
    """Seconds from opening a file tier on a root with many chunks, medians.

    Attributes:
        chunks: how many there are.
        open_s: until the tier is open.
        answered_s: until 64 chunks that are there and 64 that are not were looked up.
        worst_s: the same, the longest of all rounds.
        known_s: until all chunks are known without asking the disk.
        lookup_ms: meanwhile, for 64 chunks that are not there.
    """

    chunks: int
    open_s: float
    answered_s: float
    worst_s: float
    known_s: float
    lookup_ms: float


@dataclass(frozen=True)
class _Times:
    open_s: float
    answered_s: float
    known_s: float
    lookups_s: list[float]


def run(root: Path | None, *, chunks: int = CHUNKS, rounds: int = ROUNDS) -> list[RootStart]:
    """Measure it.

    Args:
        root: where a directory is made that is removed again; None for a temporary one.
        chunks: how many the root holds; each takes 8 KiB as a file, with inodes for it and two directories.
        rounds: how often the tier is opened.

    Raises:
        KVTierError: there is no room for them.
    """
    return [_measure(root, chunks, rounds)]


def _measure(root: Path | None, chunks: int, rounds: int) -> RootStart:
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=root) as folder:
        room.require(Path(folder).parent, chunks * _LEAST_BYTES, f"{chunks:,} chunks")
        root_dir = Path(folder) / "root"
        config = FsConfig(root_dir=root_dir, eviction="none", max_bytes=2**62, min_free_bytes=0)
        anyio.run(_fill, config, chunks)
        times = [anyio.run(_start, config, chunks) for _ in range(rounds)]
    return RootStart(
        chunks,
        median(one.open_s for one in times),
        median(one.answered_s for one in times),
        max(one.answered_s for one in times),
        median(one.known_s for one in times),
        1e3 * median(second for one in times for second in one.lookups_s),
    )


async def _fill(config: FsConfig, chunks: int) -> None:
    memory = HeapMemory(_AT_ONCE, CHUNK_BYTES)
    with progress("chunks put", chunks) as tick:
        async with _opened(config) as tier:
            for first in range(0, chunks, _AT_ONCE):
                keys = _keys(range(first, min(chunks, first + _AT_ONCE)))
                outcome = await tier.put(Batch(keys, range(len(keys)), memory))
                if set(outcome.statuses) != {Status.OK}:
                    reasons = ", ".join(outcome.reasons)
                    raise ConfigError(
                        f"{config.root_dir} does not take {chunks:,} chunks ({reasons}): {room.REMEDY}"
                    )
                tick(len(keys))


async def _start(config: FsConfig, chunks: int) -> _Times:
    there, missing = _keys(range(min(chunks, LOOKED_UP))), _keys(range(chunks, chunks + LOOKED_UP))
    lookups_s: list[float] = []
    began = time.perf_counter()
    async with _opened(config) as tier:
        open_s = time.perf_counter() - began
        answers = [*await tier.contains(there), *await tier.contains(missing)]
        answered_s = time.perf_counter() - began
        if answers != [True] * len(there) + [False] * len(missing):
            raise ConfigError(
                f"{config.root_dir} was changed meanwhile: other chunks are there than were put"
            )
        with anyio.fail_after(_PATIENCE_S):
            while tier.statistics().known_chunks < chunks:
                before = time.perf_counter()
                await tier.contains(missing)
                lookups_s.append(time.perf_counter() - before)
                await anyio.sleep(_PAUSE_S)
        return _Times(open_s, answered_s, time.perf_counter() - began, lookups_s or [answered_s - open_s])


@asynccontextmanager
async def _opened(config: FsConfig) -> AsyncIterator[FsTier]:
    tier = FsTier(config)
    await tier.open(_CONTEXT)
    try:
        yield tier
    finally:
        await tier.aclose()


def _keys(numbers: Sequence[int]) -> list[OffloadKey]:
    return [pack_key(hashlib.sha256(number.to_bytes(8, "big")).digest()) for number in numbers]
