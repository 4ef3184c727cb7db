"""The protocol on a socket: replies in any pieces, values read straight into buffers, and ``cut``."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvtier_redis._protocol import ErrorReply, ProtocolError, RespSocket, command, set_command

Pair = tuple[RespSocket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield RespSocket(ours), theirs


def send_in_pieces(theirs: socket.socket, data: bytes, size: int) -> None:
    """Send pieces from a thread, each of which arrives by itself."""

    def send() -> None:
        for start in range(0, len(data), size):
            theirs.sendall(data[start : start + size])
            time.sleep(0.001)

    threading.Thread(target=send).start()


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_replies_of_every_kind_in_pieces_of_any_size(pair: Pair, size: int) -> None:
    sock, theirs = pair
    replies = b"+OK\r\n:1\r\n-OOM no room\r\n$-1\r\n$5\r\na\r\nbc\r\n$0\r\n\r\n:-2\r\n"
    send_in_pieces(theirs, replies, size)
    found = [sock.reply() for _ in range(7)]
    assert found == [b"OK", 1, "OOM no room", None, b"a\r\nbc", b"", -2]
    assert isinstance(found[2], ErrorReply)
    assert sock.is_idle()


@pytest.mark.parametrize("size", [1, 5, 11, 1000])
def test_values_fill_their_buffers_and_those_of_other_lengths_are_skipped(pair: Pair, size: int) -> None:
    sock, theirs = pair
    values = [b"0123456789", b"short", b"", b"much too long", b"abcdefghij"]
    replies = b"".join(b"$%d\r\n%b\r\n" % (len(value), value) for value in values)
    send_in_pieces(theirs, replies + b"$-1\r\n-LOADING it\r\n:7\r\n", size)
    found: list[object] = []
    for _ in range(7):
        buffers = bytearray(6), bytearray(4)
        result = sock.value_into([memoryview(buffer) for buffer in buffers])
        found.append(bytes(buffers[0] + buffers[1]) if result is True else result)
    assert found == [b"0123456789", False, False, False, b"abcdefghij", None, "LOADING it"]
    assert sock.reply() == 7


def test_commands_are_encoded_whatever_their_buffers(pair: Pair) -> None:
    sock, theirs = pair
    sock.send(
        [command(b"EXPIRE", b"k", 60), *set_command(b"k", [memoryview(b"ab"), b"", bytearray(b"c")], 9)]
    )
    assert theirs.recv(1000) == (
        b"*3\r\n$6\r\nEXPIRE\r\n$1\r\nk\r\n$2\r\n60\r\n"
        b"*5\r\n$3\r\nSET\r\n$1\r\nk\r\n$3\r\nabc\r\n$2\r\nEX\r\n$1\r\n9\r\n"
    )


def test_more_than_a_socket_buffers_is_sent_whole(pair: Pair) -> None:
    sock, theirs = pair
    parts = [bytes([number % 256]) * 5000 for number in range(3000)]  # more buffers than one call takes
    received = bytearray()

    def receive() -> None:
        while len(received) < 3000 * 5000:
            received.extend(theirs.recv(1 << 20))

    thread = threading.Thread(target=receive)
    thread.start()
    sock.send(parts)
    thread.join()
    assert received == b"".join(parts)


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
    with pytest.raises(ConnectionError):  # or the test's timeout
        calls[call]()


def test_a_connection_with_unread_data_or_closed_by_the_server_is_not_idle(pair: Pair) -> None:
    sock, theirs = pair
    assert sock.is_idle()
    theirs.sendall(b"+unasked\r\n")
    assert not sock.is_idle()
    assert sock.reply() == b"unasked"
    assert sock.is_idle()
    theirs.close()
    assert not sock.is_idle()


@pytest.mark.parametrize("reply", [b"HTTP/1.1 400 Bad Request\r\n", b"*1\r\n"])
def test_other_protocols_are_detected(pair: Pair, reply: bytes) -> None:
    sock, theirs = pair
    theirs.sendall(reply)
    with pytest.raises(ProtocolError, match="not a Redis reply"):
        sock.reply()
    theirs.sendall(reply)
    with pytest.raises(ProtocolError, match="not a Redis value"):
        sock.value_into([memoryview(bytearray(1))])
