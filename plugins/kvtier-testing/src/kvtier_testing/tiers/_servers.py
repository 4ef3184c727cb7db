"""What tests of a tier do with its server: skip where there is none, and stop it as if its machine hung."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Any, NoReturn

import pytest


def absent(why: str) -> NoReturn:
    """Skip a test where something is not installed; on CI it has to be."""
    if os.environ.get("CI", "").lower() == "true":
        pytest.fail(why)
    pytest.skip(why)


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
