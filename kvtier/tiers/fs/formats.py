"""Which format a file tier has: the one place that knows them all."""

from __future__ import annotations

from typing import Final

from kvtier import native
from kvtier.tiers.fs.config import FsConfig
from kvtier.tiers.fs.native_files import NativeFiles
from kvtier.tiers.fs.python_files import PythonFiles
from kvtier.tiers.fs.segments.native_segments import NativeSegments
from kvtier.tiers.fs.segments.python_segments import PythonSegments
from kvtier.tiers.fs.store import Store

SMALL_BYTES: Final = 256 * 1024
"""Below this length of a chunk segments are faster than files."""

AUTO_BYTES: Final = 0
"""Chunks shorter than this are kept in segments, where ``format`` is ``auto``."""


def make_store(config: FsConfig, chunk_bytes: int) -> Store:
    """Make what ``format`` asks for, for chunks of a length."""
    small = chunk_bytes < AUTO_BYTES and config.layout == "kvtier"
    if config.format == "segments" or (config.format == "auto" and small):
        return segments(config.max_bytes)
    return files()


def segments(max_bytes: int | None = None) -> Store:
    """Many chunks in one file: by the native helper, or in Python where it is missing."""
    return (
        NativeSegments(native.library, max_bytes) if native.library is not None else PythonSegments(max_bytes)
    )


def files() -> Store:
    """A file for each chunk: by the native helper, or in Python where it is missing."""
    return NativeFiles(native.library) if native.library is not None else PythonFiles()
