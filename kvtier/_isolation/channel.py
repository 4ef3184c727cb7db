"""Frames to and from the other process. Neither sending nor receiving blocks."""

from __future__ import annotations

import errno
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator

from kvtier._isolation.wire import Frames

_AT_ONCE = 64
_NO_MEMORY = frozenset((errno.ENOBUFS, errno.ENOMEM))  # at a container's memory limit
RETRY_S = 0.01
_READ_BYTES = 256 * 1024


class Channel:
    """Frames over a socket, which must not block. One thread receives.

    Any thread may add frames; they go out whole and in order. ``add`` sends as much as the socket takes at
    once. The thread that polls the socket sends the rest with ``flush``. Any thread may call ``on_full``: the
    socket's buffer became full.
    """

    def __init__(self, sock: socket.socket, on_full: Callable[[], object]) -> None:
        self.is_full = False  # whether frames wait until the socket accepts more
        # Polls do not report when the socket accepts more, so try again after ``RETRY_S``.
        self.lacks_memory = False
        self.is_closed = False  # whether all data was received and the other process is gone
        self._received = Frames()
        self._sock = sock
        self._on_full = on_full
        self._frames: deque[bytes] = deque()
        self._rest = memoryview(b"")
        # Threads never wait for this lock. A thread that does not get it leaves its frame to the owner.
        self._sending = threading.Lock()

    def __len__(self) -> int:
        return len(self._frames)

    def receive(self, reads: float = 1) -> Iterator[bytes]:
        """Yield the frames that ``reads`` reads find. Raises WireError if one is too long."""
        while reads > 0:
            reads -= 1
            try:
                data = self._sock.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.is_closed = True
                return
            yield from self._received.feed(data)

    def add(self, frame: bytes) -> None:
        """Send a frame at once, or as soon as the socket accepts it."""
        self._frames.append(frame)
        self.flush()

    def flush(self) -> None:
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

    def close(self) -> None:
        """Close the socket, but not during a send: its descriptor could be reused before the send."""
        with self._sending:
            self._sock.close()

    def _send(self) -> bool:
        """Send the waiting frames; return whether the socket accepted them all."""
        while self._rest or self._frames:
            if not self._rest:
                count = min(len(self._frames), _AT_ONCE)
                self._rest = memoryview(b"".join([self._frames.popleft() for _ in range(count)]))
            try:
                sent = self._sock.send(self._rest, socket.MSG_NOSIGNAL)
            except OSError as error:
                self.lacks_memory = error.errno in _NO_MEMORY
                if self.lacks_memory or error.errno == errno.EAGAIN:
                    return False
                # The other process is gone, which its owner notices in another way.
                self._rest = memoryview(b"")
                self._frames.clear()
                return True
            self._rest, self.lacks_memory = self._rest[sent:], False
        return True
