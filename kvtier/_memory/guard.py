"""A guard process, which removes a region's file after the engine has ended in any way.

Before that, it can keep the file for a while for the next engine, under a different name.

An engine is often killed with all its descendants, including the tier process. So the guard detaches itself
from them. It imports only Python's standard library, and takes a few megabytes.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from contextlib import suppress

_RETRY_S = 0.05
_LOOK_EVERY_S = 0.1
_CLAIM_EVERY_S = 1.0
_KEPT = ".kept"
# Seconds to wait for processes that still use the file. One that hangs in the kernel may do so for hours.
_GRACE_S = 5


def start(path: str, fd: int, keep_s: float = 0.0, *, until_claimed: bool = False) -> int:
    """Start a guard of the file ``path``, open as ``fd``, for the life of this process, or raise OSError.

    Returns a descriptor to close when the file is released properly. The guard then ends when the file is
    gone, or removes it when it has no user, or after five seconds. With ``keep_s`` it keeps the file for that
    many seconds after the engine's end, or until the file is claimed. ``until_claimed``: it ends at the
    latest when the file is claimed, because the claimant starts another guard.
    """
    status = os.fstat(fd)
    theirs, ours = os.pipe2(os.O_CLOEXEC)
    facts = [path, keep_s, status.st_dev, status.st_ino, os.getpid(), theirs, int(until_claimed)]
    try:
        subprocess.run(
            [sys.executable, "-I", "-S", __file__, *map(str, facts)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs,),
            cwd="/",
            check=True,  # No timeout, because subprocess would then poll with growing pauses.
        )
    except (OSError, subprocess.SubprocessError) as error:
        os.close(ours)
        raise OSError(f"cannot start the guard process of {path}: {error}") from error
    finally:
        os.close(theirs)
    return ours


def main(
    path: str, keep_s: float, device: int, inode: int, pid: int, given_back: int, until_claimed: int
) -> None:
    """Wait until process ``pid`` has ended or ``given_back`` is closed; then keep or remove the file."""
    engine = os.pidfd_open(pid)  # before the engine continues
    if os.fork():
        os._exit(0)
    os.setsid()
    poll = select.poll()
    for fd in (engine, given_back):
        poll.register(fd, select.POLLIN)
    while not poll.poll(1000 * _CLAIM_EVERY_S if until_claimed else None):
        fd = _open(path)  # fails after the file was removed
        if _is_claimed(fd):
            return
        os.close(fd)
    with suppress(OSError):
        fd = _open(path)
        if (os.fstat(fd).st_dev, os.fstat(fd).st_ino) != (device, inode):
            return  # the file belongs to another engine by now
        until_s = time.monotonic() + keep_s
        if _lock(fd, max(keep_s, _GRACE_S)) and time.monotonic() < until_s:
            _keep(fd, path, until_s)
        else:  # Processes that mapped a removed file keep its memory until they end.
            _unlink(fd, path)


def _open(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


def _keep(fd: int, path: str, until_s: float) -> None:
    """Keep the unused file until the given time, or until it is claimed or removed."""
    kept = path.removesuffix(_KEPT) + _KEPT
    os.rename(path, kept)
    fcntl.flock(fd, fcntl.LOCK_SH)
    end = time.time() + until_s - time.monotonic()
    os.utime(fd, (end, end))  # for operators
    while time.monotonic() < until_s:
        if _is_claimed(fd) or not os.fstat(fd).st_nlink:
            return
        time.sleep(_LOOK_EVERY_S)
    if _lock(fd, 0.0):
        _unlink(fd, kept)


def _lock(fd: int, patience_s: float) -> bool:
    """Lock the file when no process uses it; return whether that happened within ``patience_s`` seconds."""
    until_s = time.monotonic() + patience_s
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() >= until_s:
            return False
        time.sleep(_RETRY_S)


def _is_claimed(fd: int) -> bool:
    # struct flock: type, whence, start, length (0: to the end), pid (0: owned by the description)
    asked = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    found: int = struct.unpack("hhqqi0q", fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))[0]
    return found != fcntl.F_UNLCK


def _unlink(fd: int, path: str) -> None:
    if os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False)):
        os.unlink(path)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), *map(int, sys.argv[3:]))
