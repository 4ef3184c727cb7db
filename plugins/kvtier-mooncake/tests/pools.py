"""Real pools for the tests, on loopback and free ports: a master, and clients that contribute memory."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from math import inf
from pathlib import Path
from typing import Any

from kvtier import Identity
from kvtier_mooncake import MooncakeConfig, MooncakeTier
from kvtier_testing.tiers import TierRig
from kvtier_testing.tiers._servers import absent, free_port, stopped

START_S = 60.0
GENEROUS_S = 30.0  # a deadline that even a busy machine meets
IDENTITY = Identity.make("tests", {"dtype": "float16"})
os.environ.setdefault("GLOG_minloglevel", "2")  # The variable is read when the client is imported.
_CLIENT = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[1])
print(code, flush=True)
sys.stdin.read()
store.close()
"""


def program() -> Path:
    """Return the master's program. Skip if there is none."""
    try:
        import mooncake.store as store
    except ImportError as error:
        absent(f"Mooncake's client cannot be imported: {error}")
    return Path(store.__file__).with_name("mooncake_master")


class Pool:
    """A master, and a client that contributes memory. Both may be killed, stopped and started.

    Args:
        directory: directory for the logs.
        segment_bytes: memory that the client contributes; 0 to start no client.
        options: options of the master's command line.
        lease: time for which a get protects its chunks from eviction.
    """

    def __init__(
        self, directory: Path, segment_bytes: int = 1 << 30, *options: str, lease: str = "10s"
    ) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._directory = directory
        self._segment_bytes = segment_bytes
        host, _, port = self.address.partition(":")
        metrics = ("--metrics_host", host, "--metrics_port", str(free_port()))
        listen = ("--rpc_address", host, "--port", port, *metrics)
        self._command = (str(program()), *listen, "--default_kv_lease_ttl", lease, *options)
        self._master: subprocess.Popen[bytes] | None = None
        self._client: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True, exist_ok=True)

    def start_master(self) -> None:
        """Start the master, and wait until it listens."""
        with (self._directory / "master.log").open("ab") as log:
            self._master = subprocess.Popen(self._command, stdout=log, stderr=log)
        deadline = time.monotonic() + START_S
        host, _, port = self.address.partition(":")
        while time.monotonic() < deadline:
            if self._master.poll() is not None:
                break
            with suppress(OSError), socket.create_connection((host, int(port)), 1.0):
                return
            time.sleep(0.02)
        raise AssertionError((self._directory / "master.log").read_text()[-2000:])

    def start_client(self) -> None:
        """Start the client, and wait until it contributes memory."""
        command = [sys.executable, "-c", _CLIENT, self.address, str(self._segment_bytes)]
        with (self._directory / "client.log").open("ab") as log:
            self._client = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )
        assert self._client.stdout is not None
        assert self._client.stdout.readline() == b"0\n", (self._directory / "client.log").read_text()[-2000:]

    def kill_master(self) -> None:
        """Kill the master, which forgets the pool's contents."""
        _end(self._master)

    def kill_client(self) -> None:
        """Kill the client, and the memory that it contributes with it."""
        _end(self._client)

    @contextmanager
    def stopped(self, seconds: float = inf, *, client: bool = False) -> Iterator[None]:
        """Stop the master or the client, like a hang of its machine, until the context or the time ends."""
        process = self._client if client else self._master
        assert process is not None
        with stopped(process, seconds):
            yield

    def run_client(self, seconds: float) -> None:
        """Continue the stopped client for a moment."""
        assert self._client is not None
        self._client.send_signal(signal.SIGCONT)
        time.sleep(seconds)
        self._client.send_signal(signal.SIGSTOP)

    def __enter__(self) -> Pool:
        self.start_master()
        if self._segment_bytes:
            self.start_client()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_client()
        self.kill_master()


def _end(process: subprocess.Popen[bytes] | None) -> None:
    if process is not None:
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        process.wait()


def opened(
    pool: Pool, *, identity: Identity = IDENTITY, chunk_bytes: int = 256 * 1024, **settings: Any
) -> AbstractAsyncContextManager[TierRig]:
    """Open a tier on a pool, and close it at the end."""
    tier = MooncakeTier(MooncakeConfig(**{"master": pool.address, "deadline_s": GENEROUS_S, **settings}))
    return TierRig(tier, identity, chunk_bytes).opened(name="pool")


@contextmanager
def bare(pool: Pool) -> Iterator[Any]:
    """Yield Mooncake's own client of a pool."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", pool.address) == 0
    try:
        yield store
    finally:
        store.close()
