"""The control channel: how engines prove that they share a secret, and ask each other for chunks.

Each frame is a length (u32, big-endian) and a msgpack message. The server begins with ``Challenge``; the
client answers with ``PeerHello`` and a proof over both nonces, the server with ``Welcome`` and a proof of its
own. A proof is valid for one connection only. Afterwards each request has one reply, in order, except
``Release``, which has none.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import socket
import struct
from typing import Annotated, Final, TypeVar

import msgspec

from kvtier.keys import MAX_KEY_BYTES
from kvtier.tiers import TRAILER_BYTES

VERSION: Final = 2
"""Version of the protocol and of the served chunks' format."""
MAX_KEYS: Final = 1024
"""Keys of one request at most."""
MAX_FRAME_BYTES: Final = 1 << 20
MAX_HELLO_BYTES: Final = 4096
"""Length of a ``Challenge`` or ``PeerHello`` at most: the server reads no longer frame without a proof."""
NONCE_BYTES: Final = 32
_LENGTH: Final = struct.Struct(">I")

Short = Annotated[bytes, msgspec.Meta(max_length=64)]
Text = Annotated[str, msgspec.Meta(max_length=500)]
Keys = Annotated[
    tuple[Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_KEY_BYTES)], ...],
    msgspec.Meta(max_length=MAX_KEYS),
]


class PeerProtocolError(Exception):
    """The other side violated the protocol.

    Args:
        text: the violation.
        category: its kind, for the limit on log lines.
    """

    def __init__(self, text: str, category: str = "frame") -> None:
        super().__init__(text)
        self.category = category


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A message of the control channel."""


class Challenge(Message, frozen=True, tag=1):
    """The server's first message."""

    version: int
    nonce: Short


class PeerHello(Message, frozen=True, tag=2):
    """The client's first message: its expectations, and its proof of the secret."""

    version: int
    nonce: Short
    identity: Short
    chunk_bytes: int
    proof: Short


class Welcome(Message, frozen=True, tag=3):
    """The server's proof, and access to its memory.

    Attributes:
        proof: proof that it knows the secret and that the rest of this message is its own.
        agent: name of its NIXL agent.
        metadata: NIXL metadata that an agent needs to read from it.
    """

    proof: Short
    agent: Text
    metadata: bytes


class Refused(Message, frozen=True, tag=4):
    """Why a connection is closed."""

    why: Text


class LookupKeys(Message, frozen=True, tag=5):
    """Ask which keys are held."""

    keys: Keys


class Found(Message, frozen=True, tag=6):
    """Which keys of a lookup are held."""

    held: Annotated[tuple[bool, ...], msgspec.Meta(max_length=MAX_KEYS)]


class LeaseChunks(Message, frozen=True, tag=7):
    """Ask to keep chunks in place, in order to read them."""

    keys: Keys


class Leased(Message, frozen=True, tag=8):
    """The addresses and trailers of a lease's chunks; address 0 and no trailer for chunks not leased.

    Attributes:
        lasts_s: minimum duration of the lease in seconds, counted from the request, unless it is released.
    """

    lease: int
    lasts_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)]
    addresses: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_KEYS)]
    trailers: Annotated[
        tuple[Annotated[bytes, msgspec.Meta(max_length=TRAILER_BYTES)], ...],
        msgspec.Meta(max_length=MAX_KEYS),
    ]


class Release(Message, frozen=True, tag=9):
    """End a lease after its chunks have been read."""

    lease: int


AnyMessage = Challenge | PeerHello | Welcome | Refused | LookupKeys | Found | LeaseChunks | Leased | Release
MessageT = TypeVar("MessageT", bound=Message)
_decoder: Final = msgspec.msgpack.Decoder[AnyMessage](AnyMessage)


def encode(message: Message) -> bytes:
    """Return the frame of a message."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> AnyMessage:
    """Return the message of a frame, which may contain arbitrary bytes. Raises ProtocolError."""
    try:
        message: AnyMessage = _decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PeerProtocolError(f"invalid frame of {len(body)} bytes: {error}") from None
    return message


async def receive(reader: asyncio.StreamReader, limit_bytes: int = MAX_FRAME_BYTES) -> AnyMessage:
    """Return the next message.

    Raises:
        ProtocolError: the frame is longer than ``limit_bytes``, or no message.
        ConnectionError: the connection ended.
    """
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > limit_bytes:
            raise PeerProtocolError(f"a frame of {length} bytes exceeds the limit of {limit_bytes}")
        return decode(await reader.readexactly(length))
    except asyncio.IncompleteReadError:
        raise ConnectionResetError("the connection was closed") from None


async def expect(reader: asyncio.StreamReader, wanted: type[MessageT], limit_bytes: int) -> MessageT:
    """Return the next message, which must have the wanted type.

    Raises:
        ProtocolError: it has another type; the text is the reason if it is ``Refused``.
        ConnectionError: the connection ended.
    """
    message = await receive(reader, limit_bytes)
    if isinstance(message, wanted):
        return message
    if isinstance(message, Refused):
        raise PeerProtocolError(f"it refuses: {message.why!r}")  # neither side is authenticated yet
    raise PeerProtocolError(f"it sent {type(message).__name__} where {wanted.__name__} was due")


def proof(
    secret: bytes,
    side: bytes,
    challenge: Challenge,
    hello_nonce: bytes,
    identity: bytes,
    agent: bytes = b"",
) -> bytes:
    """Return one side's proof, for one connection, that it knows the secret.

    Args:
        secret: the shared secret.
        side: ``b"client"`` or ``b"server"``, so that neither can send back the other's proof.
        challenge: the server's first message.
        hello_nonce: the client's nonce.
        identity: digest of the cache that the client asks for.
        agent: ``agent_digest`` of the server's answer.
    """
    version = str(challenge.version).encode()
    parts = (b"kvtier-nixl", side, version, challenge.nonce, hello_nonce, identity, agent)
    text = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.new(secret, text, hashlib.sha256).digest()


def agent_digest(agent: str, metadata: bytes) -> bytes:
    """Return a digest of how a server's memory is read."""
    name = agent.encode()
    return hashlib.sha256(len(name).to_bytes(4, "big") + name + metadata).digest()


def keep_alive(writer: asyncio.StreamWriter) -> None:
    """Enable keepalive, so that a connection ends about a minute after the other side has vanished."""
    one: socket.socket = writer.get_extra_info("socket")
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
        one.setsockopt(socket.IPPROTO_TCP, option, value)


def is_proof(given: bytes, wanted: bytes) -> bool:
    """Return whether a proof is the wanted one, in constant time."""
    return hmac.compare_digest(given, wanted)
