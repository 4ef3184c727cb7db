"""The protocol on a socket: answers in any pieces, values straight into buffers, and being cut."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvtier_redis.wire import ProtocolError, Refused, Wire, command, set_command

Pair = tuple[Wire, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Wire(ours), theirs


def in_pieces(theirs: socket.socket, answer: bytes, size: int) -> threading.Thread:
    """Say something in pieces, each of which arrives by itself."""

    def say() -> None:
        for start in range(0, len(answer), size):
            theirs.sendall(answer[start : start + size])
            time.sleep(0.001)

    thread = threading.Thread(target=say)
    thread.start()
    return thread


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_answers_of_every_kind_arrive_in_pieces_of_any_size(pair: Pair, size: int) -> None:
    wire, theirs = pair
    saying = in_pieces(
        theirs, b"+OK\r\n:1\r\n-OOM no room\r\n$-1\r\n$5\r\na\r\nbc\r\n$0\r\n\r\n:-2\r\n", size
    )
    replies = [wire.reply() for _ in range(7)]
    saying.join()
    assert replies == [b"OK", 1, "OOM no room", None, b"a\r\nbc", b"", -2]
    assert isinstance(replies[2], Refused)
    assert wire.is_idle()


@pytest.mark.parametrize("size", [1, 5, 11, 1000])
def test_values_land_in_their_buffers_and_others_are_left_out(pair: Pair, size: int) -> None:
    wire, theirs = pair
    values = [b"0123456789", b"short", b"", b"much too long", b"abcdefghij"]
    answer = (
        b"".join(b"$%d\r\n%b\r\n" % (len(value), value) for value in values) + b"$-1\r\n-LOADING it\r\n:7\r\n"
    )
    saying = in_pieces(theirs, answer, size)
    found = []
    for _ in range(7):
        buffers = bytearray(6), bytearray(4)
        result = wire.value_into([memoryview(buffer) for buffer in buffers])
        found.append((result, bytes(buffers[0] + buffers[1]) if result is True else b""))
    saying.join()
    assert found == [
        (True, b"0123456789"),
        (False, b""),
        (False, b""),
        (False, b""),
        (True, b"abcdefghij"),
        (None, b""),
        ("LOADING it", b""),
    ]
    assert wire.reply() == 7


def test_what_is_sent_is_a_command_whatever_its_parts_are(pair: Pair) -> None:
    wire, theirs = pair
    wire.send(
        [command(b"EXPIRE", b"k", 60), *set_command(b"k", [memoryview(b"ab"), b"", bytearray(b"c")], 9)]
    )
    assert theirs.recv(1000) == (
        b"*3\r\n$6\r\nEXPIRE\r\n$1\r\nk\r\n$2\r\n60\r\n"
        b"*5\r\n$3\r\nSET\r\n$1\r\nk\r\n$3\r\nabc\r\n$2\r\nEX\r\n$1\r\n9\r\n"
    )


def test_more_than_a_socket_holds_is_sent_whole(pair: Pair) -> None:
    wire, theirs = pair
    parts = [bytes([number % 256]) * 5000 for number in range(3000)]  # more buffers than one call takes
    received = bytearray()

    def hear() -> None:
        while len(received) < 3000 * 5000:
            received.extend(theirs.recv(1 << 20))

    thread = threading.Thread(target=hear)
    thread.start()
    wire.send(parts)
    thread.join()
    assert received == b"".join(parts)


@pytest.mark.parametrize("call", ["reply", "value", "send"])
def test_a_call_that_is_cut_ends_at_once(pair: Pair, call: str) -> None:
    wire, theirs = pair
    theirs.sendall(b"$1000000\r\nabc" if call == "value" else b"+begun")
    calls: dict[str, Callable[[], object]] = {
        "reply": wire.reply,
        "value": lambda: wire.value_into([memoryview(bytearray(1_000_000))]),
        "send": lambda: wire.send([bytes(1 << 24)]),
    }
    threading.Timer(0.1, wire.cut).start()
    started = time.monotonic()
    with pytest.raises(ConnectionError):
        calls[call]()
    assert time.monotonic() - started < 5


def test_a_connection_that_was_closed_or_spoken_to_is_not_idle(pair: Pair) -> None:
    wire, theirs = pair
    assert wire.is_idle()
    theirs.sendall(b"+unasked\r\n")
    assert not wire.is_idle()
    assert wire.reply() == b"unasked"
    assert wire.is_idle()
    theirs.close()
    assert not wire.is_idle()


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n", b"*1\r\n"])
def test_who_does_not_speak_redis_is_found_out(pair: Pair, answer: bytes) -> None:
    wire, theirs = pair
    theirs.sendall(answer)
    with pytest.raises(ProtocolError, match="an answer begins with"):
        wire.reply()
    theirs.sendall(answer)
    with pytest.raises(ProtocolError, match="in place of a value there is"):
        wire.value_into([memoryview(bytearray(1))])
