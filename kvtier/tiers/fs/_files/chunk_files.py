"""Calls of the native library on chunks' files: one per batch, without the interpreter lock.

All calls block. Any thread may make them, several at once. Puts, gets and look-ups go through ``NativePool``.
Errors of chunks are results, never exceptions.
"""

from __future__ import annotations

import ctypes
import errno
import os
from array import array
from collections.abc import Callable, Sequence
from typing import Final

from kvtier import _native as native
from kvtier._native.layouts import TreeSums
from kvtier.errors import TierError
from kvtier.tiers.fs._files.native_call import Failures, FileCall, Place, StopFlag

_LISTED_AT_ONCE: Final = 1024
_BUILD_IT: Final = (
    "install a kvtier wheel for this platform, or install a C compiler and build the library with "
    "'python -m kvtier._native.build'"
)


def require_library() -> ctypes.CDLL:
    """Return the native library. TierError if it is not loaded."""
    if native.library is None:
        remedy = "unset KVTIER_NATIVE" if "KVTIER_NATIVE" in os.environ else _BUILD_IT
        why = f"which is not loaded ({native.missing_because})"
        raise TierError(f"the file tier needs kvtier's native library, {why}: {remedy}")
    return native.library


def discard(call: FileCall) -> int:
    """Remove the chunks' files. Returns the bytes removed."""
    return int(require_library().kvt_files_discard(call.address, 0, len(call)))


def touch(call: FileCall, classes: Sequence[int]) -> None:
    """Set the chunks' files' time of last use to now: OK or ABSENT.

    ``classes`` has each chunk's class (see ``ages.CLASS_OF_USES``); a higher one in its file stays.
    """
    call.results[:] = array("i", classes)
    require_library().kvt_files_touch(call.address, 0, len(call))


def fingerprints(place: Place, part: str, stop: StopFlag) -> array[int]:
    """Return 64 bits of each chunk's key in ``part``, a first-level directory of the epoch.

    Raises OSError if it cannot be read or ``stop`` is set.
    """
    room, path = _LISTED_AT_ONCE, f"{place.data_dir}/{part}"
    while True:
        marks = array("Q", bytes(8 * room))
        ask = require_library().kvt_chunks_list
        count = ask(place.root_fd, path.encode(), stop.address, marks.buffer_info()[0], room)
        if count <= room:
            break
        room = 2 * count
    if count < 0 and count != -errno.ENOENT:
        raise OSError(-count, os.strerror(-count), path)
    return marks[: max(0, count)]


def tree_bytes(root_fd: int, path: str, stop: StopFlag, failures: Failures | None = None) -> int:
    """Return the bytes on disk below a directory; ``failures`` counts unreadable entries."""
    return _walk(require_library().kvt_tree_bytes, root_fd, path, stop, failures)


def tree_remove(root_fd: int, path: str, stop: StopFlag, failures: Failures | None = None) -> int:
    """Remove a directory. Returns the bytes removed; ``failures`` counts entries that stay."""
    return _walk(require_library().kvt_tree_remove, root_fd, path, stop, failures)


def _walk(
    function: Callable[..., int], root_fd: int, path: str, stop: StopFlag, failures: Failures | None
) -> int:
    """Call a library function on a directory. OSError if it fails for the directory itself."""
    sums = TreeSums()
    result = function(root_fd, path.encode(), stop.address, ctypes.byref(sums))
    if failures is not None and sums.failed:
        failures[sums.error] += sums.failed
    if result < 0:
        raise OSError(-result, os.strerror(-result), path)
    return int(sums.bytes)
