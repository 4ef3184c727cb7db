"""Names and sizes of chunks' files, and what of them could not be worked on."""

from __future__ import annotations

import re
from collections import Counter
from typing import Final, TypeAlias

from kvtier.keys import MAX_KEY_BYTES, OffloadKey, pack_key
from kvtier.tiers.fs._files.call import Place
from kvtier.tiers.fs._layout import BLOCK_BYTES, CHUNK_DIRECTORIES

Failures: TypeAlias = Counter[int]
"""Files and directories that could not be removed or looked into, by errno."""

PARTS: Final = 4096
"""Directories of the first level of an epoch: what is listed at once."""

_PATH: Final = re.compile(r"[0-9a-f]{3}/[0-9a-f]{2}_g([0-9]{1,10})/((?:[0-9a-f]{2})+)\.bin")


def most_bytes(chunk_bytes: int) -> int:
    """Return the most bytes that putting one chunk can take on disk, new directories included."""
    return chunk_bytes + BLOCK_BYTES * (1 + CHUNK_DIRECTORIES)


def key_of(path: str) -> OffloadKey | None:
    """Return the key of the chunk in a file, or None where it is no chunk's.

    Args:
        path: relative to the epoch's directory.
    """
    found = _PATH.fullmatch(path)
    if found is None or int(found.group(1)) >= 1 << 32:
        return None
    content = bytes.fromhex(found.group(2))
    if len(content) > MAX_KEY_BYTES - 4:
        return None
    return pack_key(content, int(found.group(1)))


def part_path(place: Place, part: int) -> str:
    """Return the path of one of the ``PARTS`` directories of an epoch."""
    return f"{place.data_dir}/{part:03x}"
