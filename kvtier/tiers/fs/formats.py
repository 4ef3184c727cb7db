"""Which format a file tier has: the one place that knows them all."""

from __future__ import annotations

import logging
import os
import re
from typing import Final, Literal

from kvtier import native
from kvtier.tiers.fs.call import Place
from kvtier.tiers.fs.config import FsConfig
from kvtier.tiers.fs.native_files import NativeFiles
from kvtier.tiers.fs.python_files import PythonFiles
from kvtier.tiers.fs.segments.layout import FOLDER
from kvtier.tiers.fs.segments.native_segments import NativeSegments
from kvtier.tiers.fs.segments.python_segments import PythonSegments
from kvtier.tiers.fs.segments.store import has_room_for_many
from kvtier.tiers.fs.store import Store

Format = Literal["files", "segments"]

SMALL_BYTES: Final = 256 * 1024
"""Chunks shorter than this are kept in segments, where ``format`` is ``auto``, nothing is there yet, and the
root may hold many of them."""

_log = logging.getLogger("kvtier.tiers.fs")


def make_store(config: FsConfig, place: Place) -> Store:
    """Make what ``format`` asks for. Looks at the disk. OSError where it cannot be looked at."""
    there = formats_in(place)
    chosen = choose(config, place.chunk_bytes, there)
    if there - {chosen}:
        _log.warning(
            "%s: %s holds chunks in another format, too (%s), which are not given to this engine, whose "
            "format is %r; they leave by age",
            config.root_dir,
            place.data_dir,
            *(there - {chosen}),
            chosen,
        )
    return segments(config.max_bytes) if chosen == "segments" else files()


def choose(config: FsConfig, chunk_bytes: int, there: frozenset[Format]) -> Format:
    """Say which format a tier has.

    Args:
        config: its settings.
        chunk_bytes: length of its chunks.
        there: formats that its epoch has chunks in: ``auto`` goes on with the one that it finds.
    """
    if config.format != "auto":
        return config.format
    if config.layout == "vllm":
        return "files"
    if len(there) == 1:
        return next(iter(there))
    is_small = chunk_bytes < SMALL_BYTES and has_room_for_many(config.max_bytes, chunk_bytes)
    return "segments" if is_small else "files"


def formats_in(place: Place) -> frozenset[Format]:
    """Return the formats that an epoch has directories of. OSError."""
    try:
        fd = os.open(place.data_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=place.root_fd)
    except FileNotFoundError:
        return frozenset()
    try:
        names = os.listdir(fd)
    finally:
        os.close(fd)
    has_files = any(re.fullmatch("[0-9a-f]{3}", name) for name in names)
    found: set[Format] = {"files"} if has_files else set()
    return frozenset(found | ({"segments"} if FOLDER in names else set()))


def segments(max_bytes: int | None = None) -> Store:
    """Many chunks in one file: by the native helper, or in Python where it is missing."""
    return (
        NativeSegments(native.library, max_bytes) if native.library is not None else PythonSegments(max_bytes)
    )


def files() -> Store:
    """A file for each chunk: by the native helper, or in Python where it is missing."""
    return NativeFiles(native.library) if native.library is not None else PythonFiles()
