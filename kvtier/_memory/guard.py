"""A guard process, which removes a region's file when the engine is gone, however it ended.

An engine is often killed with all its descendants, including the tier process. So the guard detaches itself
from them. It imports only Python's standard library, and takes a few megabytes.
"""

from __future__ import annotations

import fcntl
import os
import select
import subprocess
import sys
import time
from contextlib import suppress

_RETRY_S = 0.05
_GRACE_S = 5  # for processes that still use the file; one that hangs in the kernel may use it for hours


def start(path: str, fd: int) -> int:
    """Start a guard of the file ``path``, open as ``fd``, for the life of this process, or raise OSError.

    Returns a descriptor to close when the file is released properly. The guard then ends when the file is
    gone, or removes it when it has no user, or after five seconds.
    """
    status = os.fstat(fd)
    theirs, ours = os.pipe2(os.O_CLOEXEC)
    facts = [path, status.st_dev, status.st_ino, os.getpid(), theirs]
    try:
        subprocess.run(
            [sys.executable, "-I", "-S", __file__, *map(str, facts)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs,),
            cwd="/",
            check=True,
            timeout=60,
        )
    except (OSError, subprocess.SubprocessError) as error:
        os.close(ours)
        raise OSError(f"cannot start the guard process of {path}: {error}") from error
    finally:
        os.close(theirs)
    return ours


def main(path: str, device: int, inode: int, pid: int, given_back: int) -> None:
    """Wait for the end of process ``pid``, or for ``given_back`` to be closed; then remove the file."""
    engine = os.pidfd_open(pid)  # before the engine goes on
    if os.fork():
        os._exit(0)
    os.setsid()
    poll = select.poll()
    for fd in (engine, given_back):
        poll.register(fd, select.POLLIN)
    while not poll.poll():
        pass
    with suppress(OSError):
        _remove(path, (device, inode))


def _remove(path: str, identity: tuple[int, int]) -> None:
    """Remove the file when no process uses it any more, or after ``_GRACE_S`` seconds.

    Processes that have mapped a removed file keep its memory, and their end frees it.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if (os.fstat(fd).st_dev, os.fstat(fd).st_ino) != identity:
        return  # another engine's by now
    until_s = time.monotonic() + _GRACE_S
    while time.monotonic() < until_s:
        with suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        time.sleep(_RETRY_S)
    if os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False)):
        os.unlink(path)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
