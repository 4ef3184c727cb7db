"""redis-py by itself, what ``kvtier bench tier`` measures the tier against."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from redis.asyncio import BlockingConnectionPool, Connection, Redis, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.cluster import ClusterNode, RedisCluster

from kvtier_bench.bare import BareClient
from kvtier_redis.config import RedisConfig
from kvtier_redis.control import find
from kvtier_redis.dial import Dialer


class RedisPy(BareClient[RedisConfig]):
    """redis-py on asyncio, with hiredis where that is installed: a SET or a GET for each chunk.

    It has as many connections as the tier has for gets or puts.
    """

    async def open(self) -> None:
        """Connect. See ``BareClient.open``."""
        dialer = Dialer(self.config, "kvtier-bench-bare")
        servers = await asyncio.to_thread(find, self.config, dialer)
        options = dialer.options()
        if servers.by_slot:
            nodes = [ClusterNode(address.host, address.port) for address in servers.addresses]
            del options["db"]
            ssl = {"ssl": True, **dialer.tls_options()} if self.config.tls else {}
            self._client: Any = RedisCluster(
                startup_nodes=nodes, max_connections=self.config.connections, **options, **ssl
            )
            return
        (address,) = servers.addresses
        kind: type[Any] = SSLConnection if self.config.tls else Connection
        if address.path:
            kind, options["path"] = UnixDomainSocketConnection, address.path
        else:
            options |= {"host": address.host, "port": address.port}
            options |= dialer.tls_options() if self.config.tls else {}
        pool = BlockingConnectionPool(
            max_connections=self.config.connections, timeout=None, connection_class=kind, **options
        )
        self._client = Redis(connection_pool=pool)

    async def put(self, names: Sequence[str], chunks: Sequence[memoryview]) -> None:
        """Store chunks. See ``BareClient.put``."""
        await asyncio.gather(
            *(
                self._client.set(self._name(name), chunk, ex=self.config.ttl_s)
                for name, chunk in zip(names, chunks, strict=True)
            )
        )

    async def get(self, names: Sequence[str], chunks: Sequence[memoryview]) -> None:
        """Fetch chunks. See ``BareClient.get``."""
        await asyncio.gather(*(self._get(name, chunk) for name, chunk in zip(names, chunks, strict=True)))

    async def discard(self, names: Sequence[str]) -> None:
        """Remove chunks. See ``BareClient.discard``."""
        await asyncio.gather(*(self._client.unlink(self._name(name)) for name in names))

    async def aclose(self) -> None:
        """Hang up. See ``BareClient.aclose``."""
        if hasattr(self, "_client"):
            await self._client.aclose()
            if isinstance(self._client, Redis):
                await self._client.connection_pool.aclose()

    async def _get(self, name: str, chunk: memoryview) -> None:
        value = await self._client.get(self._name(name))
        chunk[:] = value

    def _name(self, name: str) -> str:
        return f"{self.config.key_prefix}:bench:{name}"
