"""Descriptors and memory that end with this process, although it has forked.

A forked child shares its parent's open files, so a ``flock`` of the parent, or its end of a socket, would
live on in the child and suggest that the parent is alive. ``O_CLOEXEC`` helps only if the child executes
another program.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from contextlib import suppress

_DELETED = " (deleted)"
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_PROT_NONE = 0
_alone: dict[int, str] = {}
_detached: weakref.WeakKeyDictionary[mmap.mmap, int] = weakref.WeakKeyDictionary()
_mmap: Callable[..., object] = ctypes.CDLL(None, use_errno=True).mmap
_mmap.argtypes = [  # type: ignore[attr-defined]
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
]
_mmap.restype = ctypes.c_void_p  # type: ignore[attr-defined]


def keep_fd_from_children(fd: int) -> None:
    """Replace this file, duplicates included, by ``/dev/null`` in children forked from now on.

    It may be closed at any time, by any means. The descriptor number stays in use in the child, so that a
    second close there cannot hit another file.
    """
    _alone[fd] = _name(fd)


def keep_memory_from_children(mapping: mmap.mmap, address: int) -> None:
    """Replace a mapping by reserved, inaccessible addresses in children forked from now on.

    The child maps no other memory at these addresses, and may still unmap them.
    """
    _detached[mapping] = address


def _name(fd: int) -> str:
    """Return a name that differs for a later file with the same number; asks no file system."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}").removesuffix(_DELETED)
    except OSError:
        return ""


def _detach_child() -> None:
    if _alone:
        with suppress(OSError):
            _replace_files({name for name in _alone.values() if name})
        _alone.clear()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
    for mapping, address in _detached.items():
        with suppress(ValueError):  # it is closed
            _mmap(address, len(mapping), _PROT_NONE, flags, -1, 0)
    _detached.clear()


def _replace_files(names: set[str]) -> None:
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if _name(fd) in names:  # mmap objects hold descriptors, too
            os.dup2(null, fd, inheritable=False)
    os.close(null)


os.register_at_fork(after_in_child=_detach_child)
