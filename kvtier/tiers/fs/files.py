"""The format ``files``: a file for each chunk. What its two ways of working have in common."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from kvtier.keys import MAX_KEY_BYTES, OffloadKey, pack_key
from kvtier.tiers.fs import layout
from kvtier.tiers.fs.call import FileCall, Place, StopFlag
from kvtier.tiers.fs.layout import BLOCK_BYTES

_PATH: Final = re.compile(r"[0-9a-f]{3}/[0-9a-f]{2}_g([0-9]{1,10})/((?:[0-9a-f]{2})+)\.bin")


class Files:
    """What a ``Store`` of files does alike, however it works on them."""

    format: Final = "files"

    def set_aside(self, call: FileCall, i: int, target: str) -> bool:
        """See ``Store.set_aside``: the file is moved, unless another one has taken its place since."""
        root_fd, path = call.place.root_fd, layout.chunk_path(call.place.data_dir, call.keys[i])
        with suppress(FileNotFoundError):
            if os.stat(path, dir_fd=root_fd, follow_symlinks=False).st_ino == call.inodes[i]:
                os.rename(path, target, src_dir_fd=root_fd, dst_dir_fd=root_fd)
                return True
        return False

    def close(self) -> None:
        """See ``Store.close``: nothing is open."""

    def most_bytes(self, chunk_bytes: int) -> int:
        """See ``Store.most_bytes``: the trailer's block, and the directories above."""
        return chunk_bytes + BLOCK_BYTES * (1 + layout.CHUNK_DIRECTORIES)

    def forget(self, place: Place, units: Sequence[str]) -> Sequence[OffloadKey]:
        """See ``Store.forget``: the path says which chunk it was."""
        del place
        found = (key_of(path) for path in units)
        return [key for key in found if key is not None]

    def tend(self, place: Place, stop: StopFlag) -> int:
        """See ``Store.tend``: there is nothing to do."""
        del place, stop
        return 0


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
    """Name one of the ``PARTS`` directories of an epoch."""
    return f"{place.data_dir}/{part:03x}"
