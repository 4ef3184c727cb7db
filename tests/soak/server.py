"""A Redis server that is killed, stopped and started again, and evicts all the time."""

from __future__ import annotations

import signal
import subprocess
import time
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
        where = ["--port", "0", "--unixsocket", str(self.path), "--dir", str(directory)]
        limits = ["--maxmemory", str(max_bytes), "--maxmemory-policy", "allkeys-lru"]
        self._command = ["redis-server", *where, *limits, "--save", "", "--appendonly", "no"]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        self.path.unlink(missing_ok=True)
        import redis  # which the unit tests do without

        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                self.evicted()
                return
            except redis.ConnectionError:
                assert time.monotonic() < deadline, "the server does not answer"
                time.sleep(0.02)

    def kill(self) -> None:
        """Kill it with SIGKILL and wait for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def send(self, number: signal.Signals) -> None:
        """Stop it with SIGSTOP, when it keeps its connections and answers nothing; or let it go on."""
        assert self._process is not None
        self._process.send_signal(number)

    def evicted(self) -> int:
        """Return how many keys it has evicted since it was started."""
        import redis

        with redis.Redis(unix_socket_path=str(self.path), socket_timeout=_PATIENCE_S) as client:
            stats: dict[str, int] = client.info("stats")
            return stats["evicted_keys"]
