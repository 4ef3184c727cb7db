"""What the engine and the process of the tiers say to each other, as bytes.

A message is an array of MessagePack whose first element says what it is; several go into one frame, which
has its length in front. Nothing is taken as it comes: what does not have the types and the bounds given
here is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta, Struct

from kvtier.core.messages import MAX_TEXT, Command, Number, Seconds, Text, TierEvent
from kvtier.errors import KVTierError
from kvtier.identity import Identity
from kvtier.tiers.activity import TierActivity

MAX_FRAME_BYTES = 256 * 2**20
LENGTH_BYTES = 4
STARTED = 0
"""The id of the ``Reached`` that a process says unasked: it runs, and has touched no tier so far."""


class WireError(KVTierError):
    """The other side has said something that can not be understood."""


# --- what the engine says --------------------------------------------------------------------------


class Ping(Struct, array_like=True, frozen=True, tag=5):
    """Answer with ``Pong``: the event loop runs."""


class WhenSettled(Struct, array_like=True, frozen=True, tag=6):
    """Answer with ``Reached`` when every tier is through with the resets so far."""

    id: Number


class WhenDrained(Struct, array_like=True, frozen=True, tag=7):
    """Answer with ``Reached`` when no put, no fetch and no reset is under way."""

    id: Number


class Leave(Struct, array_like=True, frozen=True, tag=8):
    """Let what runs end, for ``drain_s`` seconds at most; close the tiers in ``close_s`` more; end."""

    drain_s: Seconds
    close_s: Seconds


Order = Command | Ping | WhenSettled | WhenDrained | Leave


class TierSettings(Struct, frozen=True):
    """A tier: its name in logs, and its settings as a user would write them."""

    name: Text
    settings: dict[str, Any]


class IdentityText(Struct, frozen=True):
    """An ``Identity``, its fields as JSON text."""

    model: str
    fields: str

    @staticmethod
    def of(identity: Identity) -> IdentityText:
        """Spell an identity."""
        return IdentityText(identity.model, identity.manifest)

    def read(self) -> Identity:
        """Return the identity."""
        return Identity(self.model, json.loads(self.fields))


class CustodyText(Struct, frozen=True):
    """A ``Custody``: where in the board of the region its words are, and how they are to be read."""

    offset: Number
    rate: Annotated[float, Meta(ge=0, le=1)]
    areas: Number
    area_bytes: Number
    is_shared: bool


class Hello(Struct, frozen=True, kw_only=True):
    """The first frame: all that the process needs to know. It may hold secrets."""

    tiers: list[TierSettings]
    identity: IdentityText
    slots: Number
    chunk_bytes: Number
    board_bytes: Number
    custody: CustodyText | None
    epochs: list[Number]
    cpus: list[Number]
    memory_limit_bytes: Number | None
    log_level: Number
    other_log_level: Number


# --- what the process of the tiers says ------------------------------------------------------------


class Pong(Struct, array_like=True, frozen=True, tag=6):
    """The answer to ``Ping``."""


class Reached(Struct, array_like=True, frozen=True, tag=7):
    """The answer to ``WhenSettled`` and ``WhenDrained``; and ``STARTED``."""

    id: Number


class Activity(Struct, array_like=True, frozen=True, tag=8):
    """What a tier is doing."""

    tier: Number
    puts_submitted: Number
    puts_running: Number
    gets_submitted: Number
    gets_running: Number
    used_bytes: Number | None
    capacity_bytes: Number | None
    knows_usage: bool


class LogLine(Struct, array_like=True, frozen=True, tag=9):
    """A line for the log."""

    level: Annotated[int, Meta(ge=0, le=100)]
    logger: Annotated[str, Meta(max_length=256)]
    text: Text


Report = TierEvent | Pong | Reached | Activity | LogLine


def _plain(value: object) -> object:
    """Return what a tier has said in a kind of its own, as pydantic's ByteSize, as what it is beneath."""
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be sent")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_orders = msgspec.msgpack.Decoder(list[Order])
_reports = msgspec.msgpack.Decoder(list[Report])
_hello = msgspec.msgpack.Decoder(Hello)


def activity_of(tier: int, activity: TierActivity) -> Activity:
    """Spell what a tier is doing."""
    puts, gets, usage = activity.puts, activity.gets, activity.usage
    return Activity(
        tier,
        puts.submitted,
        puts.running,
        gets.submitted,
        gets.running,
        usage.used_bytes if usage else None,
        usage.capacity_bytes if usage else None,
        usage is not None,
    )


def log_line(level: int, logger: str, text: str) -> LogLine:
    """Make a line for the log, of a length that can be sent."""
    return LogLine(min(100, max(0, level)), logger[:256], text[:MAX_TEXT])


def pack(messages: Iterable[Order | Report] | Hello) -> bytes:
    """Make a frame."""
    body = _encoder.encode(messages if isinstance(messages, Hello) else list(messages))
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def unpack_orders(frame: bytes) -> list[Order]:
    """Read what the engine says.

    Raises:
        WireError: the frame holds something else.
    """
    return cast("list[Order]", _unpack(_orders, frame))


def unpack_reports(frame: bytes) -> list[Report]:
    """Read what the process of the tiers says.

    Raises:
        WireError: the frame holds something else.
    """
    return cast("list[Report]", _unpack(_reports, frame))


def unpack_hello(frame: bytes) -> Hello:
    """Read the first frame.

    Raises:
        WireError: the frame holds something else.
    """
    return cast("Hello", _unpack(_hello, frame))


def _unpack(decoder: msgspec.msgpack.Decoder[Any], frame: bytes) -> object:
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"{len(frame)} bytes cannot be understood: {error}") from None


def length_of(head: bytes | bytearray) -> int:
    """Read how long the frame is that begins with ``head``, which does not count.

    Raises:
        WireError: it would be too long.
    """
    length = int.from_bytes(head, "little")
    if length > MAX_FRAME_BYTES:
        raise WireError(f"a frame has {length} bytes; {MAX_FRAME_BYTES} are possible")
    return length


class Frames:
    """Cuts what has come into frames."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the frames that are whole now.

        Raises:
            WireError: one would be too long.
        """
        rest = self._rest
        rest += data
        start = 0
        try:
            while len(rest) - start >= LENGTH_BYTES:
                body = start + LENGTH_BYTES
                end = body + length_of(rest[start:body])
                if end > len(rest):
                    break
                start = end
                yield bytes(rest[body:end])
        finally:
            del rest[:start]
