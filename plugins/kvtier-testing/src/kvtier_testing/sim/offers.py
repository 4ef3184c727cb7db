"""Chunks that an engine offers for a store after losing some of their blocks.

The engine names blocks as vLLM does: the blocks still held, and the index of each group's first one.
kvtier's own ``Blocks``, which needs torch, selects the blocks to copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from random import Random
from typing import TYPE_CHECKING

from kvtier.keys import OffloadKey, group_index
from kvtier_testing.sim.model import CHUNK_BYTES, GARBAGE, World, content

if TYPE_CHECKING:
    from kvtier._device.base import Blocks

_BLOCKS = 4
_BLOCK_BYTES = CHUNK_BYTES // _BLOCKS
_HOLES = ((0, 1), (0, 3), (1, 2), (1, 3), (3, 4), (2, 4), (0, 4))  # at the front, in the middle, at the end


def offer(world: World, keys: Sequence[OffloadKey], chance: Random | None) -> list[bytes | None]:
    """Return the bytes copied to each chunk's slot; None for a chunk that must not be READY.

    Without ``chance`` the engine still has all blocks.
    """
    from kvtier._device.base import Blocks

    pages: list[bytes] = []
    sizes, firsts, chunks = [0, 0], [0, 0], [0, 0]
    has_holes = chance is not None and chance.random() < 0.2
    for group, of_group in groupby(keys, group_index):
        own = list(of_group)
        present = [has for _ in own for has in _presence(chance if has_holes else None)]
        whole = b"".join(content(key, world.weights) for key in own)
        there = [block for block, has in enumerate(present) if has]
        pages += [whole[block * _BLOCK_BYTES : (block + 1) * _BLOCK_BYTES] for block in there]
        start = 0 if chance is None else _BLOCKS * chance.randrange(3)
        sizes[group], chunks[group] = len(there), len(own)
        firsts[group] = start + there[0] if there else 0
        world.seen["chunks offered with holes"] += len(there) < len(present)
    blocks, copied = Blocks.make(range(len(pages)), sizes, firsts).whole_chunks(chunks, _BLOCKS)
    filled = _copies(blocks, pages)
    return [next(filled, GARBAGE) if is_copied else None for is_copied in copied]


def _presence(chance: Random | None) -> list[bool]:
    if chance is None or chance.random() < 0.6:
        return [True] * _BLOCKS
    first, end = chance.choice(_HOLES)
    return [not first <= block < end for block in range(_BLOCKS)]


def _copies(blocks: Blocks, pages: Sequence[bytes]) -> Iterator[bytes]:
    """Yield each slot's contents after the device layer's copies; garbage if not copied."""
    start = 0
    for size, first in zip(blocks.group_sizes, blocks.first_indices, strict=True):
        entered = first % _BLOCKS if size else 0
        held = [GARBAGE[:_BLOCK_BYTES]] * entered
        held += [pages[block] for block in blocks.ids[start : start + size].tolist()]
        held += [GARBAGE[:_BLOCK_BYTES]] * (-len(held) % _BLOCKS)
        for chunk in range(0, len(held), _BLOCKS):
            yield b"".join(held[chunk : chunk + _BLOCKS])
        start += size
