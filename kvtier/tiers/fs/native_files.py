"""Work on files by the native helper: one foreign call a batch, without the interpreter lock."""

from __future__ import annotations

import ctypes
import os
from typing import Final

from kvtier.tiers.fs.call import FileCall, StopFlag

PART_BYTES: Final = 256 * 1024
"""What a thread of a pool takes at once: a part costs a lock and a wake-up, microseconds."""


class NativeFiles:
    """``FileWork`` in C.

    Args:
        library: ``kvtier.native.library``, not None.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def open_pool(self, threads: int) -> int:
        """See ``FileWork.open_pool``."""
        return int(self._library.kvt_pool_open(threads) or 0)

    def close_pool(self, pool: int) -> None:
        """See ``FileWork.close_pool``."""
        self._library.kvt_pool_close(pool)

    def put(self, call: FileCall, first: int, end: int) -> int:
        """See ``FileWork.put``."""
        if call.pool:
            return int(self._library.kvt_pool_put(call.pool, call.address, first, end, _part(call)))
        return int(self._library.kvt_files_put(call.address, first, end))

    def get(self, call: FileCall, first: int, end: int) -> None:
        """See ``FileWork.get``."""
        if call.pool:
            self._library.kvt_pool_get(call.pool, call.address, first, end, _part(call))
        else:
            self._library.kvt_files_get(call.address, first, end)

    def contains(self, call: FileCall, first: int, end: int) -> None:
        """See ``FileWork.contains``."""
        self._library.kvt_files_contains(call.address, first, end)

    def discard(self, call: FileCall, first: int, end: int) -> int:
        """See ``FileWork.discard``."""
        return int(self._library.kvt_files_discard(call.address, first, end))

    def tree_bytes(self, root_fd: int, path: str, stop: StopFlag) -> int:
        """See ``FileWork.tree_bytes``."""
        return _bytes_or_raise(self._library.kvt_tree_bytes(root_fd, path.encode(), stop.address), path)

    def tree_remove(self, root_fd: int, path: str, stop: StopFlag) -> int:
        """See ``FileWork.tree_remove``."""
        return _bytes_or_raise(self._library.kvt_tree_remove(root_fd, path.encode(), stop.address), path)


def _part(call: FileCall) -> int:
    """Return how many chunks a thread of a pool takes at once."""
    return max(1, PART_BYTES // call.place.chunk_bytes)


def _bytes_or_raise(result: int, path: str) -> int:
    if result < 0:
        raise OSError(-result, os.strerror(-result), path)
    return result
