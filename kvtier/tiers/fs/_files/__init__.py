"""Chunks as files: owns the system calls on them (in C and Python), the I/O threads, the index of keys."""

from __future__ import annotations

from kvtier import _native as helper
from kvtier.tiers.fs._files.native import NativeFiles
from kvtier.tiers.fs._files.python import ChunkFiles


def make_files() -> ChunkFiles:
    """Return the native helper's implementation where the library is loaded, else Python's."""
    return NativeFiles(helper.library) if helper.library is not None else ChunkFiles()


__all__ = ["ChunkFiles", "NativeFiles", "make_files"]
