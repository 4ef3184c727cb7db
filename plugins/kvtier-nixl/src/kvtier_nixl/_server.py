"""The server side of the control channel: answers lookups, and leases chunks to be read."""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import anyio

from kvtier.errors import TierError
from kvtier.keys import OffloadKey
from kvtier.tiers import wait_for_end
from kvtier_nixl import _protocol as protocol
from kvtier_nixl._agent import Memory
from kvtier_nixl._pool import ChunkPool
from kvtier_nixl._protocol import Challenge, Message, PeerHello, PeerProtocolError, Refused, Welcome

_MAX_CONNECTIONS: Final = 256
_MAX_STRANGERS: Final = 64
_HANDSHAKE_S: Final = 5.0
_SEND_S: Final = 5.0
_BACKLOG: Final = 64
_LOGGED_HOSTS: Final = 256


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts that both sides of a connection agree on or exchange.

    Attributes:
        secret: callable that returns the shared secret for one connection; raises TierError if it cannot be
            read.
        identity: digest of the cache.
        chunk_bytes: length of a chunk.
        agent: name of the NIXL agent.
        metadata: its metadata.
    """

    secret: Callable[[], Awaitable[bytes]]
    identity: bytes
    chunk_bytes: int
    agent: str
    metadata: bytes


class ControlServer:
    """Serves the chunks of a pool to peers that prove their knowledge of the secret.

    Args:
        facts: the cache, and the secret that peers must know.
        pool: the chunks.
        memory: memory of the chunks.
        warn: called with a subject for log limits and a text when a peer is refused.
    """

    def __init__(
        self, facts: Facts, pool: ChunkPool, memory: Memory, warn: Callable[[str, str], None]
    ) -> None:
        self._facts = facts
        self._pool = pool
        self._memory = memory
        self._warn = warn
        self._server: asyncio.Server | None = None
        self._is_closed = False
        self._connections: set[asyncio.Task[None]] = set()
        self._strangers: set[asyncio.Task[None]] = set()  # connections without a proof so far
        self._logged_hosts: set[str] = set()

    async def open(self, host: str, port: int) -> int:
        """Listen; return the port. Raises OSError."""
        starting = asyncio.ensure_future(asyncio.start_server(self._accept, host, port, backlog=_BACKLOG))
        # Otherwise a server that is already listening would stay open.
        cancelled = await wait_for_end(starting)
        self._server = starting.result()
        if cancelled is not None:
            raise cancelled
        listener: socket.socket = self._server.sockets[0]
        return int(listener.getsockname()[1])

    def stop(self) -> None:
        """Stop listening, and start to close all connections. From now on no peer is answered."""
        self._is_closed = True
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()

    async def aclose(self) -> None:
        """Stop, and wait until all connections are closed."""
        self.stop()
        if self._connections:
            await asyncio.wait(set(self._connections))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if self._is_closed:  # Later puts may belong to other weights.
                return
            if len(self._connections) > _MAX_CONNECTIONS or len(self._strangers) >= _MAX_STRANGERS:
                await _send(writer, Refused("it has too many connections"))
                return
            protocol.keep_alive(writer)
            self._strangers.add(task)
            async with asyncio.timeout(_HANDSHAKE_S):
                await self._welcome(reader, writer)
            self._strangers.discard(task)
            while True:
                await self._answer(await protocol.receive(reader), writer)
        except PeerProtocolError as error:
            self._log_refusal((writer.get_extra_info("peername") or ("?",))[0], error)
            with suppress(OSError, TimeoutError):
                await _send(writer, Refused(str(error)[:500]))
        except TierError as error:
            self._warn("secret", str(error))
        except (OSError, TimeoutError):
            pass  # The peer ended or does not read. Its leases expire by themselves.
        except asyncio.CancelledError:
            pass  # Cancelled by aclose. asyncio logs a failure if a server's task raises the cancellation.
        finally:
            self._connections.discard(task)
            self._strangers.discard(task)
            writer.close()

    def _log_refusal(self, host: str, error: PeerProtocolError) -> None:
        if len(self._logged_hosts) < _LOGGED_HOSTS:
            self._logged_hosts.add(host)
        subject = host if host in self._logged_hosts else "others"
        self._warn(f"peer {error.category} {subject}", f"{host} was turned away: {error}")

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Check a peer's proof that it knows the secret and wants this cache; send it the same proof."""
        facts = self._facts
        challenge = Challenge(protocol.VERSION, secrets.token_bytes(protocol.NONCE_BYTES))
        await _send(writer, challenge)
        hello = await protocol.expect(reader, PeerHello, protocol.MAX_HELLO_BYTES)
        secret = await facts.secret()
        wanted = protocol.proof(secret, b"client", challenge, hello.nonce, hello.identity)
        if not protocol.is_proof(hello.proof, wanted):
            raise PeerProtocolError("it has another secret: compare the secret_file of both", "secret")
        if hello.version != protocol.VERSION:
            versions = f"it speaks version {hello.version}, this is version {protocol.VERSION}"
            raise PeerProtocolError(versions, "version")
        if hello.identity != facts.identity:
            raise PeerProtocolError(
                "it has another identity: model, settings or namespace differ", "identity"
            )
        if hello.chunk_bytes != facts.chunk_bytes:
            lengths = f"its chunks have {hello.chunk_bytes} bytes, these {facts.chunk_bytes}"
            raise PeerProtocolError(lengths, "length")
        agent = protocol.agent_digest(facts.agent, facts.metadata)
        answer = protocol.proof(secret, b"server", challenge, hello.nonce, facts.identity, agent)
        await _send(writer, Welcome(answer, facts.agent, facts.metadata))

    async def _answer(self, request: Message, writer: asyncio.StreamWriter) -> None:
        if isinstance(request, protocol.LookupKeys):
            await _send(writer, protocol.Found(tuple(key in self._pool for key in request.keys)))
        elif isinstance(request, protocol.LeaseChunks):
            keys = [OffloadKey(key) for key in request.keys]
            number, chunks = self._pool.lease(keys, time.monotonic())
            addresses = tuple(self._memory.address(chunk.row) if chunk else 0 for chunk in chunks)
            trailers = tuple(chunk.trailer if chunk else b"" for chunk in chunks)
            await _send(writer, protocol.Leased(number, self._pool.lease_s, addresses, trailers))
        elif isinstance(request, protocol.Release):
            self._pool.release(request.lease)
        else:
            raise PeerProtocolError(f"{type(request).__name__} is no request")


async def _send(writer: asyncio.StreamWriter, message: Message) -> None:
    writer.write(protocol.encode(message))
    # Only rarely, because a deadline costs as much as the answer itself.
    if writer.transport.get_write_buffer_size():
        with anyio.fail_after(_SEND_S):
            await writer.drain()
