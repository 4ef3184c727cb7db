"""Mooncake's client, shared by threads. It is closed if a transfer may outlive its call.

The client waits 60 s for a transfer, then returns an error without stopping the transfer. Only closing the
client stops it. The client must not be closed while a thread is inside.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

NO_ROOM, WRONG_SIZE, NOT_FOUND, LEASE_EXPIRED, TRANSFER = -200, -600, -704, -707, -800
NOT_READABLE: Final = frozenset({NOT_FOUND, -702, -703})  # The put has not ended, or never will.
UNREACHABLE: Final = range(-999, -899)

_GIVES_UP_S = 50.0  # somewhat less than the client's own limit of 60 s
_NOTHING_BEGUN: Final = frozenset({NO_ROOM, WRONG_SIZE, *NOT_READABLE})
# The master's answers before a transfer, and the client's errors after one has ended: a wrong checksum, or a
# lease that expired meanwhile.
_NOTHING_RUNS: Final = _NOTHING_BEGUN | {
    *(-101, -103, -400, -601, -705, -706, LEASE_EXPIRED, -708, -801, -1010, -1011, -1700, -1701)
}


class Stopwatch:
    """Measures a call by the faster of two clocks, because the client's clock depends on its build."""

    def __init__(self) -> None:
        self._begun = (time.monotonic(), time.time())

    @property
    def seconds(self) -> float:
        """Seconds since this object was made."""
        return max(time.monotonic() - self._begun[0], time.time() - self._begun[1])


def may_go_on(codes: Iterable[int], seconds: float, protocol: str) -> bool:
    """Return whether a transfer may continue after the client's call has returned.

    Args:
        codes: return codes of the chunks.
        seconds: duration of the call.
        protocol: transport of the bytes. Over TCP a transfer that fails in time has ended. Over other
            transports, if a device fails during a submit, part of the chunk may still be in flight.
    """
    failed = {code for code in codes if code < 0}
    if seconds >= _GIVES_UP_S:
        return not failed <= _NOTHING_BEGUN
    return any(
        code not in UNREACHABLE and (code != TRANSFER or protocol != "tcp") for code in failed - _NOTHING_RUNS
    )


class SharedClient:
    """A client that threads use at the same time, until one of them closes it."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._calls = 0
        self._is_closing = False
        self._is_closed = False
        self._changed = threading.Condition()

    @property
    def is_usable(self) -> bool:
        """Whether no close has started."""
        return not self._is_closing

    @contextmanager
    def use(self) -> Iterator[Any]:
        """Yield the client, and keep it open while the context is entered.

        Raises:
            ConnectionAbortedError: the client is closed.
        """
        with self._changed:
            if self._is_closing:
                raise ConnectionAbortedError("Mooncake's client is closed; kvtier opens the tier anew")
            self._calls += 1
        try:
            yield self._client
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    def close(self) -> bool:
        """Close the client once no thread is inside, which stops all transfers; return whether it was open.

        A concurrent second call also returns only after the client is closed.
        """
        with self._changed:
            was_open, self._is_closing = not self._is_closing, True
            self._changed.wait_for(lambda: not self._calls)
            if not self._is_closed:
                self._client.close()
                self._is_closed = True
            return was_open
