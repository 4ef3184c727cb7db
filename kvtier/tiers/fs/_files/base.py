"""What works on chunks' files: the native helper and its fallback in Python have the same results."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from typing import ClassVar, Final, TypeAlias

from kvtier.keys import MAX_KEY_BYTES, OffloadKey, pack_key
from kvtier.tiers.fs._files.call import FileCall, Place, StopFlag
from kvtier.tiers.fs._layout import BLOCK_BYTES, CHUNK_DIRECTORIES

Failures: TypeAlias = Counter[int]
"""Files and directories that could not be removed or looked into, by errno."""

PARTS: Final = 4096
"""Directories of the first level of an epoch: what is listed at once."""

_PATH: Final = re.compile(r"[0-9a-f]{3}/[0-9a-f]{2}_g([0-9]{1,10})/((?:[0-9a-f]{2})+)\.bin")


class ChunkFiles(ABC):
    """Work on chunks' files. All calls block, and may be made from any thread, several at once.

    ``first`` and ``end`` delimit a run of the call's chunks: its results are written and nobody else's.
    Errors of chunks are results, never exceptions.
    """

    is_native: ClassVar[bool]
    """Whether the native helper does the work."""

    @abstractmethod
    def put(self, call: FileCall, first: int, end: int) -> int:
        """Write chunks that are not there, each whole or not at all.

        Returns:
            The bytes that were added to the file system, directories included.
        """

    @abstractmethod
    def get(self, call: FileCall, first: int, end: int) -> None:
        """Read chunks into their slots and prove them by their trailers."""

    @abstractmethod
    def contains(self, call: FileCall, first: int, end: int) -> None:
        """Look whether the chunks' files are there: EXISTS, TORN where the length is wrong, or ABSENT."""

    @abstractmethod
    def discard(self, call: FileCall, first: int, end: int) -> int:
        """Remove the chunks' files. Returns the bytes that were removed."""

    @abstractmethod
    def touch(self, call: FileCall, first: int, end: int) -> None:
        """Set the time of the last use of the chunks' files to now: OK or ABSENT."""

    @abstractmethod
    def fingerprints(self, place: Place, part: int, stop: StopFlag) -> array[int]:
        """List a part of an epoch's chunks, for the index. OSError where it cannot be read.

        Args:
            place: the epoch.
            part: 0 to ``PARTS`` - 1.
            stop: set where the caller does not want to know any more.

        Returns:
            ``index.fingerprint`` of each chunk's key, type code ``Q``.
        """

    @abstractmethod
    def tree_bytes(self, root_fd: int, path: str, stop: StopFlag, failures: Failures | None = None) -> int:
        """Return the bytes on disk below a directory. OSError where it cannot be read.

        Directories below it that cannot be read are left out, and added to ``failures``.
        """

    @abstractmethod
    def tree_remove(self, root_fd: int, path: str, stop: StopFlag, failures: Failures | None = None) -> int:
        """Remove a directory. Returns the bytes removed. OSError where it cannot be removed.

        What is below it and cannot be removed is added to ``failures``.
        """


def most_bytes(chunk_bytes: int) -> int:
    """Return the most bytes that putting one chunk can take on disk, new directories included."""
    return chunk_bytes + BLOCK_BYTES * (1 + CHUNK_DIRECTORIES)


def key_of(path: str) -> OffloadKey | None:
    """Return the key of the chunk in a file, or None where it is no chunk's.

    Args:
        path: relative to the epoch's directory.
    """
    found = _PATH.fullmatch(path)
    if found is None or int(found.group(1)) >= 1 << 32:
        return None
    content = bytes.fromhex(found.group(2))
    if len(content) > MAX_KEY_BYTES - 4:
        return None
    return pack_key(content, int(found.group(1)))


def part_path(place: Place, part: int) -> str:
    """Return the path of one of the ``PARTS`` directories of an epoch."""
    return f"{place.data_dir}/{part:03x}"
