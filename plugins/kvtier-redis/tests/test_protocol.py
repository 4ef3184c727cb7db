"""The protocol on a socket: replies in any pieces, values read straight into slots, broken connections."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtier.tiers import TRAILER_BYTES, Status
from kvtier_redis import _commands
from kvtier_redis._commands import BatchChunk
from kvtier_redis._protocol import ErrorReply, RespSocket
from kvtier_redis._reasons import ABSENT, OK, TIMED_OUT, TORN, ChunkResult

Pair = tuple[RespSocket, socket.socket]

CONTENT = b"0123456789"
TRAILER = bytes(range(TRAILER_BYTES))


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield RespSocket(ours), theirs


def send_in_pieces(theirs: socket.socket, data: bytes, size: int) -> None:
    """Send pieces from a thread so that each arrives separately."""

    def send() -> None:
        for start in range(0, len(data), size):
            theirs.sendall(data[start : start + size])
            time.sleep(0.001)

    threading.Thread(target=send).start()


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


def empty(count: int) -> list[BatchChunk]:
    return [BatchChunk(b"k", memoryview(bytearray(10)), bytearray(TRAILER_BYTES)) for _ in range(count)]


def after(data: bytes, call: Callable[[RespSocket], object]) -> object:
    """Return the result of a call to a server that has sent ``data`` and sends no more; or its error."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        try:
            return call(RespSocket(ours))
        except ConnectionError as error:
            return error


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_replies_in_any_pieces(pair: Pair, size: int) -> None:
    sock, theirs = pair
    send_in_pieces(theirs, b"+OK\r\n:1\r\n-OOM no room\r\n:-2\r\n", size)
    found = [sock.reply() for _ in range(4)]
    assert found == [b"OK", 1, "OOM no room", -2]
    assert isinstance(found[2], ErrorReply)
    assert not sock.has_unread


@pytest.mark.parametrize("size", [1, 5, 11, 1000])
def test_wrong_lengths_are_skipped(pair: Pair, size: int) -> None:
    sock, theirs = pair
    replies = b"".join(map(bulk, [CONTENT, b"short", b"", b"much too long", b"abcdefghij"]))
    send_in_pieces(theirs, replies + b"$-1\r\n-LOADING it\r\n:7\r\n", size)
    found: list[object] = []
    for _ in range(7):
        buffers = bytearray(6), bytearray(4)
        result = sock.value_into([memoryview(buffer) for buffer in buffers])
        found.append(bytes(buffers[0] + buffers[1]) if result is True else result)
    assert found == [CONTENT, False, False, False, b"abcdefghij", None, "LOADING it"]
    assert sock.reply() == 7


@pytest.mark.parametrize("call", ["reply", "value", "send"])
def test_cut_ends_a_blocked_call(pair: Pair, call: str) -> None:
    sock, theirs = pair
    theirs.sendall(b"$1000000\r\nabc" if call == "value" else b"+begun")
    calls: dict[str, Callable[[], object]] = {
        "reply": sock.reply,
        "value": lambda: sock.value_into([memoryview(bytearray(1_000_000))]),
        "send": lambda: sock.send([bytes(1 << 24)]),
    }
    threading.Timer(0.1, sock.cut).start()
    with pytest.raises(ConnectionError):  # or until the test's timeout
        calls[call]()


PIECES = st.sampled_from([b"+OK\r\n", b":1\r\n", b"$-1\r\n", b"$5\r\nabcde\r\n", b"$", b"-E\r\n", b"\r\n"])
STREAMS = st.binary(max_size=64) | st.lists(PIECES | st.binary(max_size=8), max_size=12).map(b"".join)


@given(STREAMS)
@example(b":abc\r\n")
@example(b":1_0\r\n")
@example(b":" + b"9" * 5000 + b"\r\n")
@example(b"+" + b"x" * 160_000)  # A line without an end must not be buffered for ever.
@example(b"HTTP/1.1 400 Bad Request\r\n")
def test_any_bytes_parse_or_break(data: bytes) -> None:
    reply = after(data, lambda sock: sock.reply())
    assert isinstance(reply, (bytes, int, ErrorReply, ConnectionError))
    if isinstance(reply, bytes):
        assert data.startswith(b"+" + reply + b"\r\n")


@given(STREAMS)
@example(b"$5\r\n01234xx")
@example(b"$ten\r\n")
@example(b"$" + b"9" * 18 + b"\r\n")
@example(b"*1\r\n")
def test_value_fills_buffers_or_is_refused(data: bytes) -> None:
    whole = bytearray(5)
    reply = after(data, lambda sock: sock.value_into([memoryview(whole)]))
    if reply is True:
        assert b"\r\n" + whole + b"\r\n" in data
    assert reply in (None, False, True) or isinstance(reply, (ErrorReply, ConnectionError))


WHOLE = bulk(CONTENT + TRAILER)


@pytest.mark.parametrize("cut", range(0, 2 * len(WHOLE), 5))
def test_broken_get_gives_whole_chunks(cut: int) -> None:
    chunks = empty(2)
    error = after((2 * WHOLE)[:cut], lambda sock: _commands.get(sock, chunks))
    assert isinstance(error, ConnectionError)
    for chunk in chunks:
        assert chunk.result is TIMED_OUT or (chunk.result, bytes(chunk.view)) == (OK, CONTENT)


@pytest.mark.parametrize(
    ("reply", "result"),
    [
        (WHOLE, OK),
        (b"$-1\r\n", ABSENT),
        (bulk(b"x") + b":1\r\n", TORN),
        (b"-LOADING\r\n", ChunkResult(Status.FAILED, "loading")),
    ],
)
def test_replies_match_their_chunks(reply: bytes, result: ChunkResult) -> None:
    chunks = empty(2)
    after(WHOLE + reply, lambda sock: _commands.get(sock, chunks))
    assert [chunk.result for chunk in chunks] == [OK, result]


@pytest.mark.parametrize(
    ("reply", "result"),
    [
        (b"+OK\r\n", OK),
        (b"-OOM no\r\n", ChunkResult(Status.REFUSED, "full")),
        (b"-READONLY no\r\n", ChunkResult(Status.FAILED, "readonly")),
        (b"-WHAT is this\r\n", ChunkResult(Status.FAILED, "error")),
    ],
)
def test_put_skips_existing_chunks(reply: bytes, result: ChunkResult) -> None:
    chunks = empty(2)
    after(b":1\r\n:0\r\n" + reply, lambda sock: _commands.put(sock, chunks, 60))
    assert [chunk.result for chunk in chunks] == [OK, result]
