"""Names of the file tier's files and directories, all relative to its root.

::

    <namespace>/config.json               the manifest: the identity's fields
    <namespace>/epoch                     the number of the epoch that openers join, and its CRC-32
    <namespace>/epoch.lock                held while the epoch is read or written
    <namespace>/users.e<n>.lock           held, shared, by each user of epoch n
    <namespace>/.tmp/<writer>.lock        held by a writer while it is alive
    <namespace>/.tmp/<writer>/            its unfinished files
    <namespace>/quarantine/               files that failed a check
    <namespace>_r0/<hhh>/<hh>_g<group>/<hash_hex>.bin         the chunks of epoch 0
    <namespace>_r0.e<n>/...                                   the chunks of epoch n
"""

from __future__ import annotations

import errno
import os
import pwd
import re
import stat
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from kvtier.keys import GROUP_BYTES, MAX_KEY_BYTES, OffloadKey, content_hash, group_index, pack_key

BLOCK_BYTES: Final = 4096
"""Size of the trailer's block behind a chunk's bytes, and alignment of direct I/O."""

MANIFEST: Final = "config.json"
DIRECTORY_MODE: Final = 0o700
_FILE_MODE: Final = 0o600
_SHARED: Final = stat.S_ISGID | stat.S_IWGRP

CAREFULLY: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Flags to open a file that another program may have put there: a FIFO would block otherwise."""

MAX_EPOCH: Final = 10**15 - 1
"""The last epoch. A larger number is not kvtier's."""

PART: Final = re.compile("[0-9a-f]{3}")
LEAF: Final = re.compile("[0-9a-f]{2}_g[0-9]{1,10}")
"""Names of the two levels of directories between an epoch's directory and its chunks' files."""

_CHUNK: Final = re.compile(rf"{PART.pattern}/[0-9a-f]{{2}}_g([0-9]{{1,10}})/((?:[0-9a-f]{{2}})+)\.bin")
WRITER: Final = re.compile("[0-9]+-[0-9a-f]{16}")

_EPOCH: Final = re.compile(rb"(0|[1-9][0-9]{0,14})(?: ([0-9a-f]{8}))?\n")
_DATA_DIR: Final = re.compile(r"([A-Za-z0-9.-]+_[0-9a-f]{16})_r0(?:\.e([1-9][0-9]{0,14}))?")
_USERS_LOCK: Final = re.compile(r"users\.e([0-9]{1,15})\.lock")
_MAX_SMALL_BYTES: Final = 1 << 20
_MOUNTS: Final = Path("/proc/self/mountinfo")
_MOUNT_ID: Final = re.compile(r"^mnt_id:\s*(\d+)$", re.MULTILINE)


def is_shared(root_fd: int) -> bool:
    """Return whether the root's group shares it: its mode has the set-group-id bit and g+w."""
    return os.fstat(root_fd).st_mode & _SHARED == _SHARED


def file_system_of(fd: int) -> str:
    """Return the type of an open file's file system; "" if it is unknown. OSError."""
    number = _MOUNT_ID.findall(Path(f"/proc/self/fdinfo/{fd}").read_text())
    for line in _MOUNTS.read_text(errors="replace").splitlines():
        mount, _, kind = line.partition(" - ")
        if mount.split()[:1] == number:  # On Btrfs, mount lists show other device numbers than files have.
            return kind.split()[0]
    return ""


def make_folder(root_fd: int, path: str) -> None:
    """Make a directory unless it exists, for the group too if the root is shared. OSError."""
    with suppress(FileExistsError):
        os.mkdir(path, DIRECTORY_MODE, dir_fd=root_fd)
        if is_shared(root_fd):
            os.chmod(path, 0o2770, dir_fd=root_fd)


def create_file(root_fd: int, path: str, flags: int) -> int:
    """Open a file; create it if missing, for the group too if the root is shared. OSError."""
    fd = os.open(path, flags | os.O_CREAT, _FILE_MODE, dir_fd=root_fd)
    with suppress(PermissionError):  # another user's
        if is_shared(root_fd) and stat.S_IMODE(os.fstat(fd).st_mode) == _FILE_MODE:
            os.fchmod(fd, 0o660)
    return fd


def owner_of(error: OSError, root: Path) -> str:
    """Return the owner and mode of a file that denied permission, as text; "" for other errors."""
    if error.errno not in (errno.EACCES, errno.EPERM):
        return ""
    path, found = root / str(error.filename or ""), None
    while found is None:
        try:
            found = os.stat(path)
        except OSError:  # The file is missing or hidden, so its directory's owner decides.
            path = path.parent
    try:
        name = pwd.getpwuid(found.st_uid).pw_name
    except KeyError:
        name = "a user without a name"
    mode = stat.S_IMODE(found.st_mode)
    return f": {path} belongs to {name} (uid {found.st_uid}), mode {mode:o}; this is uid {os.geteuid()}"


def forget_pages(fd: int) -> None:
    """Make the next read of a file come from its disk, if it has no unwritten pages."""
    with suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def read_small(root_fd: int, path: str) -> bytes:
    """Return the contents of a small file. OSError if it cannot be read or is not a regular file."""
    fd = os.open(path, os.O_RDONLY | CAREFULLY, dir_fd=root_fd)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "is no regular file", path)
        forget_pages(fd)
        return os.pread(fd, _MAX_SMALL_BYTES, 0)
    finally:
        os.close(fd)


@contextmanager
def open_folder(root_fd: int, path: str, *, follow: bool = False) -> Iterator[int]:
    """Yield a directory, open for reading. OSError if it cannot be opened or is a link not to follow."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    fd = os.open(path, flags, dir_fd=root_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def names_in(root_fd: int, path: str, *, follow: bool = False) -> list[str]:
    """Return the names in a directory; none if it is missing. OSError if it cannot be read."""
    try:
        with open_folder(root_fd, path, follow=follow) as fd:
            return os.listdir(fd)
    except FileNotFoundError:
        return []


def chunk_path(data_dir: str, key: OffloadKey) -> str:
    """Return the path of one chunk's file. The native library makes the same name."""
    digits = content_hash(key).hex()
    head = digits.ljust(5, "0")
    return f"{data_dir}/{head[:3]}/{head[3:5]}_g{group_index(key)}/{digits}.bin"


def key_of(path: str) -> OffloadKey | None:
    """Return the key that a file's path below the epoch's directory names, or None."""
    found = _CHUNK.fullmatch(path)
    if found is None or int(found[1]) >= 1 << 32 or len(found[2]) > 2 * (MAX_KEY_BYTES - GROUP_BYTES):
        return None
    return pack_key(bytes.fromhex(found[2]), int(found[1]))


def max_disk_bytes(chunk_bytes: int) -> int:
    """Return the maximum disk use of putting one chunk, including its trailer and three directories."""
    return chunk_bytes + BLOCK_BYTES * (1 + 3)


def data_dir(namespace: str, epoch: int) -> str:
    return f"{namespace}_r0" if epoch == 0 else f"{namespace}_r0.e{epoch}"


def parse_data_dir(directory: str) -> tuple[str, int] | None:
    """Return the namespace and the epoch of a directory of chunks, or None."""
    found = _DATA_DIR.fullmatch(directory)
    return (found[1], int(found[2] or 0)) if found else None


def stored_epoch(root_fd: int, namespace: str) -> int | None:
    """Return the epoch that openers of a namespace join; None if its file is unreadable or invalid.

    Files of format 1 have no checksum.
    """
    with suppress(OSError):
        for _ in range(2):  # A single failed read must not cost an epoch's chunks.
            content = read_small(root_fd, f"{namespace}/epoch")
            found = _EPOCH.fullmatch(content)
            if found and content in (found[1] + b"\n", epoch_file(int(found[1])).encode()):
                return int(found[1])
    return None


def epoch_file(number: int) -> str:
    return f"{number} {zlib.crc32(b'%d' % number):08x}\n"


def users_lock(namespace: str, epoch: int) -> str:
    """Return the path of the file that each user of an epoch holds a shared lock on."""
    return f"{namespace}/users.e{epoch}.lock"


def epochs_of_users(names: Iterable[str]) -> set[int]:
    """Return the epochs of the users' locks among the names in a namespace."""
    return {int(found[1]) for found in map(_USERS_LOCK.fullmatch, names) if found}
