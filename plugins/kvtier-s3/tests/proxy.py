"""A proxy between the tier and the server that simulates faulty networks and overloaded servers.

It runs in a separate process, so that it and the tested event loop cannot delay each other:
``python proxy.py UPSTREAM_PORT [CERTIFICATE]`` writes the port that it listens on, then answers each line
of JSON on its input: a ``Faults`` once it is active, ``null`` with the number of waiting requests.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Faults:
    """The faults to inject.

    Attributes:
        delay_s: seconds before a request is passed on, even if its sender has gone; if infinite, until the
            faults change, unless its sender has gone.
        refused: whether requests are answered with ``status`` and ``code``.
        status, code: see there.
        spoiled: replacement of an answer's body: a page in ``html``, ``zeros`` of its length, or the body
            without the object's metadata (``bare``).
        cut_after: bytes of an answer's body after which the connection is cut; -1: never.
        methods: methods of the affected requests; empty for all.
        path: substring of the affected requests' path; empty for all.
        header: header of the affected requests, in lower case; empty for all.
    """

    delay_s: float = 0.0
    refused: bool = False
    status: int = 503
    code: str = "SlowDown"
    spoiled: str = ""
    cut_after: int = -1
    methods: tuple[str, ...] = ()
    path: str = ""
    header: str = ""


class Proxy:
    """The proxy, from the tests' side. A context manager.

    Args:
        upstream_port: port of the server.
        certificate: PEM file of a certificate and its key, for TLS.
    """

    def __init__(self, upstream_port: int, certificate: Path | None = None) -> None:
        self._command = [
            sys.executable,
            __file__,
            str(upstream_port),
            *([str(certificate)] * bool(certificate)),
        ]
        self._scheme = "https" if certificate else "http"

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
        """Inject these faults from now on; return the number of requests received so far."""
        return self._say(asdict(faults))

    def held(self) -> int:
        """Return the number of held requests whose senders are still waiting."""
        return self._say(None)

    @contextmanager
    def faulty(self, faults: Faults) -> Iterator[None]:
        """Inject these faults while the context is entered."""
        self.be(faults)
        try:
            yield
        finally:
            self.be(Faults())

    def requests(self) -> int:
        """Stop injecting faults; return the number of requests received so far."""
        return self.be(Faults())

    def _say(self, said: dict[str, object] | None) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(said) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


class _Server:
    """The proxy's implementation, in its own process."""

    def __init__(self, upstream_port: int) -> None:
        self._upstream_port = upstream_port
        self._faults = Faults()
        self._changed = asyncio.Event()
        self._requests = 0
        self._held: set[asyncio.StreamReader] = set()

    def answer(self, line: str) -> int:
        values = json.loads(line)
        if values is None:
            return sum(not reader.at_eof() for reader in self._held)
        self._faults = Faults(**{**values, "methods": tuple(values["methods"])})
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        return self._requests

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection through one connection to the server."""
        upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        with suppress(asyncio.IncompleteReadError, OSError):
            goes_on = True
            while goes_on:
                head = await reader.readuntil(b"\r\n\r\n")
                body = await reader.readexactly(_length(head))
                self._requests += 1
                faults = self._for(head)
                if faults.refused:
                    writer.write(_refusal(head, faults))
                    await writer.drain()
                    continue
                await self._hold(reader, faults.delay_s)
                upstream = upstream or await asyncio.open_connection("127.0.0.1", self._upstream_port)
                upstream[1].write(head + body)
                goes_on = await _pass_answer(head, upstream[0], writer, faults)
        writer.transport.abort()
        if upstream is not None:
            upstream[1].transport.abort()

    def _for(self, head: bytes) -> Faults:
        """Return the faults of a request."""
        faults, lines = self._faults, head.lower()
        is_meant = not faults.methods or head.split(b" ", 1)[0].decode() in faults.methods
        has_header = not faults.header or f"\r\n{faults.header}:".encode() in lines
        has_path = faults.path.encode() in head.split(b"\r\n", 1)[0]
        return faults if is_meant and has_header and has_path else Faults()

    async def _hold(self, reader: asyncio.StreamReader, seconds: float) -> None:
        if not seconds:
            return
        self._held.add(reader)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(None if math.isinf(seconds) else seconds):
                    await self._changed.wait()
        finally:
            self._held.discard(reader)
        if math.isinf(seconds) and reader.at_eof():
            raise ConnectionResetError


async def _pass_answer(
    request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, faults: Faults
) -> bool:
    """Pass an answer on; return whether the connection stays open."""
    head, cut_after = await reader.readuntil(b"\r\n\r\n"), faults.cut_after
    if faults.spoiled:
        writer.write(_spoiled(head, await reader.readexactly(_length(head)), faults.spoiled))
        await writer.drain()
        return True
    writer.write(head)
    left, is_cut = _length(head), False
    if request.startswith(b"HEAD ") or b" 204 " in head.split(b"\r\n", 1)[0]:
        left = 0
    elif b"transfer-encoding: chunked" in head.lower():
        size = -1
        while size:
            line = await reader.readuntil(b"\r\n")
            size = int(line.split(b";")[0], 16)
            writer.write(line + await reader.readexactly(size + 2))
    elif 0 <= cut_after < left:
        left, is_cut = cut_after, True
    writer.write(await reader.readexactly(left))
    await writer.drain()
    return not is_cut


def _spoiled(head: bytes, body: bytes, how: str) -> bytes:
    if how == "html":
        body = b"<html>Sign in to continue</html>"
        head = re.sub(rb"(?i)(content-length:) *\d+", rb"\1 %d" % len(body), head)
    if how == "bare" or how == "html":
        head = re.sub(rb"(?im)^x-amz-meta-.*\r\n", b"", head)
    return head + (bytes(len(body)) if how == "zeros" else body)


def _refusal(request: bytes, faults: Faults) -> bytes:
    body = f"<Error><Code>{faults.code}</Code><Message>as asked for</Message></Error>".encode()
    head = f"HTTP/1.1 {faults.status} Refused\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + (b"" if request.startswith(b"HEAD ") else body)


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
