"""Tiers whose backends can be made slow, hang, fail, be damaged, go away and fill up, and be well again.

A ``Backend`` is one tier over a real backend. Nothing in kvtier takes part in a fault: it happens where the
backend is, in another process, in the file system or in what is kept, but for the tier that represents a
third party's.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.integration import fuse_mount
from tests.integration.fuse_mount import FuseMount, Trouble
from tests.integration.harness import PROJECT, load_file

FAULTS = ("slow", "hang", "error", "corrupt", "vanish", "fill up")
DAMAGE = {"checksum", "torn", "foreign"}
ROOT_BYTES = 192 * 2**20
BALLAST_BYTES = 2**20
REDIS_START_S = 20.0


class Backend(ABC):
    """One tier and its backend. Each fault may be begun again while it lasts; one at a time.

    Args:
        directory: for all that it needs.

    Attributes:
        name: what the tier is called on the page.
        tier: what it is called in metrics.
        how: what each fault is, in the words of the page.
        counted: reasons, one of which at least is counted for the tier while a fault lasts; none where it
            need not cost a chunk.
        more: settings of the engine.
    """

    name: ClassVar[str]
    tier: ClassVar[str]
    how: ClassVar[Mapping[str, str]]
    counted: ClassVar[Mapping[str, set[str]]]
    more: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.finds: Path | None = None
        self.environment: dict[str, str] = {}

    @abstractmethod
    def start(self, stack: ExitStack) -> dict[str, Any]:
        """Start the backend; return the tier's settings. ``stack`` is left when nobody needs it any more."""

    @abstractmethod
    def begin(self, fault: str) -> None:
        """Begin a fault, or go on with it."""

    def shows(self, fault: str, reasons: Collection[str]) -> bool:
        """Say whether the reasons that were counted tell of this fault."""
        wanted = self.counted[fault]
        return not wanted or not wanted.isdisjoint(reasons)

    @abstractmethod
    def come_back(self) -> None:
        """End whatever fault there is."""


class FileBackend(Backend):
    """The file tier, on a file system that obeys; its files are on another one, in memory and bounded."""

    tier = "fs"
    how = {
        "slow": "each call takes 10 ms more",
        "hang": "no call returns",
        "error": "each call ends with `EIO`",
        "corrupt": "each half of 64 KiB is read as the other",
        "vanish": "the file system is gone (`ENOTCONN`), and mounted anew",
        "fill up": "others fill it to the last byte",
    }
    counted = {
        "slow": set(),
        "hang": {"timeout", "unresponsive"},
        "error": {"eio"},
        "corrupt": DAMAGE,
        "vanish": {"enotconn", "econnaborted"},
        "fill up": {"enospc", "min_free", "max_bytes", "full"},
    }

    def start(self, stack: ExitStack) -> dict[str, Any]:
        if why := fuse_mount.why_not():
            absent(f"no file system can be mounted: {why}")
        fuse_mount.sweep()
        self._files = fuse_mount.memory(self.directory / "files", ROOT_BYTES, stack)
        self._mount = stack.enter_context(FuseMount(self._files, self.directory / "root"))
        self._is_gone = False
        return {"type": "fs", "root_dir": str(self.directory / "root")}

    def begin(self, fault: str) -> None:
        if fault == "slow":
            self._mount.be(Trouble(delay_s=0.01))
        elif fault == "hang":
            self._mount.be(Trouble(hangs=True))
        elif fault == "error":
            self._mount.be(Trouble(error=errno.EIO))
        elif fault == "corrupt":
            self._mount.be(Trouble(damages=True))
        elif fault == "vanish":
            self._mount.die()
            self._is_gone = True
        else:
            self._fill()

    def come_back(self) -> None:
        (self._files / "ballast").unlink(missing_ok=True)
        if self._is_gone:
            self._mount.mount()
            self._is_gone = False
        self._mount.be(Trouble())

    def _fill(self) -> None:
        with (self._files / "ballast").open("ab", buffering=0) as file, suppress(OSError):
            while file.write(bytes(BALLAST_BYTES)):
                pass


class Files(FileBackend):
    """The tiers in a process of their own."""

    name = "fs"


class InEngine(FileBackend):
    """The tiers in a thread of the engine; those of the other rows are in a process of their own."""

    name = "fs, `isolation: thread`"
    more: ClassVar[Mapping[str, Any]] = {"isolation": "thread"}


class Redis(Backend):
    """kvtier-redis over a Redis server."""

    name = "redis"
    tier = "redis"
    how = {
        "slow": "the server is stopped for 40 of each 50 ms",
        "hang": "it is stopped (`SIGSTOP`)",
        "error": "its user loses the permission to get and set (`NOPERM`)",
        "corrupt": "half of every value is overwritten, and set right afterwards",
        "vanish": "it is killed, and started again with nothing in it",
        "fill up": "it has no memory left, and evicts nothing",
    }
    counted = {
        "slow": set(),
        "hang": {"timeout", "unresponsive"},
        "error": {"denied"},
        "corrupt": DAMAGE,
        "vanish": {"connection"},
        "fill up": {"full"},
    }

    def start(self, stack: ExitStack) -> dict[str, Any]:
        require("redis-server", "kvtier_redis")
        self._path = self.directory / "redis.sock"
        self._stutter: threading.Event | None = None
        stack.callback(self._kill)
        self._start()
        return {"type": "redis", "addresses": [str(self._path)]}

    def begin(self, fault: str) -> None:
        if fault == "slow":
            self._begin_to_stutter()
        elif fault == "hang":
            self._process.send_signal(signal.SIGSTOP)
        elif fault == "error":
            self._say("ACL", "SETUSER", "default", "-get", "-set", "-getrange", "-exists")
        elif fault == "corrupt":
            self._say("EVAL", _DAMAGE, "0")
        elif fault == "vanish":
            self._kill()
        else:
            self._say("CONFIG", "SET", "maxmemory-policy", "noeviction")
            self._say("CONFIG", "SET", "maxmemory", "1")

    def come_back(self) -> None:
        if self._stutter is not None:
            self._stutter.set()
            self._stuttering.join()
            self._stutter = None
        if self._process.poll() is not None:
            self._start()
        self._process.send_signal(signal.SIGCONT)
        self._say("ACL", "SETUSER", "default", "+@all")
        self._say("CONFIG", "SET", "maxmemory", "1gb")
        self._say("EVAL", _REPAIR, "0")

    def _start(self) -> None:
        options = ["--port", "0", "--unixsocket", str(self._path), "--save", "", "--maxmemory", "1gb"]
        self._process = subprocess.Popen(
            ["redis-server", *options, "--dir", str(self.directory)], stdout=subprocess.DEVNULL
        )
        deadline = time.monotonic() + REDIS_START_S
        while True:
            with suppress(OSError):
                return self._say("PING")
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.02)

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _begin_to_stutter(self) -> None:
        if self._stutter is None:
            self._stutter = threading.Event()
            self._stuttering = threading.Thread(target=self._go_on_stuttering, args=(self._stutter,))
            self._stuttering.start()

    def _go_on_stuttering(self, is_over: threading.Event) -> None:
        while not is_over.is_set():
            self._process.send_signal(signal.SIGSTOP)
            is_over.wait(0.04)
            self._process.send_signal(signal.SIGCONT)
            is_over.wait(0.01)

    def _say(self, *words: str) -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(REDIS_START_S)
            connection.connect(str(self._path))
            parts = "".join(f"${len(word.encode())}\r\n{word}\r\n" for word in words)
            connection.sendall(f"*{len(words)}\r\n{parts}".encode())
            answer = connection.recv(4096)
        assert answer[:1] in (b"+", b":"), answer


_DAMAGE = """
local mark = string.rep('DAMAGED!', 8000)
for _, name in ipairs(redis.call('KEYS', '*')) do
    if redis.call('TYPE', name).ok == 'string' and redis.call('STRLEN', name) > 100000 then
        local held = redis.call('GETRANGE', name, 1000, 64999)
        if held ~= mark then
            redis.call('HSET', 'damaged', name, held)
            redis.call('SETRANGE', name, 1000, mark)
        end
    end
end
return 1
"""
_REPAIR = """
local mark = string.rep('DAMAGED!', 8000)
local damaged = redis.call('HGETALL', 'damaged')
for index = 1, #damaged, 2 do
    if redis.call('GETRANGE', damaged[index], 1000, 64999) == mark then
        redis.call('SETRANGE', damaged[index], 1000, damaged[index + 1])
    end
end
redis.call('DEL', 'damaged')
return 1
"""


@dataclass(frozen=True)
class Object:
    """An object of a store, and what it says of it."""

    data: bytes
    attributes: Any


class S3(Backend):
    """kvtier-s3 over Ceph's object gateway, behind a proxy."""

    name = "s3"
    tier = "s3"
    how = {
        "slow": "a proxy holds back each request for 50 ms",
        "hang": "the proxy passes nothing on",
        "error": "it answers `503 SlowDown`",
        "corrupt": "the halves of every object are exchanged, and set right afterwards",
        "vanish": "the gateway is killed, and started again",
        "fill up": "puts are answered `403 QuotaExceeded`",
    }
    counted = {
        "slow": set(),
        "hang": {"timeout", "unresponsive"},
        "error": {"throttled"},
        "corrupt": DAMAGE,
        "vanish": {"connection"},
        "fill up": {"full"},
    }

    def start(self, stack: ExitStack) -> dict[str, Any]:
        tests = PROJECT / "plugins/kvtier-s3/tests"
        require("", "kvtier_s3")
        ceph = load_file("kvtier_s3_tests_ceph", tests / "ceph.py")
        self._proxies = load_file("kvtier_s3_tests_proxy", tests / "proxy.py")
        if missing := ceph.missing():
            if os.environ.get("CI") != "true":
                absent(f"no S3 server: {', '.join(missing)} not found; install {' '.join(ceph.PACKAGES)}")
            ceph.install()
        self._server = stack.enter_context(ceph.Ceph(self.directory / "server"))
        self._server.make_bucket("matrix")
        self._proxy = stack.enter_context(self._proxies.Proxy(int(self._server.endpoint.rpartition(":")[2])))
        self._store = self._server.store("matrix")
        self._client = importlib.import_module("obstore")
        self._damaged: dict[str, tuple[Object, Object]] = {}
        self._is_gone = False
        self.environment = {
            "AWS_ACCESS_KEY_ID": self._server.access_key_id,
            "AWS_SECRET_ACCESS_KEY": self._server.secret_access_key,
        }
        place = {"bucket": "matrix", "prefix": "kv", "endpoint": self._proxy.endpoint}
        return {"type": "s3", **place, "allow_http": True, "timeout_s": 2.0}

    def begin(self, fault: str) -> None:
        faults = self._proxies.Faults
        if fault == "slow":
            self._proxy.be(faults(delay_s=0.05))
        elif fault == "hang":
            self._proxy.be(faults(deaf=True))
        elif fault == "error":
            self._proxy.be(faults(refused=-1))
        elif fault == "corrupt":
            self._corrupt()
        elif fault == "vanish":
            if not self._is_gone:
                self._server.kill_gateway()
            self._is_gone = True
        else:
            self._proxy.be(faults(refused=-1, status=403, code="QuotaExceeded", methods=("PUT",)))

    def come_back(self) -> None:
        if self._is_gone:
            self._server.start_gateway()
            self._is_gone = False
        self._proxy.be(self._proxies.Faults())
        self._repair()

    def _corrupt(self) -> None:
        for name in self._list():
            if name not in self._damaged:
                good = self._read(name)
                self._damaged[name] = good, _exchanged(good)
                self._write(name, _exchanged(good))

    def _repair(self) -> None:
        for name, (good, bad) in self._damaged.items():
            with suppress(FileNotFoundError):  # the tier deletes what it finds damaged, late gets still do
                if self._read(name).data == bad.data:
                    self._write(name, good)
        self._damaged = {}

    def _list(self) -> list[str]:
        return [found["path"] for found in self._client.list(self._store, "kv/chunks").collect()]

    def _read(self, name: str) -> Object:
        answer = self._client.get(self._store, name)
        return Object(bytes(answer.bytes()), answer.attributes)

    def _write(self, name: str, written: Object) -> None:
        self._client.put(self._store, name, written.data, attributes=written.attributes)


def _exchanged(good: Object) -> Object:
    middle = len(good.data) // 2
    return replace(good, data=good.data[middle:] + good.data[:middle])


class Plain(Backend):
    """A third party's tier, which does nothing about faults."""

    name = "a third party's"
    tier = "plain"
    how = {
        "slow": "each call takes 100 ms more",
        "hang": "no call returns, cancelled or not",
        "error": "each call raises what its library raises",
        "corrupt": "each get gives the halves exchanged",
        "vanish": "nothing can be reached, and all is lost",
        "fill up": "each put raises `ENOSPC`",
    }
    counted = {
        "slow": set(),
        "hang": {"timeout", "unresponsive"},
        "error": {"error"},
        "corrupt": DAMAGE,
        "vanish": {"connection"},
        "fill up": {"error"},
    }
    _TROUBLE = {
        "slow": {"delay_s": 0.1},
        "hang": {"hangs": True},
        "error": {"fails": True},
        "corrupt": {"damages": True},
        "vanish": {"is_gone": True},
        "fill up": {"is_full": True},
    }

    def start(self, stack: ExitStack) -> dict[str, Any]:
        self.finds = self.directory / "installed"
        information = self.finds / "kvtier_plain-1.0.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text("Metadata-Version: 2.1\nName: kvtier-plain\nVersion: 1.0\n")
        entry = "plain = tests.integration.plain_tier:PlainTier"
        (information / "entry_points.txt").write_text(f"[kvtier.tiers]\n{entry}\n")
        return {"type": "plain", "trouble": str(self._file)}

    @property
    def _file(self) -> Path:
        return self.directory / "trouble.json"

    def begin(self, fault: str) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(self._TROUBLE[fault]))
        new.rename(self._file)

    def come_back(self) -> None:
        self._file.unlink(missing_ok=True)


BACKENDS: Sequence[type[Backend]] = (Files, InEngine, Redis, S3, Plain)


def absent(what: str) -> None:
    """Skip where something is not installed; on CI it has to be."""
    if os.environ.get("CI", "").lower() == "true":
        pytest.fail(what)
    pytest.skip(what)


def require(program: str, package: str) -> None:
    """Skip where a program or a package is not installed; on CI it has to be."""
    missing = [name for name in (program,) if name and shutil.which(name) is None]
    missing += [package] if importlib.util.find_spec(package) is None else []
    if missing:
        absent(f"not installed: {', '.join(missing)}")
