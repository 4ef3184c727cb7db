"""Commands on one connection, pipelined. All calls block and run in a worker thread.

The value of a chunk's key is the chunk's bytes and its trailer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvtier_redis._protocol import Buffer, ErrorReply, Reply, RespSocket, command, set_command
from kvtier_redis._reasons import ABSENT, OK, TIMED_OUT, TORN, ChunkResult, result_of

_WINDOW_BYTES: Final = 4 * 2**20  # A server buffers up to twice as much for each connection.
_PIPELINE_COMMANDS: Final = 512


@dataclass(slots=True)
class BatchChunk:
    """One chunk of a batch.

    Attributes:
        trailer: stored with the bytes by a put, filled in by a get.
        result: a timeout until it is known.
    """

    key: bytes
    view: memoryview
    trailer: bytearray
    result: ChunkResult = TIMED_OUT


@dataclass(slots=True)
class Question:
    """One short command about a key.

    Attributes:
        reply: None until it has arrived.
        result: reason for a missing reply; None if there is a reply.
    """

    key: bytes
    reply: Reply | None = None
    result: ChunkResult | None = TIMED_OUT


def put(sock: RespSocket, chunks: Sequence[BatchChunk], ttl_s: int) -> None:
    """Store the missing chunks and set each ``result``."""
    expire = [command(b"EXPIRE", chunk.key, ttl_s) for chunk in chunks]
    absent = []
    for chunk, reply in zip(chunks, pipeline(sock, expire), strict=True):
        if reply == 0:
            absent.append(chunk)
        else:
            chunk.result = result_of(reply) if isinstance(reply, ErrorReply) else OK

    def write(chunk: BatchChunk) -> list[Buffer]:
        return set_command(chunk.key, [chunk.view, chunk.trailer], ttl_s)

    def read(chunk: BatchChunk) -> None:
        reply = sock.reply()
        chunk.result = result_of(reply) if isinstance(reply, ErrorReply) else OK

    _in_groups(sock, absent, write, read)


def get(sock: RespSocket, chunks: Sequence[BatchChunk]) -> None:
    """Fill the slots and set each ``result``."""

    def write(chunk: BatchChunk) -> list[Buffer]:
        return [command(b"GET", chunk.key)]

    def read(chunk: BatchChunk) -> None:
        found = sock.value_into([chunk.view, memoryview(chunk.trailer)])
        if isinstance(found, ErrorReply):
            chunk.result = result_of(found)
        else:
            chunk.result = {True: OK, False: TORN, None: ABSENT}[found]

    _in_groups(sock, chunks, write, read)


def pipeline(sock: RespSocket, commands: Sequence[bytes]) -> list[Reply]:
    """Return the replies to many short commands; an error reply does not affect the others."""
    replies: list[Reply] = []
    for start in range(0, len(commands), _PIPELINE_COMMANDS):
        group = commands[start : start + _PIPELINE_COMMANDS]
        sock.send([b"".join(group)])
        replies += [sock.reply() for _ in group]
    return replies


def _in_groups(
    sock: RespSocket,
    chunks: Sequence[BatchChunk],
    write: Callable[[BatchChunk], Iterable[Buffer]],
    read: Callable[[BatchChunk], None],
) -> None:
    """Send each group's commands before reading the previous group's replies, which keeps the server busy."""
    if not chunks:
        return
    size = max(1, min(_PIPELINE_COMMANDS, _WINDOW_BYTES // len(chunks[0].view)))
    unread: Sequence[BatchChunk] = ()
    for start in range(0, len(chunks), size):
        group = chunks[start : start + size]
        sock.send(buffer for chunk in group for buffer in write(chunk))
        for chunk in unread:
            read(chunk)
        unread = group
    for chunk in unread:
        read(chunk)
