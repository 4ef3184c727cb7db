"""What tests of a tier do with its server: skip where there is none, find it a port, stop it as if hung."""

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
_given: set[int] = set()


def absent(why: str) -> NoReturn:
    """Skip a test where something is not installed; on CI it has to be."""
    if os.environ.get("CI", "").lower() == "true":
        pytest.fail(why)
    pytest.skip(why)


def free_port(*beside: int) -> int:
    """Return a port that is free on loopback, as are those so far above it.

    It is below the ephemeral ports, and was not returned before: its server may not listen yet.
    """
    while True:
        port = random.SystemRandom().choice(_PORTS)
        if port in _given:
            continue
        with ExitStack() as stack, suppress(OSError):
            for distance in (0, *beside):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port + distance))
            _given.add(port)
            return port


@contextmanager
def stopped(process: subprocess.Popen[Any], seconds: float = inf) -> Iterator[None]:
    """Stop a process, as on a machine that hangs, until the context is left or the time is over."""
    process.send_signal(signal.SIGSTOP)
    timer = threading.Timer(min(seconds, 3600.0), process.send_signal, (signal.SIGCONT,))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        process.send_signal(signal.SIGCONT)
