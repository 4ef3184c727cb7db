"""Real servers. Tests share those with session scope and must not disturb them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis_servers
from hypothesis import HealthCheck, settings
from redis_servers import Server, TlsServer

settings.register_profile(
    "kvtier", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kvtier")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("redis")
    with Server(folder, f"--unixsocket {folder}/socket --maxmemory 2gb") as server:
        yield server


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    with redis_servers.cluster(tmp_path_factory.mktemp("cluster")) as servers:
        yield servers


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """A server for a single test, which may disturb it."""
    with Server(tmp_path / "own") as server:
        yield server


@pytest.fixture(scope="session")
def tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    with TlsServer(tmp_path_factory.mktemp("tls")) as server:
        yield server
