"""Real servers for the tests, on loopback and free ports, each a process of its own."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest
import redis
import trustme
from redis.backoff import NoBackoff
from redis.retry import Retry

PROGRAMS = ("redis-server", "valkey-server")
START_S = 60.0
SOON_MS = 500
PATIENT_MS = 60_000
_given: set[int] = set()


def program() -> str:
    """Return the server, which is a sentinel with ``--sentinel``; skip where there is none, but on CI fail.

    ``KVTIER_REDIS_SERVER`` names another one, or gives its path.
    """
    chosen = os.environ.get("KVTIER_REDIS_SERVER")
    found = next(filter(shutil.which, [chosen] if chosen else PROGRAMS), None)
    return found or cannot(
        f"{chosen or PROGRAMS[0]} is not installed: apt-get install redis-server, or set KVTIER_REDIS_SERVER"
    )


def cannot(why: str) -> NoReturn:
    """Skip, but on CI fail."""
    if os.environ.get("CI", "").lower() == "true":
        pytest.fail(why)
    pytest.skip(why)


def free_port() -> int:
    """Return a port that nobody listens on, nor on the one of the cluster bus above it.

    Not one that the kernel gives to whoever connects: somebody may have it by the time the server starts.
    Nor one that was returned before: whoever got it may not listen yet.
    """
    while True:
        port = random.SystemRandom().randrange(12_000, 20_000)
        if port in _given:
            continue
        with closing(socket.socket()) as one, closing(socket.socket()) as other, suppress(OSError):
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + 10_000))
            _given.add(port)
            return port


class Server:
    """One server that runs. ``kill`` and ``start`` may be called any number of times.

    Args:
        directory: for its files.
        options: options of its command line, without the dashes.
        port: 0 for none; chosen where none is given.
        tls_port: where it listens for TLS, where that is an option.
        login: how ``client`` logs in.

    Attributes:
        port: where it listens.
    """

    def __init__(
        self,
        directory: Path,
        *options: Sequence[str],
        port: int | None = None,
        tls_port: int = 0,
        **login: Any,
    ) -> None:
        self.directory = directory
        self.listen_port = free_port() if port is None else port
        self.port = self.listen_port or tls_port
        self.login = login
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True, exist_ok=True)

    def start(self) -> Server:
        """Start it and wait until it answers."""
        command = [
            program(),
            "--port",
            str(self.listen_port),
            "--bind",
            "127.0.0.1",
            "--dir",
            str(self.directory),
        ]
        given = {name for name, *_ in self._options}
        defaults = (("save", ""), ("appendonly", "no"), ("repl-diskless-sync-delay", "0"))
        for name, *values in (*(one for one in defaults if one[0] not in given), *self._options):
            command += [f"--{name}", *values]
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_for(self.answers, "the server answers")
        return self

    def answers(self) -> bool:
        """Whether it answers."""
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError((self.directory / "log").read_text()[-2000:])
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def client(self, **options: Any) -> redis.Redis:
        """Return a client that tries nothing twice."""
        options = {"retry": Retry(NoBackoff(), 0), "socket_timeout": 10.0, **self.login, **options}
        if "unix_socket_path" not in options:
            options |= {"host": "127.0.0.1", "port": self.port}
        return redis.Redis(**options)

    def stop(self) -> None:
        """Let it do nothing until ``go_on``, as on a machine that hangs."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Undo ``stop``."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextmanager
    def stopped(self, seconds: float = float("inf")) -> Iterator[None]:
        """Let it do nothing for so many seconds, at most until the context is left."""
        self.stop()
        timer = threading.Timer(min(seconds, 3600.0), self.go_on)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
            self.go_on()

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)


ACL = (
    "+get +set +exists +expire +unlink +getrange +touch +scan +info +role +ping +select +wait "
    "+client|setname +cluster|slots"
)
"""What the tier's user has to be allowed."""


class TlsServer:
    """A server that speaks TLS alone, wants certificates of its clients, and knows a user ``kv``.

    Attributes:
        server: the server.
        settings: how the tier is told of it, its address apart.
    """

    PASSWORD = "correct horse"

    def __init__(self, directory: Path) -> None:
        authority = trustme.CA()
        directory.mkdir(parents=True, exist_ok=True)
        ca, cert, key = (directory / name for name in ("ca.pem", "cert.pem", "key.pem"))
        authority.cert_pem.write_to_path(str(ca))
        issued = authority.issue_cert("127.0.0.1", "localhost")
        issued.private_key_pem.write_to_path(str(key))
        issued.cert_chain_pems[0].write_to_path(str(cert))
        port = free_port()
        files = {"ca_file": str(ca), "cert_file": str(cert), "key_file": str(key)}
        login = {"ssl": True, "ssl_ca_certs": str(ca), "ssl_certfile": str(cert), "ssl_keyfile": str(key)}
        self.server = Server(
            directory,
            ("tls-port", str(port)),
            ("tls-ca-cert-file", str(ca)),
            ("tls-cert-file", str(cert)),
            ("tls-key-file", str(key)),
            ("maxmemory", "2gb"),
            port=0,
            tls_port=port,
            **login,
        )
        self.settings = {
            "tls": True,
            "username": "kv",
            "password": self.PASSWORD,
            **{f"tls_{name}": path for name, path in files.items()},
        }

    def __enter__(self) -> TlsServer:
        try:
            self.server.start()
        except AssertionError as error:
            if "Failed finding TLS support" in str(error):
                cannot(f"{program()} was built without TLS")
            raise
        with self.server.client() as client:
            client.execute_command("ACL", "SETUSER", "kv", "on", f">{self.PASSWORD}", "~*", *ACL.split())
        return self

    def __exit__(self, *_: object) -> None:
        self.server.kill()


@contextmanager
def cluster(directory: Path, nodes: int = 3) -> Iterator[list[Server]]:
    """A cluster of primaries that share all slots.

    They give one up that is silent for a minute, not when the machine is busy: see ``give_up_after``.

    Args:
        directory: for the servers' files.
        nodes: how many there are.
    """
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                Server(
                    directory / f"node-{number}",
                    ("cluster-enabled", "yes"),
                    ("cluster-node-timeout", str(PATIENT_MS)),
                    ("cluster-require-full-coverage", "no"),
                )
            )
            for number in range(nodes)
        ]
        per_node = -(-16384 // nodes)
        for number, server in enumerate(servers):
            with server.client() as client:
                last = min((number + 1) * per_node, 16384) - 1
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", number * per_node, last)
                client.execute_command("CLUSTER", "MEET", "127.0.0.1", servers[0].port)
        wait_for(lambda: all(is_complete(server) for server in servers), "the cluster is complete")
        yield servers


def give_up_after(silent_ms: int, servers: Sequence[Server]) -> None:
    """Let nodes of a cluster give up others that are silent for so long."""
    for server in servers:
        with server.client() as client:
            client.config_set("cluster-node-timeout", silent_ms)


def is_complete(server: Server) -> bool:
    """Whether a node of a cluster knows who serves each slot."""
    with server.client() as client:
        info = client.execute_command("CLUSTER", "INFO").decode()
    return "cluster_state:ok" in info and "cluster_slots_assigned:16384" in info


@contextmanager
def sentinels(directory: Path, primary: Server, count: int = 3) -> Iterator[list[int]]:
    """Sentinels that watch over a primary called ``kv``. Yields their ports.

    They take it for dead when it is silent for a minute, not when the machine is busy: see ``notice_soon``.
    """
    ports, processes = [], []
    try:
        for number in range(count):
            folder, port = directory / f"sentinel-{number}", free_port()
            folder.mkdir(parents=True)
            (folder / "sentinel.conf").write_text(
                f"port {port}\nbind 127.0.0.1\ndir {folder}\n"
                f"sentinel monitor kv 127.0.0.1 {primary.port} 2\n"
                "sentinel down-after-milliseconds kv 60000\nsentinel failover-timeout kv 3000\n"
            )
            with (folder / "log").open("wb") as log:
                command = [program(), str(folder / "sentinel.conf"), "--sentinel"]
                processes.append(subprocess.Popen(command, stdout=log, stderr=log))
            ports.append(port)
        wait_for(
            lambda: all(others_known(port) == count - 1 for port in ports), "the sentinels know each other"
        )
        yield ports
    finally:
        for process in processes:
            process.kill()
            process.wait()


def notice_soon(ports: Sequence[int]) -> None:
    """Let sentinels take their primary for dead after a moment."""
    for port in ports:
        with redis.Redis(port=port, retry=Retry(NoBackoff(), 0)) as client:
            client.execute_command("SENTINEL", "SET", "kv", "down-after-milliseconds", SOON_MS)


def others_known(port: int) -> int:
    """How many other sentinels one has heard of, -1 where it does not answer or has found no replica yet."""
    try:
        with redis.Redis(port=port, retry=Retry(NoBackoff(), 0), decode_responses=True) as client:
            state: Any = client.sentinel_master("kv")
            return int(state["num-other-sentinels"]) if int(state["num-slaves"]) else -1
    except redis.RedisError:
        return -1


def wait_for(condition: Callable[[], bool], what: str, seconds: float = START_S) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(0.02)
