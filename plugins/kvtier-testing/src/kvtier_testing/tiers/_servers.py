"""Helpers for a tier's server in tests: skip if it is missing, find a port, stop it like a hang."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from math import inf
from typing import Any, NoReturn

import pytest

_PORTS = range(18_000, 22_000)


def absent(why: str) -> NoReturn:
    """Skip a test whose requirement is missing; on CI, fail it."""
    if os.environ.get("CI", "").lower() == "true":
        pytest.fail(why)
    pytest.skip(why)


def free_port(*beside: int) -> int:
    """Return a free loopback port; the ports at the offsets ``beside`` are free too.

    It is below the ephemeral ports. No other call on this machine returns it while this process lives,
    because its server may not listen yet.
    """
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with ExitStack() as stack, suppress(OSError):
            name = stack.enter_context(socket.socket(socket.AF_UNIX))
            name.bind(f"\0kvtier-port-{port}")  # an abstract socket, which is in no file system
            for distance in (0, *beside):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port + distance))
            name.detach()  # kept open until this process ends
            return port


@contextmanager
def stopped(process: subprocess.Popen[Any], seconds: float = inf) -> Iterator[None]:
    """Stop a process, like a hang of its machine, until the context ends or time runs out."""
    process.send_signal(signal.SIGSTOP)
    # Returns when all threads have stopped.
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    timer = threading.Timer(min(seconds, 3600.0), process.send_signal, (signal.SIGCONT,))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        process.send_signal(signal.SIGCONT)
