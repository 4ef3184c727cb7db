"""The engine's side of one tier process: its socket, its commands in flight, and its end."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

from kvtier._core.messages import Get, Put
from kvtier._forks import keep_fd_from_children
from kvtier._isolation.channel import RETRY_S, Channel
from kvtier._isolation.wire import Hello, pack

_PROGRAM = "kvtier._isolation.child"


class Link:
    """A tier process and its commands in flight.

    The executor's owner sends commands. Its supervisor reads the answers and ends the process. The owner adds
    entries to ``in_flight``, the supervisor removes them, one at a time.

    ``memory_fd`` is the primary tier's file; ``on_full`` is called when the socket's buffer becomes full.
    """

    def __init__(self, memory_fd: int, hello: Hello, on_full: Callable[[], object]) -> None:
        self.in_flight: dict[int, Put | Get] = {}  # unanswered commands, by id
        self.epochs = tuple(hello.epochs)  # the last reset sent to it, for each tier
        # The process is gone, and its commands are answered. Later commands get no answer.
        self.is_over = False
        self._sock, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = _start(theirs, memory_fd)
                self._pidfd = _watch(self._process)
            except BaseException:
                self._sock.close()
                raise
        self._sock.setblocking(False)
        keep_fd_from_children(self._sock.fileno())  # Otherwise the process would not notice the engine's end.
        self.pid = self._process.pid  # and its group's
        self._end = select.poll()
        self._end.register(self._pidfd, select.POLLIN)
        self.channel = Channel(self._sock, on_full)
        self.channel.add(pack(hello))

    def wait(self, wait_s: float, wakeup: int) -> None:
        """Wait until the process sends, ends or can take more, or until ``wakeup`` is readable."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        poll.register(wakeup, select.POLLIN)
        lacks_memory = self.channel.lacks_memory
        if not self.channel.is_closed:
            awaits_room = self.channel.is_full and not lacks_memory
            poll.register(self._sock, select.POLLIN | (select.POLLOUT if awaits_room else 0))
        poll.poll(1000 * (min(wait_s, RETRY_S) if lacks_memory else wait_s))

    def is_gone(self, wait_s: float = 0.0) -> bool:
        """Return whether every thread of the process has ended, so that it no longer writes to slots."""
        return bool(self._end.poll(1000 * wait_s))

    def kill(self) -> None:
        """Kill its process group. Called before it is reaped."""
        # Another thread reaped the process, so its id may belong to another process by now.
        with suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> int:
        """Release an ended process; return its exit status in the form of ``subprocess``."""
        code = self._process.wait()
        self.channel.close()
        os.close(self._pidfd)
        return code


def _watch(process: subprocess.Popen[bytes]) -> int:
    """Return a pidfd of the process. If there is none, end the process."""
    try:
        return os.pidfd_open(process.pid)
    except BaseException:
        process.kill()
        process.wait()
        raise


def _start(theirs: socket.socket, memory_fd: int) -> subprocess.Popen[bytes]:
    if not sys.executable:
        raise OSError("sys.executable is empty: no interpreter can be started")
    # Pass the same path, so that tiers are found. Settings are not passed this way, because other users can
    # see it.
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", _PROGRAM, str(theirs.fileno()), str(memory_fd)],
        stdin=subprocess.DEVNULL,
        pass_fds=(theirs.fileno(), memory_fd),
        env={**os.environ, "PYTHONPATH": path},
        process_group=0,
    )


def engine_cpus() -> set[int]:
    """Return the CPUs that any thread of the engine may run on.

    Engines bind their threads, perhaps including the one that starts the process, and the tiers must not
    compete for the CPU of a computing thread. A limit on the whole engine is respected.
    """
    cpus = os.sched_getaffinity(0)
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):
            cpus |= os.sched_getaffinity(int(task))
    return cpus
