"""Work on chunks' files by the native helper: one foreign call a batch, without the interpreter lock."""

from __future__ import annotations

import ctypes
import errno
import os
from array import array
from collections.abc import Callable
from typing import ClassVar, Final

from kvtier._native.layouts import TreeSums
from kvtier.tiers.fs._files.base import Failures, part_path
from kvtier.tiers.fs._files.call import FileCall, Place, StopFlag
from kvtier.tiers.fs._files.python import ChunkFiles

_LISTED_AT_ONCE: Final = 1024


class NativeFiles(ChunkFiles):
    """``ChunkFiles`` in C.

    Args:
        library: ``kvtier._native.library``, not None.
    """

    is_native: ClassVar[bool] = True

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def put(self, call: FileCall, first: int, end: int) -> int:
        return int(self.library.kvt_files_put(call.address, first, end))

    def get(self, call: FileCall, first: int, end: int) -> None:
        self.library.kvt_files_get(call.address, first, end)

    def contains(self, call: FileCall, first: int, end: int) -> None:
        self.library.kvt_files_contains(call.address, first, end)

    def discard(self, call: FileCall, first: int, end: int) -> int:
        return int(self.library.kvt_files_discard(call.address, first, end))

    def touch(self, call: FileCall, first: int, end: int) -> None:
        self.library.kvt_files_touch(call.address, first, end)

    def fingerprints(self, place: Place, part: int, stop: StopFlag) -> array[int]:
        room, path = _LISTED_AT_ONCE, part_path(place, part).encode()
        while True:
            marks = array("Q", bytes(8 * room))
            count = self.library.kvt_chunks_list(
                place.root_fd, path, stop.address, marks.buffer_info()[0], room
            )
            if count <= room:
                break
            room = 2 * count
        if count < 0 and count != -errno.ENOENT:
            raise OSError(-count, os.strerror(-count), path)
        return marks[: max(0, count)]

    def tree_bytes(self, root_fd: int, path: str, stop: StopFlag, failures: Failures | None = None) -> int:
        return _walk(self.library.kvt_tree_bytes, root_fd, path, stop, failures)

    def tree_remove(self, root_fd: int, path: str, stop: StopFlag, failures: Failures | None = None) -> int:
        return _walk(self.library.kvt_tree_remove, root_fd, path, stop, failures)


def _walk(
    function: Callable[..., int], root_fd: int, path: str, stop: StopFlag, failures: Failures | None
) -> int:
    sums = TreeSums()
    result = function(root_fd, path.encode(), stop.address, ctypes.byref(sums))
    if failures is not None and sums.failed:
        failures[sums.error] += sums.failed
    if result < 0:
        raise OSError(-result, os.strerror(-result), path)
    return int(sums.bytes)
