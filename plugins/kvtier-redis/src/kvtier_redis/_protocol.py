"""The Redis protocol on a socket, without copies between the socket and a slot.

A client library reads a value into its own buffer, makes an object of it and copies that into the slot: three
times the bytes. Here the kernel reads and writes the slot itself. All calls block. They run in a worker
thread and release the interpreter lock for a whole value, not for one packet.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterable, Sequence
from contextlib import suppress

Buffer = bytes | bytearray | memoryview
Arg = bytes | int

_IOV_MAX = 1024
_READ_BYTES = 64 * 1024
_HEADER_BYTES = 16  # At most the shortest value with its header, because bytes read beyond it are copied.
_MAX_LINE_BYTES = 2 * _READ_BYTES
_NUMBER = re.compile(rb"[+-]?[0-9]{1,19}")
_SCRATCH_BYTES = 1024 * 1024


class ProtocolError(ConnectionError):
    """The server sent an unexpected reply; the connection must be closed."""


class ErrorReply(str):
    """An error reply of the server, such as ``OOM command not allowed``."""

    __slots__ = ()


Reply = bytes | int | ErrorReply


def command(*args: Arg) -> bytes:
    """Return one encoded command."""
    parts = [b"*%d\r\n" % len(args)]
    for arg in args:
        text = b"%d" % arg if isinstance(arg, int) else arg
        parts.append(b"$%d\r\n%b\r\n" % (len(text), text))
    return b"".join(parts)


def set_command(key: bytes, value: Sequence[Buffer], ttl_s: int) -> list[Buffer]:
    """Return the buffers of a SET with expiry. The parts of ``value`` are not copied."""
    length = sum(len(part) for part in value)
    head = b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, length)
    ttl = b"%d" % ttl_s
    return [head, *value, b"\r\n$2\r\nEX\r\n$%d\r\n%b\r\n" % (len(ttl), ttl)]


class RespSocket:
    """A connected socket that speaks RESP 2. One thread uses it at a time; any thread may call ``cut``.

    Args:
        sock: a socket that is connected and logged in, without an unread reply.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)  # Also blocking for the kernel, because only then does one call fill a buffer.
        self._sock = sock
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        self._inbox = bytearray()

    def cut(self) -> None:
        """Shut the socket down: every blocked call raises ConnectionError soon."""
        with suppress(OSError):  # the socket is not connected any more
            # Use the plain socket: SSLSocket.shutdown would free the state that the other thread is using.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    @property
    def has_unread(self) -> bool:
        """Whether unread bytes were received. If so, the connection is out of step and must be closed."""
        return bool(self._inbox)

    def send(self, buffers: Iterable[Buffer]) -> None:
        """Send all buffers."""
        left = [memoryview(buffer) for buffer in buffers]
        while left:
            sent = self._sock.send(left[0]) if self._is_tls else self._sock.sendmsg(left[:_IOV_MAX])
            left = _after(left, sent)

    def reply(self) -> Reply:
        """Read one reply that is not a value."""
        line = self._line(_READ_BYTES)
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b":":
            return _number(rest)
        if kind == b"-":
            return ErrorReply(rest.decode(errors="replace"))
        raise ProtocolError(f"not a Redis reply: {line[:16]!r}")

    def value_into(self, buffers: Sequence[memoryview]) -> bool | ErrorReply | None:
        """Read a value into ``buffers``, which it must fill exactly.

        Returns:
            True if it did; False if the value has another length and was skipped; None if the key does not
            exist; otherwise the error reply.
        """
        line = self._line(_HEADER_BYTES)
        if line[:1] == b"-":
            return ErrorReply(line[1:].decode(errors="replace"))
        if line[:1] != b"$":
            raise ProtocolError(f"not a Redis value: {line[:16]!r}")
        length = _number(line[1:])
        if length < 0:
            return None
        fits = length == sum(len(buffer) for buffer in buffers)
        end = bytearray(2)
        if not fits:
            self._skip(length)
        self._fill([*(buffers if fits else ()), memoryview(end)])
        if end != b"\r\n":
            raise ProtocolError(f"a value ends with {bytes(end)!r}")
        return fits

    def _line(self, read_bytes: int) -> bytes:
        while (end := self._inbox.find(b"\r\n")) < 0:
            data = self._sock.recv(read_bytes)
            if not data:
                raise ConnectionResetError("the server closed the connection")
            self._inbox += data
            if len(self._inbox) > _MAX_LINE_BYTES and b"\r\n" not in self._inbox:
                raise ProtocolError(f"no line ends within {len(self._inbox)} bytes")
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
            received = self._receive(left)
            if not received:
                raise ConnectionResetError("the server closed the connection")
            left = _after(left, received)

    def _receive(self, buffers: list[memoryview]) -> int:
        if self._is_tls:  # at most one TLS record
            return self._sock.recv_into(buffers[0])
        return self._sock.recvmsg_into(buffers[:_IOV_MAX], 0, socket.MSG_WAITALL)[0]

    def _skip(self, length: int) -> None:
        scratch = memoryview(bytearray(min(length, _SCRATCH_BYTES)))
        while length:
            part = scratch[: min(length, len(scratch))]
            self._fill([part])
            length -= len(part)


def _number(text: bytes) -> int:
    """Return a number of at most 64 bits."""
    if not _NUMBER.fullmatch(text):
        raise ProtocolError(f"not a number: {text[:16]!r}")
    return int(text)


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return what remains of ``buffers`` after their first ``count`` bytes."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []
