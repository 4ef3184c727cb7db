"""A tier that keeps chunks in one SQLite file."""

import os
import secrets
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import anyio
from pydantic import Field

from kvtier.errors import TierError
from kvtier.keys import OffloadKey
from kvtier.tiers import (
    TRAILER_BYTES,
    Batch,
    Outcome,
    SecondaryTier,
    Size,
    Status,
    TierConfig,
    TierContext,
    in_thread,
)


class ShelfConfig(TierConfig):
    path: Path = Field(description="SQLite file; created if missing.")
    max_bytes: Size = Field(
        default=2**30, description="Maximum bytes of chunks; the oldest are evicted first."
    )


T = TypeVar("T")
_MAKE = "CREATE TABLE IF NOT EXISTS chunks (cache, key, bytes, trailer, UNIQUE (cache, key))"
_PUT = "INSERT OR REPLACE INTO chunks VALUES (?, ?, ?, ?)"
_GET = "SELECT bytes, trailer FROM chunks WHERE cache = ? AND key = ? AND length(bytes) = ?"
_FIND = "SELECT 1 FROM chunks WHERE cache = ? AND key = ?"
_DISCARD = "DELETE FROM chunks WHERE cache = ? AND key = ?"
_RESET = "DELETE FROM chunks WHERE cache = ?"
_EVICT = """DELETE FROM chunks WHERE rowid IN (SELECT rowid FROM chunks ORDER BY rowid DESC LIMIT -1 OFFSET ?)
    RETURNING cache, key"""


class ShelfTier(SecondaryTier[ShelfConfig]):
    Config = ShelfConfig
    medium = "disk"
    _db: Any = None

    async def open(self, context: TierContext) -> None:
        self._context, self._cache = context, context.identity.digest
        self._room = self.config.max_bytes // (context.chunk_bytes + TRAILER_BYTES)
        self._turn = anyio.CapacityLimiter(1)  # The connection accepts one call at a time.
        try:
            await self._call(self._connect)
        except BaseException:  # Also on a cancellation, because kvtier closes only tiers that it opened.
            await self.aclose()
            raise

    async def aclose(self) -> None:
        if self._db is not None:
            await self._call(self._db.close)

    async def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        return await self._call(self._find, keys)

    async def put(self, batch: Batch) -> Outcome:
        return await self._call(self._put, batch, self._cache)

    async def get(self, batch: Batch) -> Outcome:
        return await self._call(self._get, batch)

    async def discard(self, keys: Sequence[OffloadKey]) -> None:
        await self._call(self._delete, _DISCARD, [(self._cache, key) for key in keys])

    async def reset(self) -> None:
        cache = self._context.identity.digest
        old, self._cache = self._cache, cache + secrets.token_bytes(8)  # for this opener only
        await self._call(self._delete, _RESET, [(cache,), (old,)])

    async def _call(self, function: Callable[..., T], *arguments: object) -> T:
        return await in_thread(function, *arguments, limiter=self._turn)

    def _connect(self) -> None:
        try:
            os.close(os.open(self.config.path, os.O_RDWR | os.O_CREAT, 0o600))  # readable by this user only
            self._db = sqlite3.connect(self.config.path, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute(_MAKE)
        except (OSError, sqlite3.Error) as error:
            raise TierError(f"tier {self._context.name}: {self.config.path}: {error}") from error

    def _find(self, keys: Sequence[OffloadKey]) -> list[bool]:
        return [self._db.execute(_FIND, (self._cache, key)).fetchone() is not None for key in keys]

    def _put(self, batch: Batch, cache: bytes) -> Outcome:
        if cache != self._cache:  # A put that started before a reset must not appear after it.
            return Outcome.all(Status.REFUSED, len(batch), "reset")
        chunks = zip(batch.keys, batch.views, batch.trailers, strict=True)
        with self._db:  # One transaction keeps all chunks or none.
            self._db.executemany(_PUT, [(cache, *chunk) for chunk in chunks])
            gone = self._db.execute(_EVICT, (self._room,)).fetchall()
        self._context.removed([key for cache, key in gone if cache == self._cache])
        return Outcome.all(Status.OK, len(batch))

    def _get(self, batch: Batch) -> Outcome:
        statuses = []
        for index, (key, view) in enumerate(zip(batch.keys, batch.views, strict=True)):
            row = self._db.execute(_GET, (self._cache, key, view.nbytes)).fetchone()
            statuses.append(Status.OK if row else Status.ABSENT)
            if row:
                view[:], batch.trailers[index] = row
        return Outcome(statuses)

    def _delete(self, statement: str, rows: list[tuple[object, ...]]) -> None:
        with self._db:
            self._db.executemany(statement, rows)
