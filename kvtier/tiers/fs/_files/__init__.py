"""Chunks as files: the native library's calls on them, its I/O threads, and the index of keys."""

from __future__ import annotations

import ctypes

from kvtier import _native as native
from kvtier.errors import TierError
from kvtier.tiers.fs._files.chunk_files import ChunkFiles


def require_library() -> ctypes.CDLL:
    """Return the native library.

    Raises:
        TierError: it is not loaded; the message says why, and what to do.
    """
    if native.library is None:
        raise TierError(
            f"the file tier needs kvtier's native library, which is not loaded ({native.missing_because}): "
            "install a kvtier wheel for this platform, or install a C compiler and build the library with "
            "'python -m kvtier._native.build'"
        )
    return native.library


def make_files() -> ChunkFiles:
    """Return what works on chunks' files. TierError where the native library is not loaded."""
    return ChunkFiles(require_library())


__all__ = ["ChunkFiles", "make_files", "require_library"]
