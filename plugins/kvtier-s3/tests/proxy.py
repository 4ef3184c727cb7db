"""A proxy between the tier and the server that does what networks and overloaded servers do.

It runs in a process of its own, so that it neither holds up the tested event loop nor is held up by it:
``python proxy.py UPSTREAM_PORT [CERTIFICATE]`` writes the port that it listens on, then answers each line
of JSON on its input with one line: a ``Faults`` when that holds, ``null`` with how many requests wait.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

PIECE_BYTES = 64 * 1024
TCP_ESTABLISHED = 1


@dataclass(frozen=True)
class Faults:
    """What goes wrong.

    Attributes:
        delay_s: seconds before a request is passed on, whether or not its sender still waits; without end:
            until this is changed, if its sender still waits then.
        refused: whether requests are answered with ``status`` and ``code``.
        status, code: see there.
        slow_body_s: seconds between two pieces of an answer's body.
        cut_after: bytes of an answer's body after which the connection is cut; -1: never.
        deaf: whether no request is attended to; those whose sender has left by its end never are.
        methods: the requests that this is about; empty: all.
        header: those of them that this is about: with this header, in lower case; empty: all.
    """

    delay_s: float = 0.0
    refused: bool = False
    status: int = 503
    code: str = "SlowDown"
    slow_body_s: float = 0.0
    cut_after: int = -1
    deaf: bool = False
    methods: tuple[str, ...] = ()
    header: str = ""


class Proxy:
    """The proxy, from the tests' side. A context manager.

    Args:
        upstream_port: where the server is.
        certificate: PEM file of a certificate and its key, for TLS.
    """

    def __init__(self, upstream_port: int, certificate: Path | None = None) -> None:
        self._command = [sys.executable, __file__, str(upstream_port)]
        self._scheme = "http"
        if certificate is not None:
            self._command.append(str(certificate))
            self._scheme = "https"

    def __enter__(self) -> Proxy:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    @property
    def endpoint(self) -> str:
        """URL of the proxy."""
        return f"{self._scheme}://127.0.0.1:{self.port}"

    def be(self, faults: Faults) -> int:
        """Have these faults from now on; return how many requests have come so far."""
        return self._say(asdict(faults))

    def held(self) -> int:
        """Return how many requests are held back, by a delay or by deafness, whose senders still wait."""
        return self._say(None)

    @contextmanager
    def faulty(self, faults: Faults) -> Iterator[None]:
        """Have these faults for a while."""
        self.be(faults)
        try:
            yield
        finally:
            self.be(Faults())

    def requests(self) -> int:
        """Return how many requests have come so far, and have no faults from now on."""
        return self.be(Faults())

    def _say(self, said: dict[str, object] | None) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(said) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


class _Server:
    """The proxy, from the inside."""

    def __init__(self, upstream_port: int) -> None:
        self._upstream_port = upstream_port
        self._faults = Faults()
        self._changed = asyncio.Event()
        self._requests = 0
        self._held: set[_Client] = set()

    def answer(self, line: str) -> int:
        values = json.loads(line)
        if values is None:
            return sum(client.waits for client in self._held)
        self._faults = Faults(**{**values, "methods": tuple(values["methods"])})
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        return self._requests

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = _Client(reader, writer)
        with suppress(asyncio.IncompleteReadError, OSError):
            if await self._refuse_or_receive(client):
                upstream = await asyncio.open_connection("127.0.0.1", self._upstream_port)
                try:
                    while await self._exchange(client, *upstream) and await self._refuse_or_receive(client):
                        pass
                finally:
                    upstream[1].transport.abort()
        writer.transport.abort()

    async def _refuse_or_receive(self, client: _Client) -> bool:
        """Receive the head of a request that is to be passed on; those before it are refused."""
        while True:
            client.head = await client.reader.readuntil(b"\r\n\r\n")
            with self._holding(client):
                while self._faults.deaf:
                    await self._changed.wait()
                    client.check_it_waits()
            self._requests += 1
            faults = self._for(client)
            if not faults.refused:
                return True
            await client.reader.readexactly(_length(client.head))
            client.writer.write(_refusal(client.method, faults))
            await client.writer.drain()

    async def _exchange(
        self, client: _Client, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Pass on one request and its answer; return whether the connection lives on."""
        faults = self._for(client)
        with self._holding(client):
            await self._pause(faults.delay_s)
        if math.isinf(faults.delay_s):
            client.check_it_waits()
        writer.write(client.head)
        await _copy(client.reader, writer, _length(client.head))
        return await self._answer(client.method, reader, client.writer, faults)

    async def _answer(
        self, method: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, faults: Faults
    ) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"100 Continue" in head.split(b"\r\n", 1)[0]:
            head = await reader.readuntil(b"\r\n\r\n")
        writer.write(head)
        if method == "HEAD" or b" 204 " in head.split(b"\r\n", 1)[0]:
            await writer.drain()
            return True
        if b"transfer-encoding: chunked" in head.lower():
            await _copy_chunked(reader, writer)
            return True
        left = _length(head)
        if 0 <= faults.cut_after < left:
            await _copy(reader, writer, faults.cut_after)
            return False
        while left and faults.slow_body_s:
            piece = min(left, 4096)
            await _copy(reader, writer, piece)
            left -= piece
            await self._pause(faults.slow_body_s)
        await _copy(reader, writer, left)
        return True

    def _for(self, client: _Client) -> Faults:
        about, header = self._faults.methods, f"\r\n{self._faults.header}:".encode()
        is_about = (not about or client.method in about) and (
            header == b"\r\n:" or header in client.head.lower()
        )
        return self._faults if is_about else Faults()

    @contextmanager
    def _holding(self, client: _Client) -> Iterator[None]:
        self._held.add(client)
        try:
            yield
        finally:
            self._held.discard(client)

    async def _pause(self, seconds: float) -> None:
        if seconds:
            with suppress(TimeoutError):
                async with asyncio.timeout(None if math.isinf(seconds) else seconds):
                    await self._changed.wait()


class _Client:
    """A connection from a client, and the head of the request that is being passed on."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.head = b""

    @property
    def method(self) -> str:
        return self.head.split(b" ", 1)[0].decode()

    @property
    def waits(self) -> bool:
        """Whether the other side has not hung up, not even behind bytes not read yet."""
        end: socket.socket = self.writer.get_extra_info("socket")
        return end.fileno() >= 0 and (
            end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_ESTABLISHED
        )

    def check_it_waits(self) -> None:
        """Raise ``ConnectionError`` if the other side has hung up."""
        if not self.waits:
            raise ConnectionResetError


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: int) -> None:
    while count:
        piece = await reader.read(min(count, PIECE_BYTES))
        if not piece:
            raise ConnectionError
        count -= len(piece)
        writer.write(piece)
        await writer.drain()
    await writer.drain()


async def _copy_chunked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        line = await reader.readuntil(b"\r\n")
        writer.write(line)
        size = int(line.split(b";")[0], 16)
        await _copy(reader, writer, size + 2)
        if not size:
            return


def _refusal(method: str, faults: Faults) -> bytes:
    body = f"<Error><Code>{faults.code}</Code><Message>as asked for</Message></Error>".encode()
    head = f"HTTP/1.1 {faults.status} Refused\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + (b"" if method == "HEAD" else body)


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


async def _main(upstream_port: int, tls: ssl.SSLContext | None) -> None:
    server = _Server(upstream_port)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls, limit=2**20)
    print(listening.sockets[0].getsockname()[1], flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(server.answer(line), flush=True)


if __name__ == "__main__":
    context = None
    if len(sys.argv) > 2:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(sys.argv[2])
    asyncio.run(_main(int(sys.argv[1]), context))
