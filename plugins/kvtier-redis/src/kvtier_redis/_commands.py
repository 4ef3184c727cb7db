"""Chunk operations as pipelined commands on one connection. All calls block and run in a worker thread.

A chunk's value is its bytes and its trailer. A chunk longer than ``max_value_bytes`` is split: its key holds
the first part and the trailer; further keys hold the other parts. Their names contain a hash of the trailer,
and thereby of the bytes, and they are written first. A reader that finds the key therefore finds parts of
these very bytes, or misses one, and then the chunk is absent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvtier.tiers.base import TRAILER_BYTES
from kvtier_redis._protocol import Buffer, ErrorReply, Reply, RespSocket, command, set_command
from kvtier_redis._reasons import ABSENT, OK, TORN, Result, result_of

_WINDOW_BYTES: Final = 4 * 2**20  # a server buffers up to twice as much for each connection
_PIPELINE_COMMANDS: Final = 512


@dataclass(slots=True)
class Chunk:
    """One chunk of a batch.

    Attributes:
        key: its Redis key.
        view: its slot.
        trailer: on a put stored with the bytes, on a get filled in.
        result: None until it is known.
    """

    key: bytes
    view: memoryview
    trailer: bytearray
    result: Result | None = None


@dataclass(frozen=True, slots=True)
class ValueLayout:
    """How a chunk is split into values."""

    chunk_bytes: int
    max_value_bytes: int
    ttl_s: int

    @property
    def parts(self) -> int:
        """Number of keys of a chunk."""
        return -(-self.chunk_bytes // self.max_value_bytes)

    def part(self, view: memoryview, number: int) -> memoryview:
        """Return the bytes of one part."""
        return view[number * self.max_value_bytes : (number + 1) * self.max_value_bytes]

    def tail_keys(self, key: bytes, trailer: Buffer) -> list[bytes]:
        """Return the keys of all parts but the first."""
        token = hashlib.blake2s(trailer, digest_size=8).hexdigest().encode()
        return [b"%b:%b:%d" % (key, token, number) for number in range(1, self.parts)]


def put(sock: RespSocket, layout: ValueLayout, chunks: Sequence[Chunk]) -> None:
    """Store the chunks that are not there yet and set each ``result``."""
    _refresh(sock, layout, chunks)
    new = [chunk for chunk in chunks if chunk.result is None]

    def write(group: Sequence[Chunk]) -> Iterator[Buffer]:
        for chunk in group:
            for number, key in enumerate(layout.tail_keys(chunk.key, chunk.trailer), start=1):
                yield from set_command(key, [layout.part(chunk.view, number)], layout.ttl_s)
            yield from set_command(chunk.key, [layout.part(chunk.view, 0), chunk.trailer], layout.ttl_s)

    def read(group: Sequence[Chunk]) -> None:
        for chunk in group:
            replies = [sock.reply() for _ in range(layout.parts)]
            errors = [reply for reply in replies if isinstance(reply, ErrorReply)]
            chunk.result = result_of(errors[0]) if errors else OK

    _in_groups(sock, layout, new, write, read)
    if layout.parts > 1:
        _unlink(sock, [chunk.key for chunk in new if chunk.result is not OK])  # a part may be missing


def get(sock: RespSocket, layout: ValueLayout, chunks: Sequence[Chunk]) -> None:
    """Fill the slots and set each ``result``. Unusable chunks are removed from the server."""
    split: list[Chunk] = []

    def write(group: Sequence[Chunk]) -> Iterator[Buffer]:
        return (command(b"GET", chunk.key) for chunk in group)

    def read(group: Sequence[Chunk]) -> None:
        for chunk in group:
            result = _get_result(sock.value_into([layout.part(chunk.view, 0), memoryview(chunk.trailer)]))
            if result is OK and layout.parts > 1:
                split.append(chunk)  # no result before its last part is there
            else:
                chunk.result = result

    _in_groups(sock, layout, chunks, write, read)
    _get_tails(sock, layout, split)
    torn = [chunk.key for chunk in chunks if chunk.result is TORN]
    _unlink(sock, torn + [chunk.key for chunk in split if chunk.result is ABSENT])


def exists(sock: RespSocket, _: ValueLayout, keys: Sequence[bytes]) -> list[Reply]:
    """Return the reply of EXISTS for each key."""
    return _pipeline(sock, [command(b"EXISTS", key) for key in keys])


def touch(sock: RespSocket, layout: ValueLayout, keys: Sequence[bytes]) -> list[Reply]:
    """Restart the expiry of keys; not of split chunks, whose other parts would expire all the same."""
    if layout.parts > 1:
        return []
    return _pipeline(sock, [command(b"EXPIRE", key, layout.ttl_s) for key in keys])


def discard(sock: RespSocket, layout: ValueLayout, keys: Sequence[bytes]) -> list[Reply]:
    """Remove chunks with all their parts."""
    tails: list[bytes] = []
    if layout.parts > 1:
        trailers = _pipeline(sock, [command(b"GETRANGE", key, -TRAILER_BYTES, -1) for key in keys])
        for key, trailer in zip(keys, trailers, strict=True):
            if isinstance(trailer, bytes) and len(trailer) == TRAILER_BYTES:
                tails += layout.tail_keys(key, trailer)
    return _unlink(sock, [*keys, *tails])


def _get_tails(sock: RespSocket, layout: ValueLayout, chunks: Sequence[Chunk]) -> None:
    """Get the other parts of chunks whose first part is there."""

    def write(group: Sequence[Chunk]) -> Iterator[Buffer]:
        for chunk in group:
            for key in layout.tail_keys(chunk.key, chunk.trailer):
                yield command(b"GET", key)

    def read(group: Sequence[Chunk]) -> None:
        for chunk in group:
            got = [sock.value_into([layout.part(chunk.view, number)]) for number in range(1, layout.parts)]
            chunk.result = next((_get_result(part) for part in got if part is not True), OK)

    _in_groups(sock, layout, chunks, write, read)


def _get_result(reply: Reply | bool) -> Result:
    if reply is None:
        return ABSENT
    if isinstance(reply, ErrorReply):
        return result_of(reply)
    return OK if reply is True else TORN


def _refresh(sock: RespSocket, layout: ValueLayout, chunks: Sequence[Chunk]) -> None:
    """Set the ``result`` of chunks that are there, whose expiry restarts, and of those that are refused."""
    keys = [chunk.key for chunk in chunks]
    replies = exists(sock, layout, keys) if layout.parts > 1 else touch(sock, layout, keys)
    for chunk, reply in zip(chunks, replies, strict=True):
        chunk.result = OK if reply == 1 else result_of(reply) if isinstance(reply, ErrorReply) else None


def _in_groups(
    sock: RespSocket,
    layout: ValueLayout,
    chunks: Sequence[Chunk],
    write: Callable[[Sequence[Chunk]], Iterable[Buffer]],
    read: Callable[[Sequence[Chunk]], None],
) -> None:
    """Send each group's commands before reading the replies to the group before: the server stays busy."""
    size = max(1, min(_PIPELINE_COMMANDS, _WINDOW_BYTES // layout.chunk_bytes))
    unread: list[Sequence[Chunk]] = []
    for start in range(0, len(chunks), size):
        group = chunks[start : start + size]
        sock.send(write(group))
        unread.append(group)
        if len(unread) > 1:
            read(unread.pop(0))
    for group in unread:
        read(group)


def _pipeline(sock: RespSocket, commands: Sequence[bytes]) -> list[Reply]:
    """Return the replies to many short commands; an error reply does not affect the others."""
    replies: list[Reply] = []
    for start in range(0, len(commands), _PIPELINE_COMMANDS):
        group = commands[start : start + _PIPELINE_COMMANDS]
        sock.send([b"".join(group)])
        replies += [sock.reply() for _ in group]
    return replies


def _unlink(sock: RespSocket, keys: Sequence[bytes]) -> list[Reply]:
    return _pipeline(sock, [command(b"UNLINK", key) for key in keys])
