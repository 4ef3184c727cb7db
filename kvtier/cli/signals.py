"""The end of a command that is asked to end."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

_REQUESTS: Final = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Have a request to end, or a terminal that hangs up, remove what the command has made only for a while.

    Without it they end the process at once, and a bench leaves its gigabytes. What is ignored stays so.
    """
    ours = [number for number in _REQUESTS if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _end(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)  # as a shell says it
