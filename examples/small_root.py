"""What a small root keeps of a burst: ``python examples/small_root.py FOLDER [CHUNKS [ENGINES]]``.

Each engine puts four times as many chunks as the root has room for, two batches of four at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections import Counter
from pathlib import Path

from kvtier import HeapMemory, Identity
from kvtier.keys import pack_key
from kvtier.tiers import Batch, Status, TierContext
from kvtier.tiers.fs import FsConfig, FsTier

CHUNK_BYTES = 512 * 1024
MOST_FILE_BYTES = CHUNK_BYTES + 16 * 1024  # with its trailer and three new directories
BATCH = 4
AT_ONCE = 2


async def open_tier(root: Path, chunks: int) -> FsTier:
    """Open one engine's tier on a root that may hold so many chunks."""
    tier = FsTier(FsConfig(root_dir=root, max_bytes=chunks * MOST_FILE_BYTES, min_free_bytes=0))
    await tier.open(TierContext("fs", Identity.make("org/Model-7B", {"dtype": "bfloat16"}), CHUNK_BYTES))
    return tier


async def put_burst(tier: FsTier, name: str, chunks: int, statuses: Counter[Status]) -> None:
    """Put new chunks without a pause."""
    memory = HeapMemory(BATCH, CHUNK_BYTES)
    for first in range(0, chunks, BATCH):
        numbers = range(first, min(first + BATCH, chunks))
        keys = [pack_key(hashlib.sha256(f"{name} {number}".encode()).digest()) for number in numbers]
        statuses.update((await tier.put(Batch(keys, range(len(keys)), memory))).statuses)


async def put_bursts(root: Path, chunks: int, engines: int) -> Counter[Status]:
    """Open the engines' tiers and put into all of them at once. Returns what became of the chunks."""
    tiers = [await open_tier(root, chunks) for _ in range(engines)]
    statuses: Counter[Status] = Counter()
    each = 4 * chunks // AT_ONCE
    await asyncio.gather(
        *(put_burst(tier, f"{i} {j}", each, statuses) for i, tier in enumerate(tiers) for j in range(AT_ONCE))
    )
    for tier in tiers:
        await tier.aclose()
    return statuses


def main(root: Path, chunks: int = 16, engines: int = 1) -> None:
    """Put, and say what was taken and what is kept."""
    statuses = asyncio.run(put_bursts(root, chunks, engines))
    taken = f"{statuses[Status.OK]} of {statuses.total()} taken"
    print(f"{chunks} chunks, {engines} engines: {taken}, {sum(1 for _ in root.rglob('*.bin'))} kept")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:4]))
