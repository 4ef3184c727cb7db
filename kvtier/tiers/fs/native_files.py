"""Work on files by the native helper: one foreign call a job, without the interpreter lock."""

from __future__ import annotations

import ctypes
import os

from kvtier.tiers.fs.call import FileCall, StopFlag


class NativeFiles:
    """``FileWork`` in C.

    Args:
        library: ``kvtier.native.library``, not None.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def put(self, call: FileCall, first: int, end: int) -> int:
        """See ``FileWork.put``."""
        return int(self._library.kvt_files_put(call.address, first, end))

    def get(self, call: FileCall, first: int, end: int) -> None:
        """See ``FileWork.get``."""
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


def _bytes_or_raise(result: int, path: str) -> int:
    if result < 0:
        raise OSError(-result, os.strerror(-result), path)
    return result
