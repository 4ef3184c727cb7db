"""Checks chunks' files by their trailers. If possible, reads bypass the page cache and set no atime."""

from __future__ import annotations

import errno
import mmap
import os
from dataclasses import dataclass
from typing import Final

import crc32c

from kvtier.keys import OffloadKey
from kvtier.tiers import _seal as seal
from kvtier.tiers._seal import Integrity
from kvtier.tiers.fs._layout import BLOCK_BYTES, CAREFULLY

PIECE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class FileCheck:
    """The result of checking a file. Two reads of the same bytes are equal."""

    finding: Integrity
    inode: int = 0
    sealed: seal.Sealed | None = None  # None without a trailer
    errno: int = 0  # if it is unreadable
    checksum: int | None = None  # checksum of the chunk's bytes, or of a damaged trailer


class FileChecker:
    """Reads chunks' files in pieces and checks them. For one thread.

    A chunk is foreign unless its cache's digest begins with the hexadecimal ``digits``, and torn unless it
    has ``payload_bytes``, if given.
    """

    def __init__(self, root_fd: int, digits: str, payload_bytes: int | None = None) -> None:
        self._root_fd = root_fd
        self._digits = digits
        self._payload_bytes = payload_bytes
        self._piece = mmap.mmap(-1, PIECE_BYTES)

    def check(self, path: str, key: OffloadKey) -> FileCheck:
        """Check that the file at ``path`` holds the chunk of ``key``. Raises nothing."""
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
        is_expected = self._payload_bytes in (None, payload_bytes)
        if payload_bytes <= 0 or payload_bytes % BLOCK_BYTES or not is_expected:
            return FileCheck(Integrity.TORN, found.st_ino)
        sealed = seal.read(trailer := self._trailer(fd, payload_bytes))
        if sealed is None:
            return FileCheck(Integrity.TORN, found.st_ino, checksum=crc32c.crc32c(trailer))
        is_ours = sealed.digest.hex().startswith(self._digits)
        if sealed.key != key or sealed.payload_bytes != payload_bytes or not is_ours:
            return FileCheck(Integrity.FOREIGN, found.st_ino, sealed)
        if (checksum := self._checksum(fd, payload_bytes)) is None:
            finding = Integrity.TORN
        else:
            finding = Integrity.SOUND if checksum == sealed.checksum else Integrity.CHECKSUM
        return FileCheck(finding, found.st_ino, sealed, checksum=checksum)

    def _trailer(self, fd: int, at: int) -> bytes:
        with memoryview(self._piece) as piece, piece[:BLOCK_BYTES] as block:
            return bytes(block[: seal.TRAILER_BYTES]) if os.preadv(fd, [block], at) == BLOCK_BYTES else b""

    def _checksum(self, fd: int, length: int) -> int | None:
        """Return the checksum of a file's first bytes; None if it is shorter. OSError."""
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
    """Open a file for reading, without page cache and atime if the file system and owner allow. OSError."""
    for extra in (os.O_NOATIME | os.O_DIRECT, os.O_NOATIME, os.O_DIRECT):
        try:
            return os.open(path, os.O_RDONLY | CAREFULLY | extra, dir_fd=root_fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EPERM):
                raise
    return os.open(path, os.O_RDONLY | CAREFULLY, dir_fd=root_fd)
