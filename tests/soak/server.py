"""A Redis server that is killed, stopped and started again, and evicts all the time."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

_PATIENCE_S = 20.0


class RedisServer:
    """A real server on a Unix socket. It is empty after each start.

    Args:
        directory: for its socket.
        max_bytes: memory beyond which it evicts.

    Attributes:
        path: of its socket.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / "redis.sock"
        self._directory = directory
        self._max_bytes = max_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._evicted = 0

    def start(self) -> None:
        """Start it and wait until it answers."""
        self.path.unlink(missing_ok=True)
        limits = ["--maxmemory", str(self._max_bytes), "--maxmemory-policy", "allkeys-lru"]
        where = ["--port", "0", "--unixsocket", str(self.path), "--dir", str(self._directory)]
        self._process = subprocess.Popen(
            ["redis-server", *where, *limits, "--save", "", "--appendonly", "no"], stdout=subprocess.DEVNULL
        )
        deadline = time.monotonic() + _PATIENCE_S
        while self._ask(b"PING") != b"+PONG\r\n":
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.02)

    def kill(self) -> None:
        """Kill it with SIGKILL and wait for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Stop it with SIGSTOP: it keeps its connections and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it go on after ``stop``."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def evicted(self) -> int:
        """Return how many keys it has evicted since it was started."""
        for line in self._ask(b"INFO stats", until=b"evicted_keys").splitlines():
            if line.startswith(b"evicted_keys:"):
                return int(line.partition(b":")[2])
        return 0

    def _ask(self, command: bytes, until: bytes = b"\r\n") -> bytes:
        answer = b""
        with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
            connection.settimeout(_PATIENCE_S)
            connection.connect(str(self.path))
            connection.sendall(command + b"\r\n")
            while until not in answer or not answer.endswith(b"\r\n"):
                if not (piece := connection.recv(65536)):
                    break
                answer += piece
        return answer
