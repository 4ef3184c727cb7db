"""The tier passes kvtier's conformance tests on every kind of server and connection."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import hypothesis
import pytest
from redis_servers import GENEROUS_S, Server, TlsServer, is_complete, wait_for

from kvtier.keys import OffloadKey
from kvtier.tiers import SecondaryTier
from kvtier_redis import RedisTier
from kvtier_testing.tiers import Damage, TierConformance


class _OnServers(TierConformance):
    tier = RedisTier
    is_persistent = True
    is_shared = True
    servers: ClassVar[list[Server]]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _started(cls, server: Server) -> None:
        cls.servers = [server]

    def settings(self, place: Path) -> Mapping[str, object]:
        addresses = [f"127.0.0.1:{server.port}" for server in self.servers]
        return {"type": "redis", "addresses": addresses, "key_prefix": place.name, "deadline_s": GENEROUS_S}

    def damage(self, tier: SecondaryTier[Any], place: Path, key: OffloadKey, damage: Damage) -> None:
        found = {}
        for server in self.servers:
            with server.client() as client:
                names = client.scan_iter(f"{place.name}:*:*:*")  # the cache's own keys are shorter
                found.update({name: (server, client.get(name)) for name in names})
        (name,) = [name for name in found if name.endswith(key.hex().encode())]
        server, value = found.pop(name)
        damaged = {
            Damage.FLIPPED: bytes([value[0] ^ 1]) + value[1:],
            Damage.SWAPPED: next(other for _, other in found.values()),
            Damage.CUT: value[: len(value) // 2],
            Damage.EMPTY: b"",
        }
        with server.client() as client:
            client.set(name, damaged[damage])

    @contextmanager
    def slowed(self, tier: SecondaryTier[Any], seconds: float) -> Iterator[None]:
        with ExitStack() as stack:
            for server in self.servers:
                stack.enter_context(server.stopped(seconds))
            yield

    def restart(self, place: Path) -> None:
        for server in self.servers:
            server.kill()
        for server in self.servers:
            server.start()

    def wipe(self, place: Path) -> None:
        for server in self.servers:
            with server.client() as client:
                for name in client.scan_iter(f"{place.name}*", count=1000):
                    client.unlink(name)


class TestOneServer(_OnServers):
    """A Unix socket; the other classes use TCP."""

    def settings(self, place: Path) -> Mapping[str, object]:
        return {**super().settings(place), "addresses": [str(self.servers[0].directory / "socket")]}


class _FewSequences(_OnServers):
    def sequences(self) -> hypothesis.settings:
        return hypothesis.settings(super().sequences(), max_examples=10)


class TestCluster(_FewSequences):
    """A cluster of three."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _started(cls, cluster: list[Server]) -> None:
        cls.servers = cluster

    def settings(self, place: Path) -> Mapping[str, object]:
        return {**super().settings(place), "mode": "cluster"}

    def restart(self, place: Path) -> None:
        super().restart(place)
        wait_for(lambda: all(map(is_complete, self.servers)), "the cluster is complete")


class TestTls(_FewSequences):
    """TLS, and an ACL user with the permissions listed in the README."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _started(cls, tls_server: TlsServer) -> Iterator[None]:
        cls.servers, cls.tls = [tls_server.server], tls_server
        with pytest.MonkeyPatch.context() as patch:
            # Loading the system's certificate authorities would take most of the time of a connection.
            for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
                patch.setenv(name, os.devnull)
            yield

    tls: ClassVar[TlsServer]

    def restart(self, place: Path) -> None:
        self.tls.server.kill()
        self.tls.__enter__()

    def settings(self, place: Path) -> Mapping[str, object]:
        return {**super().settings(place), **self.tls.settings}
