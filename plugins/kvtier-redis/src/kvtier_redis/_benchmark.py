"""The reference client of ``kvtier bench tier``: redis-py without the tier."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster

from kvtier_bench.storage.bare import BareClient
from kvtier_redis._client import ClientFactory
from kvtier_redis._control import discover
from kvtier_redis.config import RedisConfig


class RedisPyClient(BareClient[RedisConfig]):
    """redis-py on asyncio, with hiredis if it is installed: one SET or GET per chunk.

    It uses as many connections as the tier does for gets or puts.
    """

    _client: Any = None

    async def open(self) -> None:
        """Connect. See ``BareClient.open``."""
        factory = ClientFactory(self.config, "kvtier-bench-reference")
        topology = await asyncio.to_thread(discover, self.config, factory)
        options = factory.options()
        if topology.by_slot:
            del options["db"]
            self._client = RedisCluster(
                startup_nodes=[ClusterNode(address.host, address.port) for address in topology.addresses],
                max_connections=self.config.connections,
                ssl=self.config.tls,
                **options,
            )
            return
        (address,) = topology.addresses
        scheme = "unix" if address.path else "rediss" if self.config.tls else "redis"
        pool = BlockingConnectionPool.from_url(
            f"{scheme}://{address}", max_connections=self.config.connections, timeout=None, **options
        )
        self._client = Redis.from_pool(pool)

    async def put(self, names: Sequence[str], chunks: Sequence[memoryview]) -> None:
        """Store chunks. See ``BareClient.put``."""
        pairs = zip(names, chunks, strict=True)
        ttl_s = self.config.ttl_s
        await asyncio.gather(*(self._client.set(self._key(name), chunk, ex=ttl_s) for name, chunk in pairs))

    async def get(self, names: Sequence[str], chunks: Sequence[memoryview]) -> None:
        """Fetch chunks. See ``BareClient.get``."""
        await asyncio.gather(*(self._get(name, chunk) for name, chunk in zip(names, chunks, strict=True)))

    async def discard(self, names: Sequence[str]) -> None:
        """Remove chunks. See ``BareClient.discard``."""
        await asyncio.gather(*(self._client.unlink(self._key(name)) for name in names))

    async def aclose(self) -> None:
        """Disconnect. See ``BareClient.aclose``."""
        if self._client is not None:
            await self._client.aclose()

    async def _get(self, name: str, chunk: memoryview) -> None:
        chunk[:] = await self._client.get(self._key(name))

    def _key(self, name: str) -> str:
        return f"{self.config.key_prefix}:bench:{name}"
