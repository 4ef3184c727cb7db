"""A real S3 server for the tests: Ceph's object gateway with one monitor and one OSD in memory.

It runs in a fresh directory on the loopback interface, without root. S3 requests are authenticated.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import obstore
from obstore.store import S3Store

PACKAGES = ("ceph-mon", "ceph-osd", "radosgw", "ceph-common", "faketime")
PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin", "faketime")
START_S = 60.0
STOP_S = 1.0
PORTS = 20_000, 22_000
MEMORY_BYTES = 4 * 2**30
POOLS = (
    ".rgw.root",
    *(f"default.rgw.{name}" for name in ("log", "control", "meta")),
    *(f"default.rgw.buckets.{name}" for name in ("index", "data", "non-ec")),
)

SETTINGS = f"""
# no authentication within the cluster
auth cluster required = none
auth service required = none
auth client required = none
ms mon client mode = crc
ms cluster mode = crc
ms service mode = crc
ms client mode = crc
# one of each is enough
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
mon allow pool size one = true
mon warn on pool no redundancy = false
mon max pg per osd = 1000
osd crush chooseleaf type = 0
osd crush update on start = true
# in memory
osd objectstore = memstore
memstore device bytes = {MEMORY_BYTES}
mon data avail crit = 1
mon data avail warn = 1
# quick to start
paxos propose interval = 0.02
paxos min wait = 0.01
mon election timeout = 0.5
# quiet
debug ms = 0/0
rgw enable usage log = false
"""


class CephError(Exception):
    """A part of the server did not start; with the end of the logs."""


def missing() -> list[str]:
    """Return the programs that are not installed."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


def install() -> None:
    """Install the packages."""
    apt = ["apt-get", "-qq", "-y", "--no-install-recommends", "-o", "Dpkg::Use-Pty=0"]
    apt += ["-o", "DPkg::Lock::Timeout=300"]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run([*apt, "update"], check=True, env=environment)
    subprocess.run([*apt, "install", *PACKAGES], check=True, env=environment)


class Ceph:
    """The server. A context manager.

    Args:
        directory: a fresh directory for all of its files.

    Attributes:
        endpoint: its URL.
        access_key_id, secret_access_key: of a user who may make buckets.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._mon_port, self._port = free_ports(2)
        self._running: list[str] = []
        self.endpoint = f"http://127.0.0.1:{self._port}"
        self.access_key_id = secrets.token_hex(10)
        self.secret_access_key = secrets.token_hex(20)

    def __enter__(self) -> Ceph:
        for name in ("mon", "osd", "run", "log"):
            (self._directory / name).mkdir(parents=True)
        self._write_settings()
        try:
            self._start_monitor()
            self._start_store()
            self._make_pools()
            self.start_gateway()
            self._make_user()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def store(self, bucket: str) -> S3Store:
        """Return a client besides the tier's."""
        return S3Store(
            bucket,
            endpoint=self.endpoint,
            region="us-east-1",
            access_key_id=self.access_key_id,
            secret_access_key=self.secret_access_key,
            client_options={"allow_http": True},
        )

    def make_bucket(self, name: str) -> None:
        """Make a bucket."""
        make_bucket(self.store(name))

    def start_gateway(self) -> None:
        """Start the gateway, at the beginning or after ``kill_gateway``, and wait until it answers."""
        frontend = f"--rgw-frontends=beast endpoint=127.0.0.1:{self._port} tcp_nodelay=1"
        self._start("client.rgw", "radosgw", "-n", "client.rgw", frontend)
        self._wait("the gateway", self._answers)

    def kill_gateway(self) -> None:
        """Kill the gateway. What it has stored is kept."""
        self._running.remove("client.rgw")
        _end(int((self._directory / "run" / "client.rgw.pid").read_text()), signal.SIGKILL)

    def stop(self) -> None:
        """End the processes, the gateway first: it hangs without the store."""
        for name in reversed(self._running):
            with suppress(OSError, ValueError):
                _end(int((self._directory / "run" / f"{name}.pid").read_text()))
        self._running = []
        shutil.rmtree(self._directory, ignore_errors=True)

    def _write_settings(self) -> None:
        here = self._directory
        self._cluster = str(uuid.uuid4())
        self._settings.write_text(f"""[global]
fsid = {self._cluster}
mon host = v2:127.0.0.1:{self._mon_port}
mon initial members = a
public addr = 127.0.0.1
ms bind msgr1 = false
ms bind ipv6 = false
run dir = {here}/run
pid file = {here}/run/$name.pid
admin socket = {here}/run/$name.asok
log file = {here}/log/$name.log
mon data = {here}/mon
osd data = {here}/osd
keyring = /dev/null
rgw dns name = localhost
{SETTINGS}""")

    @property
    def _settings(self) -> Path:
        return self._directory / "ceph.conf"

    def _start_monitor(self) -> None:
        address = f"[v2:127.0.0.1:{self._mon_port}]"
        monitors = str(self._directory / "monmap")
        self._run(
            "monmaptool", "--create", "--clobber", "--fsid", self._cluster, "--addv", "a", address, monitors
        )
        self._run("ceph-mon", "-i", "a", "--mkfs", "--monmap", monitors)
        self._start("mon.a", "ceph-mon", "-i", "a")
        self._wait("the monitor", lambda: self._says("", "ceph", "-s"))

    def _start_store(self) -> None:
        store = str(uuid.uuid4())
        self._run("ceph", "osd", "new", store)
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", store)
        self._start("osd.0", "ceph-osd", "-i", "0")
        self._wait("the store", lambda: self._says("1 up", "ceph", "osd", "stat"))

    def _make_pools(self) -> None:
        """Make the pools: when the gateway does that by itself, it sometimes crashes (16.2)."""
        self._run("ceph", given="".join(f"osd pool create {pool}\n" for pool in POOLS))

    def _make_user(self) -> None:
        keys = (f"--access-key={self.access_key_id}", f"--secret-key={self.secret_access_key}")
        self._run("radosgw-admin", "user", "create", "--uid=tests", "--display-name=tests", *keys)

    def _start(self, name: str, *command: str) -> None:
        self._running.append(name)
        self._run(*command)

    def _run(self, *command: str, given: str = "") -> str:
        program, *arguments = command
        ended = subprocess.run(
            [program, "-c", str(self._settings), *arguments],
            input=given,
            capture_output=True,
            text=True,
            timeout=START_S,
            env={**os.environ, "CEPH_CONF": str(self._settings)},
        )
        if ended.returncode:
            raise CephError(f"{' '.join(command)}: {ended.stderr[-2000:]}\n{self._logs()}")
        return ended.stdout

    def _says(self, expected: str, *command: str) -> bool:
        try:
            return expected in self._run(*command)
        except (CephError, subprocess.TimeoutExpired):
            return False

    def _answers(self) -> bool:
        try:
            with urlopen(self.endpoint, timeout=2) as answer:
                return bool(answer.status == 200)
        except (URLError, OSError):
            return False

    def _wait(self, what: str, is_up: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_S
        while not is_up():
            if time.monotonic() > deadline:
                raise CephError(f"{what} did not come up within {START_S:g} s\n{self._logs()}")
            time.sleep(0.1)

    def _logs(self) -> str:
        logs = sorted((self._directory / "log").glob("*.log"))
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in logs)


def make_bucket(store: S3Store) -> None:
    """Make a bucket. obstore has no call for that, but it can sign the request."""
    url = obstore.sign(store, "PUT", "", timedelta(minutes=1))
    with urlopen(Request(url, method="PUT"), timeout=10):
        pass


def free_ports(count: int) -> list[int]:
    """Return free ports below the ephemeral ones."""
    while True:
        ports = random.SystemRandom().sample(range(*PORTS), count)
        with ExitStack() as stack, suppress(OSError):
            for port in ports:
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return ports


def _end(pid: int, first: signal.Signals = signal.SIGTERM) -> None:
    """End a process and wait for its end: its port may be used again."""
    for number, patience_s in ((first, STOP_S), (signal.SIGKILL, START_S)):
        deadline = time.monotonic() + patience_s
        if _runs(pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        while _runs(pid) and time.monotonic() < deadline:
            time.sleep(0.05)


def _runs(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
