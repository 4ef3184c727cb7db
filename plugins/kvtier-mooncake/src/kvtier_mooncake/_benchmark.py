"""The reference client of ``kvtier bench tier``: Mooncake's own client without the tier."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Sequence
from typing import Any

from kvtier_bench.storage.bare import BareClient
from kvtier_mooncake._store import library, own_address, setup_arguments
from kvtier_mooncake.config import MooncakeConfig


class BareMooncake(BareClient[MooncakeConfig]):
    """Mooncake's client on registered memory: one call for each batch of chunks, in a thread."""

    _client: Any = None

    async def open(self) -> None:
        """Connect. See ``BareClient.open``."""
        self._registered: set[int] = set()
        await asyncio.to_thread(self._connect)

    def _connect(self) -> None:
        self._client = library().MooncakeDistributedStore()
        here = own_address(self.config.master_address)
        if code := self._client.setup(*setup_arguments(self.config, here)):
            raise OSError(f"Mooncake's client does not start (code {code})")

    async def put(self, names: Sequence[str], chunks: Sequence[memoryview]) -> None:
        """Store chunks. See ``BareClient.put``."""
        await asyncio.to_thread(self._move, self._client.batch_put_from, names, chunks, 0)

    async def get(self, names: Sequence[str], chunks: Sequence[memoryview]) -> None:
        """Fetch chunks. See ``BareClient.get``."""
        await asyncio.to_thread(self._move, self._client.batch_get_into, names, chunks, self.chunk_bytes)

    async def discard(self, names: Sequence[str]) -> None:
        """Remove chunks. See ``BareClient.discard``."""
        await asyncio.to_thread(self._client.batch_remove, self._keys(names), True)

    async def aclose(self) -> None:
        """Disconnect. See ``BareClient.aclose``."""
        if self._client is not None:
            await asyncio.to_thread(self._client.close)

    def _move(self, call: Any, names: Sequence[str], chunks: Sequence[memoryview], expected: int) -> None:
        addresses = [ctypes.addressof(ctypes.c_char.from_buffer(chunk)) for chunk in chunks]
        for address in addresses:
            if address not in self._registered:
                self._client.register_buffer(address, self.chunk_bytes)
                self._registered.add(address)
        codes = call(self._keys(names), addresses, [self.chunk_bytes] * len(chunks))
        if failed := [code for code in codes if code != expected]:
            raise OSError(f"{len(failed)} of {len(codes)} chunks failed (code {failed[0]})")

    def _keys(self, names: Sequence[str]) -> list[str]:
        return [f"{self.config.key_prefix}/bench/{name}" for name in names]
