"""Chunks as files: the work on them in C and in Python, its threads, and an index of what is there."""

from __future__ import annotations

from kvtier import native as helper
from kvtier.tiers.fs.files.base import ChunkFiles
from kvtier.tiers.fs.files.native import NativeFiles
from kvtier.tiers.fs.files.python import PythonFiles


def make_files() -> ChunkFiles:
    """Return the native helper's implementation where the library is loaded, else Python's."""
    return NativeFiles(helper.library) if helper.library is not None else PythonFiles()


__all__ = ["ChunkFiles", "NativeFiles", "PythonFiles", "make_files"]
