"""The protocol between the engine and the tier process.

A message is a MessagePack array whose first element is its type; a frame is a length and a list of messages.
Decoding checks types and bounds, and refuses everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.msgpack import Decoder
from pydantic import BaseModel, SecretBytes, SecretStr

from kvtier._core.messages import MAX_TEXT, Command, Number, Seconds, Text, TierEvent
from kvtier.errors import ConfigError, KVTierError
from kvtier.tiers import _registry as registry
from kvtier.tiers._activity import TierActivity
from kvtier.tiers._supervisor import NamedTier

T = TypeVar("T")

MAX_FRAME_BYTES = 256 * 2**20
LENGTH_BYTES = 4


class WireError(KVTierError):
    """The other side sent a malformed or impossible message."""


# --- from the engine -------------------------------------------------------------------------------


class Ping(Struct, array_like=True, frozen=True, tag=5):
    """Answer with ``Pong``: the event loop runs."""


class Shutdown(Struct, array_like=True, frozen=True, tag=8):
    """Drain for at most ``drain_s`` seconds, close the tiers within ``close_s`` more, and exit."""

    drain_s: Seconds
    close_s: Seconds


Order = Command | Ping | Shutdown


class TierSettings(Struct, frozen=True):
    """A tier: its name in logs, and its settings as a user would write them, secrets included."""

    name: Text
    settings: dict[str, Any]

    @staticmethod
    def of(named: NamedTier) -> TierSettings:
        """Return a tier's settings; raise ConfigError if the process could not make the same tier of them."""
        tier, config = named.tier, named.tier.config
        try:
            packed = TierSettings(named.name, {**plain(config), "type": config.type})
            again = packed.make().tier
        except (KVTierError, NotImplementedError, OverflowError, TypeError) as error:
            problem = str(error)
        else:
            if type(again) is not type(tier):
                problem = f"type {config.type!r} does not name its class"
            elif again.config != config:
                problem = "its settings differ when they are read again"
            else:
                return packed
        raise ConfigError(
            f"tier {named.name} cannot run in a tier process: {problem}; set isolation to 'thread'"
        )

    def make(self) -> NamedTier:
        """Make the tier, or raise KVTierError."""
        return NamedTier(self.name, registry.maker(registry.validate(self.settings)))


class SlotChecksumsLayout(Struct, frozen=True):
    """How to read the ``SlotChecksums`` in the region's metadata."""

    rate: Annotated[float, Meta(ge=0, le=1)]
    areas: Number
    area_bytes: Number
    is_shared: bool


class Hello(Struct, frozen=True, kw_only=True):
    """The first frame: everything that the tier process needs. It may hold secrets."""

    tiers: list[TierSettings]
    model: str
    manifest: str
    slots: Number
    chunk_bytes: Number
    metadata_bytes: Number
    slot_checksums: SlotChecksumsLayout | None
    epochs: list[Number]
    cpus: list[Number]
    memory_limit_bytes: Number | None
    log_level: Number
    other_log_level: Number


# --- from the tier process -------------------------------------------------------------------------


class Pong(Struct, array_like=True, frozen=True, tag=6):
    """The answer to ``Ping``."""


class Activity(Struct, array_like=True, frozen=True, tag=8):
    """The transfers and the usage of a tier."""

    tier: Number
    puts_submitted: Number
    puts_running: Number
    gets_submitted: Number
    gets_running: Number
    usage: tuple[Number | None, Number | None] | None  # the fields of ``Usage``; None if unknown


class LogLine(Struct, array_like=True, frozen=True, tag=9):
    """A line for the engine's log."""

    level: Annotated[int, Meta(ge=0, le=100)]
    logger: Annotated[str, Meta(max_length=256)]
    text: Text


Report = TierEvent | Pong | Activity | LogLine


def _convert(value: object) -> object:
    """Convert what msgspec does not encode: models, secrets, paths, subclasses of built-in types."""
    if isinstance(value, BaseModel):
        return {name: getattr(value, name) for name in sorted(value.model_fields_set)}
    if isinstance(value, SecretStr | SecretBytes):
        return value.get_secret_value()
    if isinstance(value, Mapping):
        return dict(value)
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, PurePath):
        return str(value)
    raise NotImplementedError(f"a {type(value).__name__} cannot be sent")


_encoder = msgspec.msgpack.Encoder(enc_hook=_convert)
ORDERS: Decoder[list[Order]] = Decoder(list[Order])
REPORTS: Decoder[list[Report]] = Decoder(list[Report])
HELLO = Decoder(Hello)


def plain(value: object) -> Any:
    """Return a value as the other side decodes it: mappings, lists, text, numbers and bytes.

    Raises NotImplementedError, OverflowError or TypeError if it cannot be sent.
    """
    return msgspec.msgpack.decode(_encoder.encode(value))


def activity_of(tier: int, activity: TierActivity) -> Activity:
    puts, gets, usage = activity.puts, activity.gets, activity.usage
    turns = (puts.submitted, puts.running, gets.submitted, gets.running)
    return Activity(tier, *turns, (usage.used_bytes, usage.capacity_bytes) if usage else None)


def log_line(level: int, logger: str, text: str) -> LogLine:
    """Return a message with a log line, truncated to the length that can be sent."""
    return LogLine(min(100, max(0, level)), sendable(logger)[:256], sendable(text))


def sendable(text: str) -> str:
    """Return a text that can be sent: truncated, and without lone surrogates of names that are not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()[:MAX_TEXT]


def pack(messages: Iterable[Order | Report] | Hello) -> bytes:
    body = _encoder.encode(messages if isinstance(messages, Hello) else list(messages))
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def unpack(decoder: Decoder[T], frame: bytes) -> T:
    """Decode a frame with ``ORDERS``, ``REPORTS`` or ``HELLO``. Raises WireError if it is malformed."""
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"{len(frame)} bytes cannot be decoded: {error}") from None


def length_of(head: bytes | bytearray) -> int:
    """Return the length of the frame after ``head``; raise WireError above ``MAX_FRAME_BYTES``."""
    length = int.from_bytes(head, "little")
    if length > MAX_FRAME_BYTES:
        raise WireError(f"a frame has {length} bytes; {MAX_FRAME_BYTES} are possible")
    return length


class Frames:
    """Splits a stream into frames."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add data; yield the complete frames. Raises WireError for a frame that would be too long."""
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
