"""The structures that Python and the C library share, and the check that both lay them out alike."""

from __future__ import annotations

import ctypes
from typing import Final


class Call(ctypes.Structure):
    """``struct call`` of kvtier_native.h."""

    _fields_ = (
        ("data_dir", ctypes.c_char_p),
        ("tmp_dir", ctypes.c_char_p),
        ("keys", ctypes.c_char_p),
        ("key_ends", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("stop", ctypes.c_void_p),
        ("results", ctypes.c_void_p),
        ("inodes", ctypes.c_void_p),
        ("base", ctypes.c_uint64),
        ("chunk_bytes", ctypes.c_uint64),
        ("serial", ctypes.c_uint64),
        ("root_fd", ctypes.c_int32),
        ("flags", ctypes.c_uint32),
        ("digest", ctypes.c_uint8 * 16),
        ("index", ctypes.c_void_p),
    )


class ScanStruct(ctypes.Structure):
    """``struct chunk_scan`` of scan.c."""

    _fields_ = (
        ("now_ns", ctypes.c_int64),
        ("want_bytes", ctypes.c_int64),
        ("leaving", ctypes.c_void_p),
        ("histogram", ctypes.c_void_p),
        ("names", ctypes.c_void_p),
        ("names_room", ctypes.c_uint64),
        ("names_bytes", ctypes.c_uint64),
        ("seen", ctypes.c_uint64),
        ("removed", ctypes.c_uint64),
        ("removed_bytes", ctypes.c_int64),
        ("failed", ctypes.c_uint64),
        ("failed_bytes", ctypes.c_int64),
        ("error", ctypes.c_int64),
    )


class TreeSums(ctypes.Structure):
    """``struct tree_sums`` of kvtier_native.c."""

    _fields_ = (("bytes", ctypes.c_int64), ("failed", ctypes.c_int64), ("error", ctypes.c_int64))


_SHARED: Final = {"call": Call, "chunk_scan": ScanStruct, "tree_sums": TreeSums}
_MAX_NUMBERS: Final = 64


def difference(library: ctypes.CDLL) -> str | None:
    """Return why the library does not match the structures of this module, or None.

    Raises AttributeError if the library has no table of its structures.
    """
    for name, structure in _SHARED.items():
        room = (ctypes.c_uint32 * _MAX_NUMBERS)()
        count = getattr(library, f"kvt_layout_{name}")(room, _MAX_NUMBERS)
        if list(room[:count]) != layout_of(structure):
            return f"built from another version (struct {name} differs): build it again, or reinstall kvtier"
    return None


def layout_of(structure: type[ctypes.Structure]) -> list[int]:
    """Return the size of a structure, then offset and size of each field."""
    fields = [getattr(structure, name) for name, *_ in structure._fields_]
    return [ctypes.sizeof(structure), *(number for field in fields for number in (field.offset, field.size))]
