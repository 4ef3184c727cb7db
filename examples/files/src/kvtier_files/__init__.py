"""A tier that keeps each chunk in its own file, through aiofiles."""

import os
import secrets
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import aiofiles
import aiofiles.os
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
    Usage,
    in_thread,
    until_done,
)


class FilesConfig(TierConfig):
    path: Path = Field(description="Directory; created if missing, readable by this user only.")
    max_bytes: Size = Field(
        default=2**30, description="Maximum bytes of chunks; the oldest are evicted first."
    )


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)  # readable by this user only


class FilesTier(SecondaryTier[FilesConfig]):
    Config = FilesConfig
    medium = "disk"

    async def open(self, context: TierContext) -> None:
        self._context, self._file_bytes = context, context.chunk_bytes + TRAILER_BYTES
        if self._file_bytes > self.config.max_bytes:
            raise TierError(
                f"tier {context.name}: max_bytes is {self.config.max_bytes}, and a chunk needs "
                f"{self._file_bytes}: raise max_bytes"
            )
        self._chunks = self.config.path / context.identity.digest.hex()
        self._unfinished = self.config.path / "unfinished"
        self._naming = anyio.Lock()  # Chunks are renamed into place one at a time, and never during a reset.
        try:
            self._used_bytes = await in_thread(self._prepare)
        except OSError as error:
            raise TierError(f"tier {context.name}: {self.config.path}: {error}") from error

    def usage(self) -> Usage:
        return Usage(self._used_bytes, self.config.max_bytes)

    async def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        return await in_thread(self._find, self._chunks, keys)

    async def put(self, batch: Batch) -> Outcome:
        chunks, statuses = self._chunks, list[Status]()
        for key, view, trailer in zip(batch.keys, batch.views, batch.trailers, strict=True):
            statuses.append(await until_done(self._write(chunks / key.hex(), view, trailer)))
        refused = statuses.count(Status.REFUSED)
        return Outcome(statuses, {"reset": refused} if refused else {})

    async def get(self, batch: Batch) -> Outcome:
        return Outcome([await until_done(self._read(batch, index)) for index in range(len(batch))])

    async def discard(self, keys: Sequence[OffloadKey]) -> None:
        await in_thread(self._delete, [self._chunks / key.hex() for key in keys])

    async def reset(self) -> None:
        cache = self._context.identity.digest.hex()
        async with self._naming:
            old, self._chunks = self._chunks, self.config.path / f"{cache}-{secrets.token_hex(8)}"
            # The new namespace is only for this opener. An earlier reset may have failed to hide the shared
            # one.
            await in_thread(self._remove, {self.config.path / cache, old})

    async def _write(self, target: Path, view: memoryview, trailer: bytes) -> Status:
        unfinished = self._unfinished / secrets.token_hex(16)
        try:
            async with aiofiles.open(unfinished, "xb", opener=_private) as file:
                await file.write(trailer)
                await file.write(view)
            return await self._name(unfinished, target)
        finally:
            with suppress(FileNotFoundError):  # the usual case: the file was renamed into place
                await aiofiles.os.unlink(unfinished)

    async def _name(self, unfinished: Path, target: Path) -> Status:
        """Rename a complete file into place, so that a failed or killed put leaves no partial chunk."""
        async with self._naming:
            if target.parent != self._chunks:  # A put that started before a reset must not appear after it.
                return Status.REFUSED
            if self._used_bytes + self._file_bytes > self.config.max_bytes:
                self._context.removed(await in_thread(self._evict))
            # The directory is missing before the first put, and after another engine's reset.
            await aiofiles.os.makedirs(target.parent, 0o700, exist_ok=True)
            if not await aiofiles.os.path.exists(target):
                self._used_bytes += self._file_bytes
            await aiofiles.os.replace(unfinished, target)
            return Status.OK

    async def _read(self, batch: Batch, index: int) -> Status:
        try:
            async with aiofiles.open(self._chunks / batch.keys[index].hex(), "rb") as file:
                batch.trailers[index] = await file.read(TRAILER_BYTES)
                count = await file.readinto(batch.views[index])
        except FileNotFoundError:
            return Status.ABSENT
        return Status.OK if count == batch.views[index].nbytes else Status.CORRUPT

    def _prepare(self) -> int:
        """Create the directories; return the number of bytes used."""
        self.config.path.mkdir(0o700, parents=True, exist_ok=True)
        self._unfinished.mkdir(0o700, exist_ok=True)
        return sum(size for _, size, _ in self._stored())

    def _stored(self) -> list[tuple[int, int, Path]]:
        """Return the modification time, size and path of each file."""
        found = []
        for path in self.config.path.glob("*/*"):
            with suppress(FileNotFoundError):  # another engine has evicted it
                stat = path.stat()
                found.append((stat.st_mtime_ns, stat.st_size, path))
        return found

    def _evict(self) -> list[OffloadKey]:
        """Delete the oldest files until an eighth is free; return the keys of this cache's deleted chunks."""
        oldest_first = sorted(self._stored())
        self._used_bytes = sum(size for _, size, _ in oldest_first)
        most_bytes = min(self.config.max_bytes * 7 // 8, self.config.max_bytes - self._file_bytes)
        gone = []
        for _, size, path in oldest_first:
            if self._used_bytes <= most_bytes:
                break
            self._delete([path])
            self._used_bytes -= size
            if path.parent == self._chunks:
                gone.append(OffloadKey(bytes.fromhex(path.name)))
        return gone

    def _remove(self, directories: Iterable[Path]) -> None:
        """Hide directories by a rename that survives a loss of power; then delete them."""
        hidden = {path: path.with_name(f"removed-{secrets.token_hex(8)}") for path in directories}
        for path, target in hidden.items():
            with suppress(FileNotFoundError):  # nothing was put
                path.rename(target)
        directory = os.open(self.config.path, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        for target in hidden.values():
            shutil.rmtree(target, ignore_errors=True)  # The remaining files are evicted later.

    @staticmethod
    def _find(chunks: Path, keys: Sequence[OffloadKey]) -> list[bool]:
        return [(chunks / key.hex()).exists() for key in keys]

    @staticmethod
    def _delete(paths: Iterable[Path]) -> None:
        for path in paths:
            path.unlink(missing_ok=True)
