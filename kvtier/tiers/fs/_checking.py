"""Checks of chunks' files outside of an engine: by the trailer behind the bytes.

Reading leaves no trace where that is possible: it goes past the page cache, and the time of the last use
stays what it was, because eviction goes by it.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import crc32c

from kvtier.keys import OffloadKey
from kvtier.tiers import _seal as seal
from kvtier.tiers._seal import Integrity
from kvtier.tiers.fs._layout import BLOCK_BYTES, CAREFULLY

PIECE_BYTES: Final = 1 << 20
_QUIET: Final = getattr(os, "O_NOATIME", 0)
_DIRECT: Final = getattr(os, "O_DIRECT", 0)


@dataclass(frozen=True, slots=True)
class FileCheck:
    """What was found, and of which file.

    Attributes:
        inode: of the file that was checked; 0 where there was none.
        sealed: what its trailer says, where it has one.
        errno: why it is unreadable.
    """

    finding: Integrity
    inode: int = 0
    sealed: seal.Sealed | None = None
    errno: int = 0


class FileChecker:
    """Reads chunks' files in pieces and proves them. For one thread.

    Args:
        belongs: says whether a digest in a trailer is that of the cache.
    """

    def __init__(self, root_fd: int, belongs: Callable[[bytes], bool]) -> None:
        self._root_fd = root_fd
        self._belongs = belongs
        self._piece = mmap.mmap(-1, PIECE_BYTES)

    def check(self, path: str, key: OffloadKey) -> FileCheck:
        """Return whether the file at ``path`` holds the chunk of ``key``. It raises nothing."""
        try:
            fd = _open_quietly(self._root_fd, path)
            try:
                return self._check(fd, key)
            finally:
                os.close(fd)
        except (FileNotFoundError, NotADirectoryError):
            return FileCheck(Integrity.GONE)
        except OSError as error:
            return FileCheck(Integrity.UNREADABLE, errno=error.errno or errno.EIO)

    def _check(self, fd: int, key: OffloadKey) -> FileCheck:
        found = os.fstat(fd)
        payload_bytes = found.st_size - BLOCK_BYTES
        if payload_bytes <= 0 or payload_bytes % BLOCK_BYTES:
            return FileCheck(Integrity.TORN, found.st_ino)
        sealed = seal.read(self._trailer(fd, payload_bytes))
        if sealed is None:
            return FileCheck(Integrity.TORN, found.st_ino)
        if sealed.key != key or sealed.payload_bytes != payload_bytes or not self._belongs(sealed.digest):
            return FileCheck(Integrity.FOREIGN, found.st_ino, sealed)
        checksum = self._checksum(fd, payload_bytes)
        if checksum is None:
            return FileCheck(Integrity.TORN, found.st_ino, sealed)
        well = checksum == sealed.checksum
        return FileCheck(Integrity.SOUND if well else Integrity.CHECKSUM, found.st_ino, sealed)

    def _trailer(self, fd: int, at: int) -> bytes:
        with memoryview(self._piece) as piece, piece[:BLOCK_BYTES] as block:
            return bytes(block[: seal.TRAILER_BYTES]) if os.preadv(fd, [block], at) == BLOCK_BYTES else b""

    def _checksum(self, fd: int, length: int) -> int | None:
        """Return the checksum of the first bytes of a file; None where it ends before. OSError."""
        checksum, done = 0, 0
        with memoryview(self._piece) as whole:
            while done < length:
                with whole[: min(PIECE_BYTES, length - done)] as piece:
                    moved = os.preadv(fd, [piece], done)
                    if moved <= 0:
                        return None
                    with piece[:moved] as got:
                        checksum = crc32c.crc32c(got, checksum)
                    done += moved
        return checksum


def _open_quietly(root_fd: int, path: str) -> int:
    """Open a file for reading without a trace, as far as the file system and its owner allow. OSError."""
    for extra in (_QUIET | _DIRECT, _QUIET, _DIRECT):
        try:
            return os.open(path, os.O_RDONLY | CAREFULLY | extra, dir_fd=root_fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EPERM):
                raise
    return os.open(path, os.O_RDONLY | CAREFULLY, dir_fd=root_fd)
