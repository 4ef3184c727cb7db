"""A TCP proxy that forgets connections, as firewalls do, or damages bytes, as bad links do."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

_CHUNK_BYTES = 64 * 1024


class ForgetfulProxy:
    """Passes bytes between clients and a server on loopback. A context manager.

    Attributes:
        port: port on which it listens.
        flips: number of the next large pieces from the server in which to flip one bit. Each flip has a
            different place, because a tier regards a chunk that is twice wrong in the same way as damaged in
            the store.
    """

    def __init__(self, upstream_port: int) -> None:
        self._upstream_port = upstream_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._forgotten: set[socket.socket] = set()
        self.port = self._listener.getsockname()[1]
        self.flips = 0

    def forget(self) -> None:
        """Drop all data of the current connections without telling either side."""
        self._forgotten.update(end for pair in self._pairs for end in pair)

    def __enter__(self) -> ForgetfulProxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for end in (self._listener, *(end for pair in self._pairs for end in pair)):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._upstream_port))
                self._pairs.append((client, server))
                for source, target in ((client, server), (server, client)):
                    threading.Thread(
                        target=self._pass, args=(source, target, target is client), daemon=True
                    ).start()

    def _pass(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        with suppress(OSError):
            while data := bytearray(source.recv(_CHUNK_BYTES)):
                if source in self._forgotten:
                    continue
                if is_answer and self.flips and len(data) > _CHUNK_BYTES // 2:
                    self.flips -= 1
                    data[len(data) // 2 - self.flips] ^= 1
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)
