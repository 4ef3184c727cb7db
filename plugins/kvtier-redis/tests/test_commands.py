"""Chunks put and got over a connection that breaks at any byte: a chunk reported as there is whole."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

import pytest

from kvtier.tiers.base import TRAILER_BYTES, Status
from kvtier_redis import _commands
from kvtier_redis._commands import Chunk, ValueLayout
from kvtier_redis._protocol import RespSocket, command
from kvtier_redis._reasons import ABSENT, OK, TORN, Result

LAYOUT = ValueLayout(chunk_bytes=10, max_value_bytes=4, ttl_s=60)
CONTENT = b"0123456789"
TRAILER = bytes(range(TRAILER_BYTES))
Operation = Callable[[RespSocket, ValueLayout, Sequence[Chunk]], None]


def answered(operation: Operation, chunks: Sequence[Chunk], replies: bytes) -> bytes:
    """Run an operation against a server that has sent these replies and hangs up; return what it was sent."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(replies)
        theirs.shutdown(socket.SHUT_WR)
        operation(RespSocket(ours), LAYOUT, chunks)
        ours.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: theirs.recv(65536), b""))


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


def empty(count: int) -> list[Chunk]:
    return [
        Chunk(b"k%d" % number, memoryview(bytearray(10)), bytearray(TRAILER_BYTES)) for number in range(count)
    ]


WHOLE = bulk(CONTENT[:4] + TRAILER) * 2 + (bulk(CONTENT[4:8]) + bulk(CONTENT[8:])) * 2


@pytest.mark.parametrize("cut", range(0, len(WHOLE), 5))
def test_a_get_that_breaks_off_gives_whole_chunks_or_none(cut: int) -> None:
    chunks = empty(2)
    with pytest.raises(ConnectionError):
        answered(_commands.get, chunks, WHOLE[:cut])
    for chunk in chunks:
        assert chunk.result is not OK or bytes(chunk.view) == CONTENT


def test_a_get_of_split_chunks() -> None:
    chunks = empty(2)
    answered(_commands.get, chunks, WHOLE)
    assert [chunk.result for chunk in chunks] == [OK, OK]
    assert {bytes(chunk.view) for chunk in chunks} == {CONTENT}
    assert {bytes(chunk.trailer) for chunk in chunks} == {TRAILER}


@pytest.mark.parametrize(
    ("parts", "result"),
    [
        (b"$-1\r\n" + bulk(CONTENT[8:]) + b":1\r\n", ABSENT),
        (bulk(CONTENT[4:8]) + b"$-1\r\n" + b":1\r\n", ABSENT),
        (bulk(CONTENT[4:8]) + bulk(b"x") + b":1\r\n", TORN),
        (bulk(CONTENT[4:8]) + b"-LOADING\r\n", Result(Status.FAILED, "loading")),
        (b"-MOVED 1 host:1\r\n-MOVED 1 host:1\r\n", Result(Status.FAILED, "moved")),
    ],
)
def test_a_missing_part_makes_the_whole_chunk_a_miss(parts: bytes, result: Result) -> None:
    chunks = empty(1)
    answered(_commands.get, chunks, bulk(CONTENT[:4] + TRAILER) + parts)
    assert chunks[0].result == result


@pytest.mark.parametrize(
    ("replies", "result"),
    [
        (b"+OK\r\n+OK\r\n+OK\r\n", OK),
        (b"+OK\r\n-OOM no\r\n+OK\r\n:1\r\n", Result(Status.REFUSED, "full")),
        (b"-READONLY no\r\n-READONLY no\r\n-READONLY no\r\n:0\r\n", Result(Status.FAILED, "readonly")),
        (b"-WHAT is this\r\n+OK\r\n+OK\r\n:1\r\n", Result(Status.FAILED, "error")),
    ],
)
def test_a_put_needs_all_parts_and_writes_the_key_last(replies: bytes, result: Result) -> None:
    chunks = empty(1)
    sent = answered(_commands.put, chunks, b":0\r\n" + replies)
    assert chunks[0].result == result
    assert sent.startswith(command(b"EXISTS", b"k0"))
    assert -1 < sent.rfind(b"k0:") < sent.rfind(b"$2\r\nk0\r\n$132")
    assert (command(b"UNLINK", b"k0") in sent) == (result is not OK)


def test_parts_of_other_bytes_have_other_keys_so_that_concurrent_puts_do_not_mix() -> None:
    mine, others = LAYOUT.tail_keys(b"k", TRAILER), LAYOUT.tail_keys(b"k", TRAILER[::-1])
    assert len({*mine, *others}) == 2 * (LAYOUT.parts - 1)
    assert mine == LAYOUT.tail_keys(b"k", bytearray(TRAILER))
