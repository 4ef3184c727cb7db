"""Names of the file tier's files and directories, all relative to its root.

::

    <namespace>/config.json               the identity, spelled out
    <namespace>/epoch                     the number of the epoch that openers join
    <namespace>/epoch.lock                held while the epoch is read or written
    <namespace>/users.e<n>.lock           held, shared, by all who use epoch n
    <namespace>/.tmp/<writer>.lock        held by a living writer
    <namespace>/.tmp/<writer>/            its unfinished files
    <namespace>/quarantine/               files that failed a check
    <namespace>_r0/<hhh>/<hh>_g<group>/<hash_hex>.bin         the chunks of epoch 0
    <namespace>_r0.e<n>/...                                   the chunks of epoch n
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from typing import Final

from kvtier.keys import OffloadKey, content_hash, group_index

BLOCK_BYTES: Final = 4096
"""The trailer's block behind a chunk's bytes, and what direct I/O is aligned to."""

CHUNK_DIRECTORIES: Final = 3
"""Directories above a chunk's file, the root not counted."""

MANIFEST: Final = "config.json"
"""The identity, spelled out."""

FILE_MODE: Final = 0o600
DIRECTORY_MODE: Final = 0o700

CAREFULLY: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""How files are opened that others may have put there: a FIFO would hold up who opens it otherwise."""


def open_regular(path: str | Path, *, dir_fd: int | None = None) -> int:
    """Open a file for reading. OSError, also where it is anything but a regular file."""
    fd = os.open(path, os.O_RDONLY | CAREFULLY, dir_fd=dir_fd)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "is no regular file", str(path))


def chunk_path(data_dir: str, key: OffloadKey) -> str:
    """Name the file of one chunk. The native helper makes the same name."""
    digits = content_hash(key).hex()
    head = digits.ljust(5, "0")
    return f"{data_dir}/{head[:3]}/{head[3:5]}_g{group_index(key)}/{digits}.bin"


def data_dir(namespace: str, epoch: int) -> str:
    """Name the directory of an epoch's chunks."""
    return f"{namespace}_r0" if epoch == 0 else f"{namespace}_r0.e{epoch}"


def epoch_of(namespace: str, directory: str) -> int | None:
    """Return the epoch whose chunks are in ``directory``, or None where it is no such directory."""
    found = re.fullmatch(re.escape(namespace) + r"_r0(?:\.e([1-9][0-9]{0,17}))?", directory)
    return int(found.group(1) or 0) if found else None


def users_lock(namespace: str, epoch: int) -> str:
    """Name the file that all who use an epoch hold a shared lock on."""
    return f"{namespace}/users.e{epoch}.lock"


def epoch_of_users_lock(name: str) -> int | None:
    """Return the epoch of a users' lock, or None where ``name`` is no such file."""
    found = re.fullmatch(r"users\.e([0-9]{1,18})\.lock", name)
    return int(found.group(1)) if found else None
