"""What is said on a connection: chunks put, got, asked for. Everything here blocks, in a thread.

A chunk is a value of its bytes and its trailer. One that is longer than ``value_bytes`` has parts: the
first part and the trailer are under the chunk's name, the others under names that depend on the trailer,
and so on the bytes. They are written first. Whoever finds the name finds parts of these very bytes, or
misses one, and then the chunk is not there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeGuard

from kvtier.tiers.base import TRAILER_BYTES
from kvtier_redis.answers import ABSENT, OK, TORN, End, end_of
from kvtier_redis.wire import Buffer, Refused, Reply, Wire, command, set_command

_WINDOW_BYTES: Final = 4 * 2**20  # what a server holds twice for a connection while it sends values
_MOST_AT_ONCE: Final = 512


@dataclass(slots=True)
class Chunk:
    """One chunk of a batch.

    Attributes:
        name: the key that it is kept under.
        view: its slot.
        trailer: on a put what is kept beside its bytes, on a get where that is written.
        end: how it ended; None while that is not known.
    """

    name: bytes
    view: memoryview
    trailer: bytearray
    end: End | None = None


@dataclass(frozen=True, slots=True)
class Form:
    """How chunks are kept.

    Attributes:
        chunk_bytes: their length.
        value_bytes: bytes of a chunk under one key at most.
        ttl_s: seconds until a key expires.
    """

    chunk_bytes: int
    value_bytes: int
    ttl_s: int

    @property
    def parts(self) -> int:
        """Keys of a chunk."""
        return -(-self.chunk_bytes // self.value_bytes)

    def part(self, view: memoryview, number: int) -> memoryview:
        """Return the bytes of one part."""
        return view[number * self.value_bytes : (number + 1) * self.value_bytes]

    def tail_names(self, name: bytes, trailer: Buffer) -> list[bytes]:
        """Return the keys of all parts but the first."""
        token = hashlib.blake2s(trailer, digest_size=8).hexdigest().encode()
        return [b"%b:%b:%d" % (name, token, number) for number in range(1, self.parts)]


def put(wire: Wire, form: Form, chunks: Sequence[Chunk]) -> None:
    """Keep chunks that are not there yet; each ``end`` says what came of it."""
    new = [chunk for chunk, there in zip(chunks, _refresh(wire, form, chunks), strict=True) if not there]

    def write(group: Sequence[Chunk]) -> Iterator[Buffer]:
        for chunk in group:
            for number, name in enumerate(form.tail_names(chunk.name, chunk.trailer), start=1):
                yield from set_command(name, [form.part(chunk.view, number)], form.ttl_s)
            yield from set_command(chunk.name, [form.part(chunk.view, 0), chunk.trailer], form.ttl_s)

    def read(group: Sequence[Chunk]) -> None:
        for chunk in group:
            refused = [reply for reply in _replies(wire, form.parts) if isinstance(reply, Refused)]
            chunk.end = end_of(refused[0]) if refused else OK

    _in_groups(wire, form, new, write, read)
    if form.parts > 1:
        _unlink(wire, [chunk.name for chunk in new if chunk.end is not OK])  # a part of it may be missing


def get(wire: Wire, form: Form, chunks: Sequence[Chunk]) -> None:
    """Fill slots; each ``end`` says what came of it. What is no good is removed."""
    begun: list[Chunk] = []

    def read(group: Sequence[Chunk]) -> None:
        for chunk in group:
            head = [form.part(chunk.view, 0), memoryview(chunk.trailer)]
            end = _end_of_get(wire.value_into(head))
            if end is OK and form.parts > 1:
                begun.append(chunk)  # it has no end before its last part is there
            else:
                chunk.end = end

    _in_groups(wire, form, chunks, lambda group: [command(b"GET", chunk.name) for chunk in group], read)
    _get_tails(wire, form, begun)
    bad = [chunk.name for chunk in chunks if chunk.end is TORN]
    _unlink(wire, bad + [chunk.name for chunk in begun if chunk.end is ABSENT])


def exist(wire: Wire, names: Sequence[bytes]) -> list[Reply]:
    """Ask which keys are there; 1 says yes."""
    return _ask(wire, (command(b"EXISTS", name) for name in names))


def touch(wire: Wire, form: Form, names: Sequence[bytes]) -> list[Reply]:
    """Let keys live on. Those of chunks in parts do not: their parts would not."""
    if form.parts > 1:
        return []
    return _ask(wire, (command(b"EXPIRE", name, form.ttl_s) for name in names))


def discard(wire: Wire, form: Form, names: Sequence[bytes]) -> list[Reply]:
    """Remove chunks."""
    if form.parts > 1:
        ends = _ask(wire, (command(b"GETRANGE", name, -TRAILER_BYTES, -1) for name in names))
        tails = [
            form.tail_names(name, end) for name, end in zip(names, ends, strict=True) if _is_trailer(end)
        ]
        names = [*names, *(tail for some in tails for tail in some)]
    return _unlink(wire, names)


def _get_tails(wire: Wire, form: Form, chunks: Sequence[Chunk]) -> None:
    """Get the other parts of chunks whose first part is there."""

    def write(group: Sequence[Chunk]) -> Iterator[Buffer]:
        for chunk in group:
            for name in form.tail_names(chunk.name, chunk.trailer):
                yield command(b"GET", name)

    def read(group: Sequence[Chunk]) -> None:
        for chunk in group:
            got = [wire.value_into([form.part(chunk.view, number)]) for number in range(1, form.parts)]
            chunk.end = next((_end_of_get(part) for part in got if part is not True), OK)

    _in_groups(wire, form, chunks, write, read)


def _end_of_get(reply: Reply | bool) -> End:
    if reply is None:
        return ABSENT
    if isinstance(reply, Refused):
        return end_of(reply)
    return OK if reply is True else TORN


def _refresh(wire: Wire, form: Form, chunks: Sequence[Chunk]) -> list[bool]:
    """Say which chunks are there, and let those live on; their ``end`` is OK."""
    if form.parts > 1:
        questions = [command(b"EXISTS", chunk.name) for chunk in chunks]
    else:
        questions = [command(b"EXPIRE", chunk.name, form.ttl_s) for chunk in chunks]
    found = []
    for chunk, reply in zip(chunks, _ask(wire, questions), strict=True):
        chunk.end = OK if reply == 1 else end_of(reply) if isinstance(reply, Refused) else None
        found.append(chunk.end is not None)
    return found


def _in_groups(
    wire: Wire,
    form: Form,
    chunks: Sequence[Chunk],
    write: Callable[[Sequence[Chunk]], Iterable[Buffer]],
    read: Callable[[Sequence[Chunk]], None],
) -> None:
    """Send one group of commands before the answers to the group before it are read: the server has work."""
    size = max(1, min(_MOST_AT_ONCE, _WINDOW_BYTES // form.chunk_bytes))
    unread: list[Sequence[Chunk]] = []
    for start in range(0, len(chunks), size):
        group = chunks[start : start + size]
        wire.send(write(group))
        unread.append(group)
        if len(unread) > 1:
            read(unread.pop(0))
    for group in unread:
        read(group)


def _ask(wire: Wire, questions: Iterable[bytes]) -> list[Reply]:
    """Ask many short questions. Where one is refused the others are answered all the same."""
    waiting = list(questions)
    replies: list[Reply] = []
    for start in range(0, len(waiting), _MOST_AT_ONCE):
        some = waiting[start : start + _MOST_AT_ONCE]
        wire.send([b"".join(some)])
        replies += _replies(wire, len(some))
    return replies


def _replies(wire: Wire, count: int) -> list[Reply]:
    return [wire.reply() for _ in range(count)]


def _unlink(wire: Wire, names: Sequence[bytes]) -> list[Reply]:
    return _ask(wire, (command(b"UNLINK", name) for name in names))


def _is_trailer(reply: Reply) -> TypeGuard[bytes]:
    return isinstance(reply, bytes) and len(reply) == TRAILER_BYTES
