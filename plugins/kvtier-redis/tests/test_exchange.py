"""Chunks put and got over a connection that breaks at any byte: what is said to be there is whole."""

from __future__ import annotations

import socket
import threading

import pytest

from kvtier.tiers.base import TRAILER_BYTES, Status
from kvtier_redis import exchange
from kvtier_redis.answers import ABSENT, OK, TORN, End
from kvtier_redis.exchange import Chunk, Form
from kvtier_redis.wire import Wire, command

FORM = Form(chunk_bytes=10, value_bytes=4, ttl_s=60)
CONTENT = b"0123456789"
TRAILER = bytes(range(TRAILER_BYTES))


class Scripted:
    """The other end of a connection: says what it is told to and hangs up."""

    def __init__(self, answer: bytes) -> None:
        ours, self._theirs = socket.socketpair()
        self._ours = ours
        self.wire = Wire(ours)
        self._answer = answer
        self._thread = threading.Thread(target=self._say)
        self._thread.start()

    def _say(self) -> None:
        self._theirs.sendall(self._answer)
        self._theirs.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._thread.join()
        self._ours.close()
        self._theirs.close()


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


def chunks(count: int) -> list[Chunk]:
    return [
        Chunk(b"k%d" % number, memoryview(bytearray(10)), bytearray(TRAILER_BYTES)) for number in range(count)
    ]


WHOLE = bulk(CONTENT[:4] + TRAILER) * 2 + (bulk(CONTENT[4:8]) + bulk(CONTENT[8:])) * 2


@pytest.mark.parametrize("cut", range(0, len(WHOLE), 5))
def test_a_get_that_breaks_off_gives_whole_chunks_or_none(cut: int) -> None:
    other = Scripted(WHOLE[:cut])
    got = chunks(2)
    with pytest.raises(ConnectionError):
        exchange.get(other.wire, FORM, got)
    other.close()
    for chunk in got:
        assert chunk.end is not OK or bytes(chunk.view) == CONTENT


def test_a_get_of_chunks_in_parts() -> None:
    other = Scripted(WHOLE)
    got = chunks(2)
    exchange.get(other.wire, FORM, got)
    other.close()
    assert [chunk.end for chunk in got] == [OK, OK]
    assert {bytes(chunk.view) for chunk in got} == {CONTENT}
    assert {bytes(chunk.trailer) for chunk in got} == {TRAILER}


@pytest.mark.parametrize(
    ("parts", "end"),
    [
        (b"$-1\r\n" + bulk(CONTENT[8:]) + b":1\r\n", ABSENT),
        (bulk(CONTENT[4:8]) + b"$-1\r\n" + b":1\r\n", ABSENT),
        (bulk(CONTENT[4:8]) + bulk(b"x") + b":1\r\n", TORN),
        (bulk(CONTENT[4:8]) + b"-LOADING\r\n", End(Status.FAILED, "loading")),
        (b"-MOVED 1 host:1\r\n-MOVED 1 host:1\r\n", End(Status.FAILED, "moved")),
    ],
)
def test_a_part_that_is_not_there_makes_the_whole_chunk_so(parts: bytes, end: End) -> None:
    other = Scripted(bulk(CONTENT[:4] + TRAILER) + parts)
    got = chunks(1)
    exchange.get(other.wire, FORM, got)
    other.close()
    assert got[0].end == end


@pytest.mark.parametrize(
    ("answers", "end"),
    [
        (b"+OK\r\n+OK\r\n+OK\r\n", OK),
        (b"+OK\r\n-OOM no\r\n+OK\r\n:1\r\n", End(Status.REFUSED, "full")),
        (b"-READONLY no\r\n-READONLY no\r\n-READONLY no\r\n:0\r\n", End(Status.FAILED, "readonly")),
        (b"-WHAT is this\r\n+OK\r\n+OK\r\n:1\r\n", End(Status.FAILED, "error")),
    ],
)
def test_a_put_is_kept_when_all_its_parts_are(answers: bytes, end: End) -> None:
    other = Scripted(b":0\r\n" + answers)
    put = chunks(1)
    exchange.put(other.wire, FORM, put)
    assert put[0].end == end
    other._ours.shutdown(socket.SHUT_WR)
    sent = b"".join(iter(lambda: other._theirs.recv(65536), b""))
    other.close()
    assert sent.startswith(command(b"EXISTS", b"k0"))
    names = [b"k0:" in sent, sent.rfind(b"$2\r\nk0\r\n$132") > sent.rfind(b"k0:")]
    assert names == [True, True], "the parts go before the key that names them"
    assert (command(b"UNLINK", b"k0") in sent) == (end is not OK)


def test_parts_of_other_bytes_have_other_names_so_that_two_who_put_at_once_do_not_mix() -> None:
    mine, others = FORM.tail_names(b"k", TRAILER), FORM.tail_names(b"k", TRAILER[::-1])
    assert len({*mine, *others}) == 2 * (FORM.parts - 1)
    assert mine == FORM.tail_names(b"k", bytearray(TRAILER))
