"""Benchmark of the file tier: put and get through its public interface, compared with the bare disk.

The disk is measured with a large file on the same file system, which several threads read and overwrite with
direct I/O. If vLLM is installed, the same rounds measure the compiled path of its own fs tier. ``throughput``
describes the method.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Final

from kvtier.tiers.fs import FsConfig
from kvtier.tiers.fs._layout import BLOCK_BYTES
from kvtier_bench.machine import Machine, open_folder, require_room
from kvtier_bench.storage import disk
from kvtier_bench.storage.disk import Disk, raw_disk
from kvtier_bench.storage.movers import BATCHES_IN_FLIGHT, SIZES, Contestant
from kvtier_bench.storage.throughput import Throughput, compare
from kvtier_bench.storage.tier import opened

BATCH_CHUNKS: Final = 64
KVTIER: Final = "kvtier"
VLLM: Final = "vllm"

_UNBOUNDED: Final = 2**62
_BATCH_BYTES: Final = 2**25


def run(
    root: Path, sizes: Sequence[int] = SIZES, mib: int = 512, rounds: int = 5
) -> list[Throughput | Machine]:
    """Measure with files below ``root``, and remove the files.

    Args:
        sizes: bytes of a chunk, multiples of 4096.
        rounds: number of repetitions; the figures are medians.

    Raises:
        KVTierError: the file system has too little room, or the tier failed.
    """
    nbytes = mib * 2**20
    in_flight = BATCHES_IN_FLIGHT * BATCH_CHUNKS
    chunks = max(int((nbytes / size + in_flight) * (size + BLOCK_BYTES)) for size in sizes)
    points: list[Throughput] = []
    with open_folder(root) as folder:
        require_room(root, disk.FILE_BYTES + chunks, "chunks, and the file that shows the disk's rate")
        with raw_disk(folder) as limit:
            for size in sizes:
                points += asyncio.run(_measure_size(folder, size, nbytes, rounds, limit))
        return [Machine.here(root), *points]


def read_bytes_s(root: Path, chunk_bytes: int, mib: int = 256) -> int:
    """Return the file tier's read rate below ``root`` in bytes per second. Its files are removed.

    Raises:
        KVTierError: the file system has too little room, or the tier failed.
    """
    batch_chunks = max(1, min(BATCH_CHUNKS, _BATCH_BYTES // chunk_bytes))
    nbytes = max(mib * 2**20, BATCHES_IN_FLIGHT * batch_chunks * chunk_bytes)
    with open_folder(root) as folder:
        require_room(root, 2 * nbytes, "chunks")
        return asyncio.run(_measure_reads(folder, chunk_bytes, batch_chunks, nbytes))


async def _measure_reads(root: Path, chunk_bytes: int, batch_chunks: int, nbytes: int) -> int:
    async with opened(_config(root), chunk_bytes, batch_chunks) as (tier, _):
        rows = await compare({KVTIER: tier}, None, chunk_bytes, nbytes, rounds=1)
    return int(next(row.gb_s for row in rows if row.verb == "get") * 1e9)


def _config(root: Path) -> FsConfig:
    unbounded = {"max_bytes": _UNBOUNDED, "min_free_bytes": 0, "eviction": "none"}
    return FsConfig.model_validate({"root_dir": root / KVTIER, **unbounded})


async def _measure_size(root: Path, size: int, nbytes: int, rounds: int, limit: Disk) -> list[Throughput]:
    async with AsyncExitStack() as stack:
        kvtier, _ = await stack.enter_async_context(opened(_config(root), size, BATCH_CHUNKS))
        subjects: dict[str, Contestant] = {KVTIER: kvtier}
        with suppress(ImportError):
            vllm = importlib.import_module("kvtier_bench.storage.vllm_files").VllmFiles(
                root / VLLM, kvtier.memory
            )
            stack.callback(vllm.close)
            subjects[VLLM] = vllm
        return await compare(subjects, limit, size, nbytes, rounds)
