"""The client without the tier, for ``kvtier bench tier``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import obstore

from kvtier.tiers.drain import in_thread
from kvtier_bench.bare import BareClient
from kvtier_s3.config import S3Config
from kvtier_s3.stores import make_store


class BareS3(BareClient[S3Config]):
    """obstore as its documentation shows it: one task for each object, all of them at once."""

    async def open(self) -> None:
        """Make the client, with the tier's own settings of it."""
        self._store = await in_thread(make_store, self.config)

    async def put(self, names: Sequence[str], chunks: Sequence[memoryview]) -> None:
        """Put each chunk as an object."""
        pairs = zip(names, chunks, strict=True)
        await asyncio.gather(*(self._put(name, chunk) for name, chunk in pairs))

    async def get(self, names: Sequence[str], chunks: Sequence[memoryview]) -> None:
        """Get each object and copy it to where it is wanted."""
        pairs = zip(names, chunks, strict=True)
        await asyncio.gather(*(self._get(name, chunk) for name, chunk in pairs))

    async def discard(self, names: Sequence[str]) -> None:
        """Delete the objects."""
        await obstore.delete_async(self._store, [self._path(name) for name in names])

    async def _put(self, name: str, chunk: memoryview) -> None:
        await obstore.put_async(self._store, self._path(name), chunk, use_multipart=False)

    async def _get(self, name: str, chunk: memoryview) -> None:
        result = await obstore.get_async(self._store, self._path(name))
        chunk[:] = memoryview(await result.bytes_async())

    def _path(self, name: str) -> str:
        return f"{self.config.prefix}/bare/{name}"
