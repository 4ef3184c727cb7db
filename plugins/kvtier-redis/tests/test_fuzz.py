"""Whatever a server sends, the parser returns a reply or raises ConnectionError."""

from __future__ import annotations

import socket
from collections.abc import Callable

from hypothesis import example, given
from hypothesis import strategies as st

from kvtier_redis._protocol import ErrorReply, RespSocket

PIECES = st.sampled_from(
    [b"+OK\r\n", b":1\r\n", b"$-1\r\n", b"$5\r\nabcde\r\n", b"$", b":", b"-E\r\n", b"\r\n", b"9" * 20]
)
STREAMS = st.binary(max_size=64) | st.lists(PIECES | st.binary(max_size=8), max_size=12).map(b"".join)


def received(data: bytes, read: Callable[[RespSocket], object]) -> object:
    """Return what is read from a server that sends ``data`` and hangs up; the error where it is refused."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.close()
        try:
            return read(RespSocket(ours))
        except ConnectionError as error:
            return error


@given(STREAMS)
@example(b":abc\r\n")
@example(b":1_0\r\n")
@example(b"$" + b"9" * 18 + b"\r\n")
@example(b"$" + b"9" * 5000 + b"\r\n")
@example(b"$2\r\nabcd")
def test_any_bytes_are_a_reply_or_a_broken_connection(data: bytes) -> None:
    reply = received(data, lambda sock: sock.reply())
    assert reply is None or isinstance(reply, (bytes, int, ErrorReply, ConnectionError))
    if isinstance(reply, bytes):
        assert data.startswith((b"+" + reply + b"\r\n", b"$"))
        assert reply + b"\r\n" in data


@given(STREAMS)
@example(b"$10\r\n0123456789xx")
@example(b"$ten\r\n")
def test_a_value_fills_its_buffers_or_is_refused(data: bytes) -> None:
    whole = bytearray(5)
    reply = received(data, lambda sock: sock.value_into([memoryview(whole)]))
    if reply is True:
        assert b"\r\n" + whole + b"\r\n" in data
    assert reply in (None, False, True) or isinstance(reply, (ErrorReply, ConnectionError))


def test_a_line_without_an_end_is_refused_while_it_is_short() -> None:
    assert isinstance(received(b"+" + b"x" * 160_000, lambda sock: sock.reply()), ConnectionError)
