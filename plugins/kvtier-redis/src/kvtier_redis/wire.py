"""Redis' protocol on a socket, for bytes that go from slots and into slots without a copy.

A client library reads a value into a buffer of its own, makes an object of it, and that is copied into the
slot: three times the bytes. Here the kernel writes into the slot. Everything blocks: the calls are made in
a thread, and give the interpreter back once a value and not once a packet.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Protocol

Buffer = bytes | bytearray | memoryview
Arg = bytes | int

_MOST_BUFFERS = 1024  # IOV_MAX
_READ_BYTES = 64 * 1024
_HEADER_BYTES = 16  # no longer than the shortest value's header and value: what is read too much is copied
_SCRATCH_BYTES = 1024 * 1024


class ProtocolError(ConnectionError):
    """The other end does not speak as expected: the connection is of no use any more."""


class Refused(str):
    """What a server answered instead of doing what it was told, such as ``OOM command not allowed``."""

    __slots__ = ()


Reply = bytes | int | None | Refused


def command(*args: Arg) -> bytes:
    """Make one command."""
    parts = [b"*%d\r\n" % len(args)]
    for arg in args:
        text = b"%d" % arg if isinstance(arg, int) else arg
        parts.append(b"$%d\r\n%b\r\n" % (len(text), text))
    return b"".join(parts)


def set_command(key: bytes, value: Sequence[Buffer], ttl_s: int) -> list[Buffer]:
    """Make the command that sets a key to a value of several parts, none of which is copied."""
    length = sum(len(part) for part in value)
    head = b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, length)
    ttl = b"%d" % ttl_s
    return [head, *value, b"\r\n$2\r\nEX\r\n$%d\r\n%b\r\n" % (len(ttl), ttl)]


class Medium(Protocol):
    """How bytes get through a socket. Returns how many did."""

    def send(self, buffers: list[memoryview]) -> int: ...

    def receive(self, buffers: list[memoryview]) -> int: ...


class Plain:
    """TCP without TLS, or a Unix socket: many buffers in one call, each filled to its end."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, buffers: list[memoryview]) -> int:
        return self._sock.sendmsg(buffers[:_MOST_BUFFERS])

    def receive(self, buffers: list[memoryview]) -> int:
        return self._sock.recvmsg_into(buffers[:_MOST_BUFFERS], 0, socket.MSG_WAITALL)[0]


class Tls:
    """TLS: one buffer a call; reading gives what one record has."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock

    def send(self, buffers: list[memoryview]) -> int:
        return self._sock.send(buffers[0])

    def receive(self, buffers: list[memoryview]) -> int:
        return self._sock.recv_into(buffers[0])


class Wire:
    """One connection. Its calls block, and are made by one thread at a time; ``cut`` by any.

    Args:
        sock: connected, logged in, and without an answer that was not read.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)  # blocking for the kernel, too: only then is a buffer filled in one call
        self._sock = sock
        self._medium: Medium = Tls(sock) if isinstance(sock, ssl.SSLSocket) else Plain(sock)
        self._inbox = bytearray()

    def cut(self) -> None:
        """End every call that is under way: each raises ConnectionError soon."""
        with suppress(OSError):  # not connected any more
            # Of the socket itself: TLS would take its state away from under the other thread.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def is_idle(self) -> bool:
        """Say whether the other end has neither hung up nor said anything unasked. Does not block."""
        if self._inbox:
            return False
        try:
            # Underneath TLS, too: what is there, if only the notice of its end, was not asked for.
            socket.socket.recv(self._sock, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def send(self, buffers: Iterable[Buffer]) -> None:
        """Send everything."""
        left = [memoryview(buffer) for buffer in buffers]
        while left:
            left = _after(left, self._medium.send(left))

    def reply(self, read_bytes: int = _READ_BYTES) -> Reply:
        """Read one answer that is short."""
        line = self._line(read_bytes)
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b":":
            return int(rest)
        if kind == b"-":
            return Refused(rest.decode(errors="replace"))
        if kind == b"$":
            return self._bulk(int(rest))
        raise ProtocolError(f"an answer begins with {line[:16]!r}")

    def value_into(self, buffers: Sequence[memoryview]) -> Reply | bool:
        """Read an answer that is a value into buffers which it should fill exactly.

        Returns:
            True where it did, False where the value has another length and was left out, None where there
            is no value, or the server's refusal.
        """
        line = self._line(_HEADER_BYTES)
        if line[:1] == b"-":
            return Refused(line[1:].decode(errors="replace"))
        if line[:1] != b"$":
            raise ProtocolError(f"in place of a value there is {line[:16]!r}")
        length = int(line[1:])
        if length < 0:
            return None
        fits = length == sum(len(buffer) for buffer in buffers)
        if fits:
            self._fill([*buffers, memoryview(bytearray(2))])
        else:
            self._skip(length + 2)
        return fits

    def _bulk(self, length: int) -> bytes | None:
        if length < 0:
            return None
        value = bytearray(length + 2)
        self._fill([memoryview(value)])
        return bytes(value[:-2])

    def _line(self, read_bytes: int) -> bytes:
        while (end := self._inbox.find(b"\r\n")) < 0:
            data = self._sock.recv(read_bytes)
            if not data:
                raise ConnectionResetError("the server has closed the connection")
            self._inbox += data
        line = bytes(self._inbox[:end])
        del self._inbox[: end + 2]
        return line

    def _fill(self, buffers: list[memoryview]) -> None:
        left = [buffer for buffer in buffers if len(buffer)]
        while left and self._inbox:
            taken = min(len(self._inbox), len(left[0]))
            left[0][:taken] = self._inbox[:taken]
            del self._inbox[:taken]
            left = _after(left, taken)
        while left:
            count = self._medium.receive(left)
            if not count:
                raise ConnectionResetError("the server has closed the connection")
            left = _after(left, count)

    def _skip(self, length: int) -> None:
        scratch = memoryview(bytearray(min(length, _SCRATCH_BYTES)))
        while length:
            part = scratch[: min(length, len(scratch))]
            self._fill([part])
            length -= len(part)


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of buffers when their first ``count`` bytes are done."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []
