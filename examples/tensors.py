"""Move the KV cache of an engine of your own through host memory and files, without vLLM.

Run it as ``python examples/tensors.py DIRECTORY``: it stores eight chunks, forgets the manager, opens
another one on the same directory, and gets the same bytes back from the files.
"""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
import torch

from kvtier import Identity, KVCaches, PageRef, TieringConfig, open_manager, pack_key

LAYERS, BLOCKS, PAGE_BYTES = 4, 64, 16384


def make_caches() -> KVCaches:
    """Stand in for an engine: one tensor of pages for each layer, all used by one group of blocks."""
    tensors = tuple(torch.randint(-128, 128, (BLOCKS, PAGE_BYTES), dtype=torch.int8) for _ in range(LAYERS))
    return KVCaches(tensors, (tuple(PageRef(layer, PAGE_BYTES) for layer in range(LAYERS)),))


async def main(root: Path) -> None:
    """Store, start anew, load, compare."""
    config = TieringConfig.from_mapping(
        {
            "cpu_bytes_to_use": "8MiB",
            # Left away, max_bytes is 80 % of what is free, and min_free_bytes 5 % of the disk.
            "secondary_tiers": [
                {"type": "fs", "root_dir": str(root), "max_bytes": "1GiB", "min_free_bytes": 0}
            ],
        }
    )
    # All that the bytes depend on. A cache of another identity is never given these chunks.
    identity = Identity.make("my-model", {"dtype": "int8", "layers": LAYERS, "weights": "v1"})
    keys = [pack_key(bytes([index]) * 32) for index in range(8)]  # in an engine: hashes of token prefixes

    caches = make_caches()
    before = [tensor[:8].clone() for tensor in caches.tensors]
    async with open_manager(config, identity, caches) as manager:
        print("stored", await manager.store(keys, blocks=range(8)), "chunks")

    caches = make_caches()  # other contents: nothing of the first run is left in memory
    async with open_manager(config, identity, caches) as manager:
        print("loaded", await manager.load(keys, blocks=range(32, 40)), "chunks")
        print(
            "from",
            {name[1]: int(n) for name, n in manager.statistics().counts.items() if name[0] == "loaded"},
        )
    same = all(
        torch.equal(tensor[32:40], saved) for tensor, saved in zip(caches.tensors, before, strict=True)
    )
    print("the same bytes:", same)
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]))
