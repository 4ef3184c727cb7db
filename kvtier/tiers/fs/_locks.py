"""File locks that show whether a process is alive: a lock ends with its process."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from kvtier._forks import keep_fd_from_children
from kvtier._log import GuardedLogger
from kvtier.tiers.fs._layout import CAREFULLY, create_file

_PATIENCE_S: Final = 5.0
_WRITER_ATTEMPTS: Final = 5
_UNSUPPORTED: Final = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF})
"""NFS returns EBADF for a file that is not open for writing."""
_log = GuardedLogger("kvtier.tiers.fs")


def make_lock(root_fd: int, path: str) -> int:
    """Make and open a lock file that must not exist yet."""
    return create_file(root_fd, path, os.O_RDWR | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW)


def make_writer_lock(root_fd: int, folder: str) -> tuple[str, int]:
    """Make and lock a file that shows that a writer is alive. Return the writer's new name and the open file.

    A sweep may remove the file before it is locked, as a dead writer's; then this tries again. OSError if the
    file system has no locks (ENOLCK), or sweeps removed each attempt (EAGAIN).
    """
    for _ in range(_WRITER_ATTEMPTS):
        writer = f"{os.getpid()}-{secrets.token_hex(8)}"
        path = f"{folder}/{writer}.lock"
        fd = make_lock(root_fd, path)
        locked = try_lock(fd)
        if locked and is_current(root_fd, path, fd):
            return writer, fd
        os.close(fd)
        if locked is None:
            with suppress(OSError):
                os.unlink(path, dir_fd=root_fd)
            raise OSError(errno.ENOLCK, "the file system has no locks", folder)
    raise OSError(errno.EAGAIN, "sweeps took each new writer for a dead one", folder)


def open_lock(root_fd: int, path: str, *, create: bool) -> int:
    """Open a lock file for writing, as NFS requires; for reading if this user may not write it."""
    flags = os.O_RDWR | CAREFULLY
    try:
        return create_file(root_fd, path, flags) if create else os.open(path, flags, dir_fd=root_fd)
    except OSError as error:
        if create or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
    return os.open(path, os.O_RDONLY | CAREFULLY, dir_fd=root_fd)


@contextmanager
def opened_lock(root_fd: int, path: str, *, create: bool) -> Iterator[int]:
    """Yield a lock file that ``open_lock`` opened, and close it at the end."""
    fd = open_lock(root_fd, path, create=create)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def removed_lock(root_fd: int, path: str, *, create: bool) -> Iterator[bool]:
    """Hold a lock file if it is free, and remove it at the end. Yields whether it is held."""
    with opened_lock(root_fd, path, create=create) as fd:
        is_held = try_lock(fd) is True
        yield is_held
        if is_held:
            with suppress(OSError):
                os.unlink(path, dir_fd=root_fd)


def is_current(root_fd: int, path: str, fd: int) -> bool:
    """Return whether an open lock file is still the one at its path, where other processes look for it."""
    try:
        return os.path.samestat(os.stat(path, dir_fd=root_fd, follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False


def close_lock(fd: int) -> None:
    """Close a lock file. If the file system is gone this fails, but still frees the descriptor."""
    with suppress(OSError):
        os.close(fd)


def try_lock(fd: int, *, shared: bool = False) -> bool | None:
    """Lock an open file without waiting. None if the file system has no such locks."""
    keep_fd_from_children(fd)  # Otherwise a child would hold the lock of a dead parent.
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return None
        raise
    return True


def lock_with_timeout(fd: int, path: str, patience_s: float = _PATIENCE_S) -> bool:
    """Wait for the lock of an open file; processes hold it briefly. False if the file system has no locks.

    Raises TimeoutError if a stopped process holds it for seconds, or a network share hangs.
    """
    give_up_at = time.monotonic() + patience_s
    pause_s = 0.0002
    while (locked := try_lock(fd)) is False:
        if time.monotonic() > give_up_at:
            raise TimeoutError(errno.ETIMEDOUT, f"another process has held it for {patience_s} s", path)
        time.sleep(pause_s)
        pause_s = min(0.01, 2 * pause_s)
    return locked is True


@contextmanager
def wait_for_lock(root_fd: int, path: str, *, create: bool) -> Iterator[None]:
    """Hold a lock file. Raises TimeoutError as ``lock_with_timeout``."""
    with opened_lock(root_fd, path, create=create) as fd:
        if not lock_with_timeout(fd, path):
            _log.warning(
                "%s: the file system has no locks, so resets by two engines may collide: reset one by one",
                path,
            )
        yield
