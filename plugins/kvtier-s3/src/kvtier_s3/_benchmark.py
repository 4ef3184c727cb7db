"""The reference client of ``kvtier bench tier``: obstore without the tier."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import obstore

from kvtier.tiers import in_thread
from kvtier_bench.storage.bare import BareClient
from kvtier_s3._store import make_store
from kvtier_s3.config import S3Config


class ObstoreClient(BareClient[S3Config]):
    """obstore used as its documentation shows: one task per object, all at once."""

    async def open(self) -> None:
        """Make the store, with the tier's settings. See ``BareClient.open``."""
        self._store = await in_thread(make_store, self.config)

    async def put(self, names: Sequence[str], chunks: Sequence[memoryview]) -> None:
        """Put each chunk as an object. See ``BareClient.put``."""
        await asyncio.gather(
            *(
                obstore.put_async(self._store, self._path(name), chunk, use_multipart=False)
                for name, chunk in zip(names, chunks, strict=True)
            )
        )

    async def get(self, names: Sequence[str], chunks: Sequence[memoryview]) -> None:
        """Get each object and copy it into its chunk. See ``BareClient.get``."""
        await asyncio.gather(*(self._get(name, chunk) for name, chunk in zip(names, chunks, strict=True)))

    async def discard(self, names: Sequence[str]) -> None:
        """Delete the objects. See ``BareClient.discard``."""
        await obstore.delete_async(self._store, [self._path(name) for name in names])

    async def _get(self, name: str, chunk: memoryview) -> None:
        result = await obstore.get_async(self._store, self._path(name))
        chunk[:] = memoryview(await result.bytes_async())

    def _path(self, name: str) -> str:
        return f"{self.config.prefix}/bare/{name}"
