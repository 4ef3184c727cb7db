"""A real S3 server for the tests: Ceph's object gateway with one monitor and one OSD in memory.

It runs in a fresh directory on the loopback interface, without root. S3 requests are authenticated.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Literal
from urllib.request import Request, urlopen

import obstore
from obstore.store import S3Store

from kvtier_testing.tiers._servers import free_port

PACKAGES = ("ceph-mon", "ceph-osd", "radosgw", "ceph-common")
PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
START_S = 60.0
STOP_S = 5.0
POOLS = (
    ".rgw.root",
    *(f"default.rgw.{name}" for name in ("log", "control", "meta")),
    *(f"default.rgw.buckets.{name}" for name in ("index", "data", "non-ec")),
)

SETTINGS = Path(__file__).with_name("ceph.conf")


class CephError(Exception):
    """A part of the server did not start. The message contains the end of the logs."""


def missing() -> list[str]:
    """Return the programs that are not installed."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


class Ceph:
    """The server. A context manager.

    Args:
        directory: a fresh directory for all of its files.

    Attributes:
        endpoint: its URL.
        access_key_id, secret_access_key: credentials of a user who may create buckets.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._mon_port, self._port = free_port(), free_port()
        self._settings = directory / "ceph.conf"
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.endpoint = f"http://127.0.0.1:{self._port}"
        self.access_key_id = secrets.token_hex(10)
        self.secret_access_key = secrets.token_hex(20)
        self._buckets: set[str] = set()

    def __enter__(self) -> Ceph:
        self._start_all()
        return self

    def _start_all(self) -> None:
        for name in ("mon", "osd", "run", "log"):
            (self._directory / name).mkdir(parents=True)
        self._write_settings()
        try:
            self._start_monitor()
            self._start_store()
            # When the gateway creates its pools by itself, it sometimes crashes (16.2).
            self._run("ceph", given="".join(f"osd pool create {pool}\n" for pool in POOLS))
            self._start_gateway()
            keys = (f"--access-key={self.access_key_id}", f"--secret-key={self.secret_access_key}")
            self._run("radosgw-admin", "user", "create", "--uid=tests", "--display-name=tests", *keys)
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def store(self, bucket: str) -> S3Store:
        """Return a client that is independent of the tier's."""
        return S3Store(
            bucket,
            endpoint=self.endpoint,
            region="us-east-1",
            access_key_id=self.access_key_id,
            secret_access_key=self.secret_access_key,
            client_options={"allow_http": True},
        )

    def make_bucket(self, name: str) -> None:
        """Create a bucket. obstore has no call for that, but it can sign the request."""
        self._bucket(name, "PUT")
        self._buckets.add(name)

    def remove_bucket(self, name: str) -> None:
        """Remove an empty bucket."""
        self._bucket(name, "DELETE")
        self._buckets.discard(name)

    def add_key(self, file: Path) -> str:
        """Add a key for the user, write it as the profile ``kv`` into a credentials file, and return it."""
        key, secret = secrets.token_hex(10), secrets.token_hex(20)
        keys = (f"--access-key={key}", f"--secret-key={secret}")
        self._run("radosgw-admin", "key", "create", "--uid=tests", "--key-type=s3", *keys)
        file.write_text(f"[kv]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")
        return key

    def remove_key(self, key: str) -> None:
        """Remove a key, so that the server refuses it."""
        self._run("radosgw-admin", "key", "rm", "--uid=tests", "--key-type=s3", f"--access-key={key}")

    def _bucket(self, name: str, method: Literal["PUT", "DELETE"]) -> None:
        url = obstore.sign(self.store(name), method, "", timedelta(minutes=1))
        with urlopen(Request(url, method=method), timeout=10):
            pass

    def _start_gateway(self) -> None:
        frontend = f"--rgw-frontends=beast endpoint=127.0.0.1:{self._port} tcp_nodelay=1"
        self._start("radosgw", "-n", "client.rgw", frontend)
        self._wait("the gateway", self._answers)

    def restart_gateway(self) -> None:
        """Restart the gateway. Objects stay, unless the store had to be restarted, too."""
        gateway = self._running.pop("radosgw")
        gateway.kill()
        gateway.wait()
        try:
            self._start_gateway()
        except CephError as error:
            self._start_anew(str(error))

    def revive(self) -> None:
        """Restart all processes if one has ended, so that only one test fails. Objects are lost."""
        if ended := self._ended():
            self._start_anew(f"ended: {ended}\n{self._logs()}")

    def _start_anew(self, why: str) -> None:
        print(f"Ceph is started again with empty buckets, because: {why}", file=sys.stderr)
        self.stop()
        self._start_all()
        for name in self._buckets:
            self._bucket(name, "PUT")

    def _ended(self) -> list[str]:
        return [name for name, process in self._running.items() if process.poll() is not None]

    def stop(self) -> None:
        """End the processes, the gateway first: it hangs without the store."""
        for process in reversed(self._running.values()):
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._running.clear()
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
admin socket = {here}/run/$name.asok
log file = {here}/log/$name.log
mon data = {here}/mon
osd data = {here}/osd
keyring = /dev/null
rgw dns name = localhost
{SETTINGS.read_text()}""")

    def _start_monitor(self) -> None:
        address = f"[v2:127.0.0.1:{self._mon_port}]"
        monitors = str(self._directory / "monmap")
        self._run(
            "monmaptool", "--create", "--clobber", "--fsid", self._cluster, "--addv", "a", address, monitors
        )
        self._run("ceph-mon", "-i", "a", "--mkfs", "--monmap", monitors)
        self._start("ceph-mon", "-i", "a")
        self._wait("the monitor", lambda: self._says("", "ceph", "-s"))

    def _start_store(self) -> None:
        store = str(uuid.uuid4())
        self._run("ceph", "osd", "new", store)
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", store)
        self._start("ceph-osd", "-i", "0")
        self._wait("the store", lambda: self._says("1 up", "ceph", "osd", "stat"))

    def _start(self, program: str, *arguments: str) -> None:
        """Start a process in the foreground, which logs to a file."""
        command = [program, "-f", "-c", str(self._settings), *arguments]
        self._running[program] = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

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
        except OSError:
            return False

    def _wait(self, what: str, is_up: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_S
        while not is_up():
            ended = self._ended()
            if ended or time.monotonic() > deadline:
                raise CephError(
                    f"{what} did not come up within {START_S:g} s; ended: {ended}\n{self._logs()}"
                )
            time.sleep(0.1)

    def _logs(self) -> str:
        logs = sorted((self._directory / "log").glob("*.log"))
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in logs)
