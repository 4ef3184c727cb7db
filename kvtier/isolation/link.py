"""One process of the tiers, as the engine has it: what it was given, the socket to it, and its end."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import Enum

from kvtier.core.messages import Fetch, Put
from kvtier.forks import keep_fd_from_children
from kvtier.isolation.send_queue import SendQueue
from kvtier.isolation.wire import Frames, Hello, pack

_READ_BYTES = 256 * 1024
_READS_AT_ONCE = 16
_PROGRAM = "kvtier.isolation.child"


class ReadState(Enum):
    """Whether a process was heard when it was last listened to."""

    DRAINED = "it has said nothing more so far"
    MORE = "it had more to say"
    CLOSED = "it has hung up"


class Link:
    """A process and what it owes.

    The owner of the executor gives it commands, its supervisor hears it and ends it; each ``dict`` here is
    filled by the one and emptied by the other, an entry at a time.

    Args:
        memory_fd: the file of the primary tier.
        hello: what it needs to know.
        on_full: called when the socket does not take all that is to be said.

    Attributes:
        pid: its process id, and that of its group.
        in_flight: what it was given and has not answered.
        waiting: who is to be told when it has come so far.
        epochs: for each tier the last reset that it was told of.
        is_over: whether it is gone, and what it owed is answered: nobody answers what comes now.
        state: whether something may be left of what it has said.
    """

    def __init__(self, memory_fd: int, hello: Hello, on_full: Callable[[], object]) -> None:
        self.in_flight: dict[int, Put | Fetch] = {}
        self.waiting: dict[int, Callable[[], object]] = {}
        self.epochs = tuple(hello.epochs)
        self.is_over = False
        self.state = ReadState.DRAINED
        self._frames = Frames()
        self._sock, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = _start(theirs, memory_fd)
                self._pidfd = _watch(self._process)
            except BaseException:
                self._sock.close()
                raise
        self._sock.setblocking(False)
        keep_fd_from_children(self._sock.fileno())  # or the process would not learn of the engine's end
        self.pid = self._process.pid
        self._end = select.poll()
        self._end.register(self._pidfd, select.POLLIN)
        self.send_queue = SendQueue(self._sock, on_full)
        self.send_queue.add(pack(hello))

    # --- to wait for it --------------------------------------------------------------------------

    def wait(self, wait_s: float, wakeup: int) -> None:
        """Wait until it says something, ends, can be told more, or ``wakeup`` can be read."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        poll.register(wakeup, select.POLLIN)
        if self.state is not ReadState.CLOSED:
            poll.register(self._sock, select.POLLIN | (select.POLLOUT if self.send_queue.is_full else 0))
        poll.poll(1000 * wait_s)

    def receive(self) -> Iterator[bytes]:
        """Yield frames that have come, some megabytes of them at most.

        Raises:
            WireError: they are none.
        """
        for _ in range(_READS_AT_ONCE):
            data = self._read()
            if not data:
                return
            yield from self._frames.feed(data)

    def _read(self) -> bytes:
        data = b""
        try:
            data = self._sock.recv(_READ_BYTES)
            self.state = ReadState.MORE if data else ReadState.CLOSED
        except BlockingIOError:
            self.state = ReadState.DRAINED
        except OSError:
            self.state = ReadState.CLOSED
        return data

    def is_gone(self, wait_s: float = 0.0) -> bool:
        """Say whether it has ended, each of its threads: nobody writes to the slots for it any more."""
        return bool(self._end.poll(1000 * wait_s))

    # --- to end it -------------------------------------------------------------------------------

    def kill(self) -> None:
        """Kill it and what it has started, as far as that is in its group still. Before it is reaped."""
        with suppress(ChildProcessError):  # somebody else has reaped it: the number may be another's by now
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> int:
        """Give everything back of a process that is gone; return its exit status, as subprocess has it."""
        code = self._process.wait()
        self._sock.close()
        os.close(self._pidfd)
        return code


def _watch(process: subprocess.Popen[bytes]) -> int:
    """Return a descriptor that tells when the process has ended; where there is none to be had end it."""
    try:
        return os.pidfd_open(process.pid)
    except BaseException:
        process.kill()
        process.wait()
        raise


def _start(theirs: socket.socket, memory_fd: int) -> subprocess.Popen[bytes]:
    if not sys.executable:
        raise OSError("this interpreter does not know where its program is, so no other can be started")
    # Tiers are found there as here, by the same path. Their settings do not go this way: others can see it.
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", _PROGRAM, str(theirs.fileno()), str(memory_fd)],
        stdin=subprocess.DEVNULL,
        pass_fds=(theirs.fileno(), memory_fd),
        env={**os.environ, "PYTHONPATH": path},
        process_group=0,
    )
