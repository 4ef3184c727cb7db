"""Work on files by the native helper: one foreign call a batch, without the interpreter lock."""

from __future__ import annotations

import ctypes
import errno
import os
from array import array
from typing import Final

from kvtier import native
from kvtier.tiers.fs.call import FileCall, Place, StopFlag, Verb
from kvtier.tiers.fs.files import Files, part_path

PART_BYTES: Final = 256 * 1024
"""What a thread of a pool takes at once: a part costs a lock and a wake-up, microseconds."""

_LISTED_AT_ONCE: Final = 1024
_ENDED_AT_ONCE: Final = 64


class NativeFiles(Files):
    """``Store`` of files in C.

    Args:
        library: ``kvtier.native.library``, not None.
    """

    is_native: Final = True

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def open_pool(self, readers: int, writers: int) -> int:
        """See ``FileWork.open_pool``."""
        return int(self._library.kvt_pool_open(readers, writers) or 0)

    def pool_fd(self, pool: int) -> int:
        """See ``FileWork.pool_fd``."""
        return int(self._library.kvt_pool_fd(pool))

    def begin(self, call: FileCall, verb: Verb, token: int) -> bool:
        """See ``FileWork.begin``."""
        work = "kvt_files_put" if verb is Verb.PUT else "kvt_files_get"
        return begin_in_pool(self._library, work, call, _part(call), token, reading=verb is Verb.GET)

    def ended(self, pool: int) -> list[tuple[int, int]]:
        """See ``FileWork.ended``."""
        return ended_in_pool(pool)

    def close_pool(self, pool: int) -> None:
        """See ``FileWork.close_pool``."""
        self._library.kvt_pool_close(pool)

    def put(self, call: FileCall, first: int, end: int) -> int:
        """See ``FileWork.put``."""
        if call.pool:
            return do_in_pool(self._library, "kvt_files_put", call, first, end, _part(call), reading=False)
        return int(self._library.kvt_files_put(call.address, first, end))

    def get(self, call: FileCall, first: int, end: int) -> None:
        """See ``FileWork.get``."""
        if call.pool:
            do_in_pool(self._library, "kvt_files_get", call, first, end, _part(call), reading=True)
        else:
            self._library.kvt_files_get(call.address, first, end)

    def contains(self, call: FileCall, first: int, end: int) -> None:
        """See ``FileWork.contains``."""
        self._library.kvt_files_contains(call.address, first, end)

    def discard(self, call: FileCall, first: int, end: int) -> int:
        """See ``FileWork.discard``."""
        return int(self._library.kvt_files_discard(call.address, first, end))

    def touch(self, call: FileCall, first: int, end: int) -> None:
        """See ``Store.touch``."""
        self._library.kvt_files_touch(call.address, first, end)

    def fingerprints(self, place: Place, part: int, stop: StopFlag) -> array[int]:
        """See ``Store.fingerprints``."""
        room = _LISTED_AT_ONCE
        while True:
            marks = array("Q", bytes(8 * room))
            path = part_path(place, part).encode()
            count = self._library.kvt_files_list(
                place.root_fd, path, stop.address, marks.buffer_info()[0], room
            )
            if count <= room:
                break
            room = 2 * count
        if count < 0 and count != -errno.ENOENT:
            raise OSError(-count, os.strerror(-count), path)
        return marks[: max(0, count)]

    def tree_bytes(self, root_fd: int, path: str, stop: StopFlag) -> int:
        """See ``FileWork.tree_bytes``."""
        return _bytes_or_raise(self._library.kvt_tree_bytes(root_fd, path.encode(), stop.address), path)

    def tree_remove(self, root_fd: int, path: str, stop: StopFlag) -> int:
        """See ``FileWork.tree_remove``."""
        return _bytes_or_raise(self._library.kvt_tree_remove(root_fd, path.encode(), stop.address), path)


def do_in_pool(
    library: ctypes.CDLL, work: str, call: FileCall, first: int, end: int, part: int, *, reading: bool
) -> int:
    """Have a function of the helper do a call's chunks in the call's pool, and wait. Returns its sum."""
    function = ctypes.cast(getattr(library, work), ctypes.c_void_p)
    return int(library.kvt_pool_do(call.pool, function, call.address, first, end, part, reading))


def begin_in_pool(
    library: ctypes.CDLL, work: str, call: FileCall, part: int, token: int, *, reading: bool
) -> bool:
    """Have a function of the helper do all of a call in the call's pool, without waiting."""
    if not call.pool or native.holding is None:
        return False
    function = ctypes.cast(getattr(library, work), ctypes.c_void_p)
    submit = native.holding.kvt_pool_submit
    failed = submit(call.pool, function, call.address, 0, len(call), part, reading, token)
    return not failed


def ended_in_pool(pool: int) -> list[tuple[int, int]]:
    """Take what has ended in a pool."""
    tokens, sums = array("Q", bytes(8 * _ENDED_AT_ONCE)), array("q", bytes(8 * _ENDED_AT_ONCE))
    found: list[tuple[int, int]] = []
    count = _ENDED_AT_ONCE if native.holding is not None else 0
    while count == _ENDED_AT_ONCE:
        assert native.holding is not None
        take = native.holding.kvt_pool_ended
        count = take(pool, tokens.buffer_info()[0], sums.buffer_info()[0], _ENDED_AT_ONCE)
        found += zip(tokens[:count], sums[:count], strict=True)
    return found


def _part(call: FileCall) -> int:
    """Return how many chunks a thread of a pool takes at once."""
    return max(1, PART_BYTES // call.place.chunk_bytes)


def _bytes_or_raise(result: int, path: str) -> int:
    if result < 0:
        raise OSError(-result, os.strerror(-result), path)
    return result
