"""Real servers for the tests, on loopback and free ports, each in its own process."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager, suppress
from math import inf
from pathlib import Path
from typing import Any, Protocol

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvtier import Identity
from kvtier_redis import RedisConfig, RedisTier
from kvtier_testing.tiers import TierRig
from kvtier_testing.tiers._servers import absent, free_port, stopped

PROGRAMS = ("redis-server", "valkey-server")
START_S = 60.0
GENEROUS_S = 30.0  # a deadline that even a busy machine meets
IDENTITY = Identity.make("tests", {"dtype": "float16"})
README = Path(__file__).parents[1].joinpath("README.md").read_text(encoding="utf-8")
(ACL,) = re.findall(r"^```\n(\+get .*)\n```", README, re.MULTILINE)
"""Permissions of the tier's user that the README lists."""
CLUSTER_BUS = 10_000  # offset of a cluster server's second port


def program() -> str:
    """Return the server program: ``KVTIER_REDIS_SERVER``, or the installed one. Skip if there is none."""
    chosen = os.environ.get("KVTIER_REDIS_SERVER")
    found = next(filter(shutil.which, [chosen] if chosen else PROGRAMS), None)
    return found or absent(
        f"{chosen or PROGRAMS[0]} is not installed: apt-get install redis-server, or set KVTIER_REDIS_SERVER"
    )


class Server:
    """A server process. ``kill`` and ``start`` may be called any number of times.

    Args:
        port: port to listen on; chosen if not given.
        login: options of ``client``; with ``ssl`` the server speaks only TLS.
    """

    def __init__(self, directory: Path, options: str = "", *, port: int | None = None, **login: Any) -> None:
        self.directory = directory
        self.port = port or free_port(CLUSTER_BUS)
        self._login = login
        listen = f"--port 0 --tls-port {self.port}" if "ssl" in login else f"--port {self.port}"
        defaults = "--save '' --appendonly no --repl-diskless-sync-delay 0"
        self._options = shlex.split(f"{listen} --bind 127.0.0.1 --dir {directory} {defaults} {options}")
        self._process: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True, exist_ok=True)

    def start(self) -> Server:
        """Start it, and wait until it answers."""
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen([program(), *self._options], stdout=log, stderr=log)
        wait_for(self._answers, "the server answers")
        return self

    def client(self, **options: Any) -> redis.Redis:
        """Return a client that never retries."""
        defaults = {
            "host": "127.0.0.1",
            "port": self.port,
            "retry": Retry(NoBackoff(), 0),
            "socket_timeout": 10.0,
        }
        return redis.Redis(**{**defaults, **self._login, **options})

    def add_user(self, name: str, password: str, permissions: str = f"~* {ACL}") -> None:
        """Add an ACL user, or change one."""
        with self.client() as client:
            client.execute_command("ACL", "SETUSER", name, "on", f">{password}", *permissions.split())

    def kill(self) -> None:
        """Kill it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextmanager
    def stopped(self, seconds: float = inf) -> Iterator[None]:
        """Stop the process, like a hang of its machine, until the context ends or time runs out."""
        assert self._process is not None
        with stopped(self._process, seconds):
            yield

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError((self.directory / "log").read_text()[-2000:])
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.RedisError:
            return False


class Port(Protocol):
    port: int


def tier(*servers: Port, **settings: Any) -> RedisTier:
    """Return a tier on servers; it is not open."""
    addresses = [f"127.0.0.1:{server.port}" for server in servers]
    return RedisTier(RedisConfig(**{"addresses": addresses, "deadline_s": GENEROUS_S, **settings}))


def opened(
    *servers: Port,
    name: str = "cache",
    identity: Identity = IDENTITY,
    chunk_bytes: int = 256 * 1024,
    **settings: Any,
) -> AbstractAsyncContextManager[TierRig]:
    """Open a tier on servers, and close it at the end."""
    return TierRig(tier(*servers, **settings), identity, chunk_bytes).opened(name=name)


class TlsServer:
    """A server with only TLS, client certificates and an ACL user ``kv``.

    ``settings`` are the tier's settings.
    """

    PASSWORD = "correct horse"

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        ca, cert, key = self._files = [str(directory / name) for name in ("ca.pem", "cert.pem", "key.pem")]
        self._issue()
        self.server = Server(
            directory,
            f"--tls-ca-cert-file {ca} --tls-cert-file {cert} --tls-key-file {key} --maxmemory 2gb",
            ssl=True,
            ssl_ca_certs=ca,
            ssl_certfile=cert,
            ssl_keyfile=key,
        )
        self.settings: dict[str, Any] = {"tls": True, "username": "kv", "password": self.PASSWORD}
        self.settings |= {"tls_ca_file": ca, "tls_cert_file": cert, "tls_key_file": key}

    def rotate(self) -> None:
        """Restart the server with a new authority and new certificates, in the same files."""
        self.server.kill()
        self._issue()
        self.__enter__()

    def _issue(self) -> None:
        import trustme  # Other users of these servers do not need it.

        authority = trustme.CA()
        issued = authority.issue_cert("127.0.0.1", "localhost")
        for pem, file in zip(
            (authority.cert_pem, issued.cert_chain_pems[0], issued.private_key_pem), self._files, strict=True
        ):
            pem.write_to_path(file)

    def __enter__(self) -> TlsServer:
        try:
            self.server.start()
        except AssertionError as error:
            if "Failed finding TLS support" in str(error):
                absent(f"{program()} was built without TLS")
            raise
        self.server.add_user("kv", self.PASSWORD)
        return self

    def __exit__(self, *_: object) -> None:
        self.server.kill()


@contextmanager
def cluster(directory: Path) -> Iterator[list[Server]]:
    """A cluster of three primaries, which mark one as failed after a minute of silence.

    Their config epochs differ from the start. Otherwise nodes that meet with equal epochs would choose new
    ones later. If a server does so while a slot moves away from it, the receiving server may still regard it
    as the slot's owner.
    """
    options = "--cluster-enabled yes --cluster-node-timeout 60000 --cluster-require-full-coverage no"
    with ExitStack() as stack:
        servers = [stack.enter_context(Server(directory / f"node-{number}", options)) for number in range(3)]
        slots = ((0, 5461), (5462, 10922), (10923, 16383))
        for epoch, (server, own) in enumerate(zip(servers, slots, strict=True), start=1):
            with server.client() as client:
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", epoch)
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", *own)
                client.execute_command("CLUSTER", "MEET", "127.0.0.1", servers[0].port)
        wait_for(lambda: all(is_complete(server) for server in servers), "the cluster is complete")
        yield servers


def is_complete(server: Server) -> bool:
    """Return whether a node of a cluster knows the server of each slot, and the last server's epoch."""
    with server.client() as client:
        lines = client.execute_command("CLUSTER", "INFO").decode().split()
    return {"cluster_state:ok", "cluster_slots_assigned:16384", "cluster_current_epoch:3"} <= {*lines}


@contextmanager
def sentinels(directory: Path, primary: Server) -> Iterator[list[int]]:
    """Three sentinels of a primary called ``kv``; yields their ports.

    They mark it as down after a minute of silence: see ``mark_down_soon``.
    """
    ports, processes = [], []
    try:
        for number in range(3):
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
        wait_for(lambda: all(map(hurry, ports)), "the sentinels answer")
        wait_for(lambda: all(others_known(port) == 2 for port in ports), "the sentinels know each other")
        yield ports
    finally:
        for process in processes:
            process.kill()
            process.wait()


def hurry(port: int) -> bool:
    """Make a sentinel check its servers several times a second; return whether it answers."""
    with redis.Redis(port=port, retry=Retry(NoBackoff(), 0)) as client, suppress(redis.ConnectionError):
        with suppress(redis.ResponseError):  # old versions cannot check faster
            client.execute_command("SENTINEL", "DEBUG", "info-period", 200, "publish-period", 200)
        return True
    return False


def mark_down_soon(ports: Sequence[int]) -> None:
    """Make sentinels mark their primary as down after 0.5 s of silence."""
    for port in ports:
        with redis.Redis(port=port, retry=Retry(NoBackoff(), 0)) as client:
            client.execute_command("SENTINEL", "SET", "kv", "down-after-milliseconds", 500)


def fail_over(ports: Sequence[int], primary: Server) -> None:
    """Make sentinels promote the replica; wait until the old primary is its replica."""

    def is_replaced() -> bool:
        with redis.Redis(port=ports[0], retry=Retry(NoBackoff(), 0), decode_responses=True) as client:
            if int(client.sentinel_master("kv")["port"]) != primary.port:
                return True
            # No replica is suitable yet, or a failover is running, which may fail.
            with suppress(redis.ResponseError):
                client.execute_command("SENTINEL", "FAILOVER", "kv")
        return False

    def is_replica() -> bool:
        # The server closes its clients' connections.
        with primary.client() as client, suppress(redis.RedisError):
            return bool(client.role()[0] == b"slave")
        return False

    wait_for(is_replaced, "the sentinels promote the replica")
    wait_for(is_replica, "the primary is a replica")


def others_known(port: int) -> int:
    """Return how many other sentinels a sentinel knows, or -1 if it does not answer or knows no replica."""
    try:
        with redis.Redis(port=port, retry=Retry(NoBackoff(), 0), decode_responses=True) as client:
            state: Any = client.sentinel_master("kv")
            return int(state["num-other-sentinels"]) if int(state["num-slaves"]) else -1
    except redis.RedisError:
        return -1


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {START_S:g} s: {what}")
        time.sleep(0.02)
