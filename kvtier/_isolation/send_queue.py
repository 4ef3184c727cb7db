"""Frames on their way to the other process. Sending never blocks."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable

_AT_ONCE = 64


class SendQueue:
    """Frames for a socket. Any thread may add some; they go out whole and in order.

    ``add`` sends what the socket, which does not block, takes at once; who polls the socket sends the rest,
    with ``flush``. ``on_full`` is called, by any thread, when the socket's buffer becomes full.
    """

    def __init__(self, sock: socket.socket, on_full: Callable[[], object]) -> None:
        self.is_full = False  # whether frames wait for the socket to take more
        self._sock = sock
        self._on_full = on_full
        self._frames: deque[bytes] = deque()
        self._rest = memoryview(b"")
        # Never waited for: a thread that does not get it leaves its frame to the thread that has it.
        self._sending = threading.Lock()

    def __len__(self) -> int:
        return len(self._frames)

    def add(self, frame: bytes) -> None:
        """Send a frame, now or as soon as it can be."""
        self._frames.append(frame)
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes now."""
        while (self._frames or self._rest) and self._sending.acquire(blocking=False):
            was_full = self.is_full
            try:
                self.is_full = is_full = not self._send()
            finally:
                self._sending.release()
            if is_full:
                if not was_full:
                    self._on_full()
                return

    def _send(self) -> bool:
        """Send what there is; return whether the socket has taken it all."""
        while self._rest or self._frames:
            if not self._rest:
                count = min(len(self._frames), _AT_ONCE)
                self._rest = memoryview(b"".join([self._frames.popleft() for _ in range(count)]))
            try:
                sent = self._sock.send(self._rest, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            except OSError:  # the other process is gone, which its owner notices by other means
                self._rest = memoryview(b"")
                self._frames.clear()
                return True
            self._rest = self._rest[sent:]
        return True
