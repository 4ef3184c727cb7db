"""A real server for the whole session, a bucket, and a proxy that injects faults."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import ceph
import obstore
import pytest
from proxy import Faults, Proxy
from rigs import Place

from kvtier_testing.tiers._servers import absent


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ceph.Ceph]:
    """Ceph's object gateway. If it is missing, the tests are skipped; on CI they fail."""
    if missing := ceph.missing():
        why = f"no S3 server: {', '.join(missing)} not found; as root: apt-get install "
        absent(why + f"--no-install-recommends {' '.join(ceph.PACKAGES)}")
    with ceph.Ceph(tmp_path_factory.mktemp("ceph") / "server") as server:
        yield server


@pytest.fixture(scope="session")
def bucket(server: ceph.Ceph) -> str:
    """A bucket for all tests; each has its own prefix."""
    name = f"tests-{uuid.uuid4().hex[:12]}"
    server.make_bucket(name)
    return name


@pytest.fixture(scope="session")
def proxy(server: ceph.Ceph) -> Iterator[Proxy]:
    with Proxy(int(server.endpoint.rpartition(":")[2])) as proxy:
        yield proxy


@pytest.fixture
def place(server: ceph.Ceph, bucket: str, proxy: Proxy) -> Iterator[Place]:
    """An unused prefix. Afterwards the proxy injects no faults."""
    server.revive()
    place = Place(server, bucket, uuid.uuid4().hex[:12], proxy)
    yield place
    proxy.be(Faults())
    if paths := place.paths():
        obstore.delete(place.store, paths)
