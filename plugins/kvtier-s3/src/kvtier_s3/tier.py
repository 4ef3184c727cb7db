"""The S3 tier: each chunk is one object. A put makes no copy, a get makes one."""

from __future__ import annotations

import asyncio
import base64
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Final

import obstore
from obstore.exceptions import AlreadyExistsError

from kvtier.errors import StateError, TierError
from kvtier.keys import OffloadKey
from kvtier.tiers import (
    Batch,
    GuardedLogger,
    Knowledge,
    LogLimit,
    Outcome,
    SecondaryTier,
    Status,
    TierContext,
    Usage,
    in_thread,
    require_answers,
    require_fault,
    until_done,
)
from kvtier_s3._cache import Cache, JoinedCache
from kvtier_s3._errors import REASONS, RENEWING, TRANSIENT, Failure, classify, is_conflict
from kvtier_s3._index import ChunkIndex
from kvtier_s3._layout import chunk_path, parse_key
from kvtier_s3._reading import METADATA, read_as_stored, trailer_of
from kvtier_s3._renewal import Renewal
from kvtier_s3._requests import RequestLimiter
from kvtier_s3._store import Store, describe, make_store, remedy
from kvtier_s3.config import S3Config

_LIST_BATCH: Final = 250  # objects processed between two turns of the event loop
_FIRST_LISTING_WAIT_S: Final = 1.0
_LIST_RETRY_S: Final = 30.0
_LOG_INTERVAL_S: Final = 60.0
_BUCKET_EVERY_S: Final = 10.0
"""Seconds between two checks, after lookups without a hit, that the bucket exists."""

_log = GuardedLogger("kvtier.tiers.s3")
Result = tuple[Status, str]


class S3Tier(SecondaryTier[S3Config]):
    """Stores each chunk as one object of a bucket."""

    Config = S3Config
    reasons = REASONS
    transient = TRANSIENT

    def __init__(self, config: S3Config) -> None:
        super().__init__(config)
        self._cache_or_none: Cache | None = None
        self._prefix: str | None = None  # Prefix of the epoch's chunks. None when closed and during a reset.
        self._listed = asyncio.Event()
        self._lister: asyncio.Task[None] | None = None
        self._renewal: Renewal | None = None
        self._index = ChunkIndex(config.index_keys, config.max_bytes)
        # deletions of chunks, some of which may be done
        self._leaving: dict[OffloadKey, asyncio.Future[None]] = {}
        self._log_limit = LogLimit(_LOG_INTERVAL_S)

    async def open(self, context: TierContext) -> None:
        """Find the bucket and join the cache in it. See ``SecondaryTier.open``.

        Raises:
            TierError: the bucket is unusable; the message names the setting and the remedy.
        """
        self._context = context
        self._reads = RequestLimiter(self.config.max_requests)
        self._writes = RequestLimiter(self.config.max_requests)
        self._reset_lock = asyncio.Lock()
        try:
            self._prefix, self._conditional, self._read_only = await self._join(context)
            self._bucket_seen_s = time.monotonic()
            if self.config.index_keys or self.config.max_bytes is not None:
                self._lister = asyncio.create_task(self._keep_listing())
                await self._wait_for_first_listing()
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Stop listing and release the connections. See ``SecondaryTier.aclose``."""
        lister, renewal = self._lister, self._renewal
        self._prefix = self._cache_or_none = self._lister = self._renewal = None  # they hold connections
        if lister is not None:
            lister.cancel()
            await asyncio.wait((lister,))
        if renewal is not None:
            await renewal.aclose()

    async def _join(self, context: TierContext) -> JoinedCache:
        timeout_s = self.config.open_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                store = await in_thread(make_store, self.config)
                self._cache_or_none = Cache(store, self.config, context)
                self._renewal = Renewal(self._cache_or_none, self.config, context.name)
                return await self._cache.join()
        except TierError as error:
            title = f"tier {context.name}: "
            raise TierError(title + str(error).removeprefix(title)) from None
        except TimeoutError:
            raise TierError(
                f"tier {context.name}: {describe(self.config)} did not answer within open_timeout_s "
                f"({timeout_s:g}); check that it and the source of the credentials can be reached from here"
            ) from None

    async def _wait_for_first_listing(self) -> None:
        if self.config.max_bytes is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_FIRST_LISTING_WAIT_S):
                    await self._listed.wait()

    @property
    def _cache(self) -> Cache:
        if self._cache_or_none is None:
            raise StateError("the S3 tier is not open")
        return self._cache_or_none

    @property
    def _store(self) -> Store:
        return self._cache.store

    def known(self, keys: Sequence[OffloadKey]) -> Sequence[Knowledge]:
        """Return which keys the index knows. See ``SecondaryTier.known``."""
        return self._index.known(keys)

    def usage(self) -> Usage | None:
        """Return the approximate bytes of chunks. See ``SecondaryTier.usage``.

        With ``max_bytes``: of all caches below the prefix. Otherwise: of this cache's epoch.
        """
        return self._index.usage()

    async def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        """Return which keys have an object, even a torn one. See ``SecondaryTier.contains``.

        Known keys cost no request. The others cost one HEAD each. If none exists, a GET checks every few
        seconds whether the bucket exists, because the answer to a HEAD does not show that.
        """
        prefix = self._prefix
        if prefix is None:
            return (False,) * len(keys)
        present = {key for key in keys if key in self._index}
        unknown = [key for key in dict.fromkeys(keys) if key not in present]
        failed: Counter[str] = Counter()
        await self._reads.run(len(unknown), lambda index: self._head(prefix, unknown[index], present, failed))
        if unknown and not failed and present.isdisjoint(unknown) and await self._lacks_bucket():
            failed["no_bucket"] = len(set(keys))
        require_answers(failed, len(set(keys)))
        return [key in present for key in keys]

    async def _head(
        self, prefix: str, key: OffloadKey, present: set[OffloadKey], failed: Counter[str]
    ) -> None:
        try:
            await obstore.head_async(self._store, chunk_path(prefix, key))
        except FileNotFoundError:
            return
        except Exception as error:
            failure = classify(error)
            self._warn("contains", failure)
            failed[failure.reason] += 1
            return
        present.add(key)
        self._add(prefix, key)

    async def _lacks_bucket(self) -> bool:
        """Return whether the store reports the bucket as missing. If it exists, ask again later."""
        if time.monotonic() < self._bucket_seen_s + _BUCKET_EVERY_S:
            return False
        try:
            manifest = await obstore.get_async(self._store, self._cache.layout.manifest)
            await manifest.bytes_async()  # Reads the body, because otherwise the connection is lost.
        except Exception as error:
            failure = classify(error)
            if failure.reason == "no_bucket":
                self._warn("contains", failure)
                return True
        self._bucket_seen_s = time.monotonic()
        return False

    async def put(self, batch: Batch) -> Outcome:
        """Put the chunks that the index lacks. See ``SecondaryTier.put``."""
        prefix = self._prefix
        if prefix is None:
            return Outcome.all(Status.REFUSED, len(batch), "reset")
        if self._read_only:
            return Outcome.all(Status.REFUSED, len(batch), "read_only")
        results: list[Result] = [(Status.FAILED, "")] * len(batch)

        async def put_one(index: int) -> None:
            results[index] = await self._put_one(prefix, batch, index)

        # obstore reads the slots until a request ends, even after a cancellation.
        await self._writes.run_drained(len(batch), put_one)
        if prefix != self._prefix:  # A reset came in between, so no tier reads this prefix.
            return Outcome.all(Status.REFUSED, len(batch), "reset")
        return _outcome(results)

    async def get(self, batch: Batch) -> Outcome:
        """Get chunks into their slots. See ``SecondaryTier.get``."""
        prefix = self._prefix
        if prefix is None:
            return Outcome.all(Status.ABSENT, len(batch))
        results: list[Result] = [(Status.FAILED, "")] * len(batch)

        async def get_one(index: int) -> None:
            results[index] = await self._get_one(prefix, batch, index)

        # obstore does not know the slots. They are written here, and not after a cancellation.
        await self._reads.run(len(batch), get_one)
        if prefix != self._prefix:
            return Outcome.all(Status.ABSENT, len(batch))
        return _outcome(results)

    async def _put_one(self, prefix: str, batch: Batch, index: int) -> Result:
        key, view = batch.keys[index], batch.views[index]
        if key in self._leaving:  # A conditional put would find the object that is being deleted.
            await asyncio.wait((self._leaving[key],))
        if key in self._index:
            return Status.OK, ""
        if reason := self._index.reserve(view.nbytes):
            return Status.REFUSED, reason
        is_new = False
        try:
            is_new = await self._send(chunk_path(prefix, key), view, batch.trailers[index])
        # Includes a panic of the client, which must not end concurrent requests.
        except BaseException as error:
            require_fault(error)
            failure = classify(error)
            self._warn("put", failure)
            return Status.REFUSED if failure.reason == "full" else Status.FAILED, failure.reason
        finally:
            self._index.end_reservation(view.nbytes, added=is_new)
        self._add(prefix, key)
        return Status.OK, ""

    async def _send(self, path: str, view: memoryview, trailer: bytes) -> bool:
        """Put one object; return whether it is new."""
        try:
            await obstore.put_async(
                self._store,
                path,
                view,
                attributes={METADATA: base64.b64encode(trailer).decode()},
                mode="create" if self._conditional else "overwrite",
                use_multipart=False,
            )
        except AlreadyExistsError as error:
            if is_conflict(error):
                raise
            return False
        return True

    async def _get_one(self, prefix: str, batch: Batch, index: int) -> Result:
        key, view = batch.keys[index], batch.views[index]
        path = chunk_path(prefix, key)
        try:
            result = await obstore.get_async(self._store, path)
            _, nbytes = result.range  # Gets the whole object, because result.meta costs more time.
            if nbytes == view.nbytes:
                batch.trailers[index] = trailer_of(result)
                view[:] = memoryview(await result.bytes_async())
                return Status.OK, ""
        except Exception as error:
            failure = classify(error)
            if isinstance(error, FileNotFoundError) and failure.reason != "no_bucket":
                self._remove(prefix, [key])
                return Status.ABSENT, ""
            self._warn("get", failure)
            return Status.FAILED, failure.reason
        return Status.CORRUPT, "torn"

    async def reread(self, batch: Batch) -> Outcome:
        """Get chunks and check them against the store's own digests. See ``SecondaryTier.reread``."""
        prefix = self._prefix
        results: list[Result] = [(Status.FAILED, "")] * len(batch)

        async def get_one(index: int) -> None:
            if prefix is not None:
                path = chunk_path(prefix, batch.keys[index])
                results[index] = await read_as_stored(self._store, path, batch, index), ""

        await self._reads.run(len(batch), get_one)
        return _outcome(results)

    async def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Delete the objects of ``keys``. See ``SecondaryTier.discard``."""
        prefix = self._prefix
        if prefix is None or not keys:
            return
        if self._read_only:
            self._warn("discard", Failure("read_only"))
            return
        self._index.remove(keys, self._context.chunk_bytes)
        paths = [chunk_path(prefix, key) for key in dict.fromkeys(keys)]
        earlier = {self._leaving[key] for key in keys if key in self._leaving}
        leaving = asyncio.ensure_future(self._delete(paths, earlier))
        self._leaving.update(dict.fromkeys(keys, leaving))
        try:
            await until_done(leaving)  # A request that arrives late would delete an object that is put next.
        finally:
            self._leaving = {key: it for key, it in self._leaving.items() if not it.done()}

    async def _delete(self, paths: list[str], earlier: Collection[asyncio.Future[None]]) -> None:
        """Delete objects after earlier deletions have ended. A put waits for the last deletion of its key."""
        if earlier:
            await asyncio.wait(earlier)
        if self.config.provider == "s3":  # Missing objects cause no error, so that a request can name many.
            await self._delete_some(paths)
        else:  # Not counted as a write, because writes may wait for this.
            await self._reads.run(len(paths), lambda index: self._delete_some([paths[index]]))

    async def _delete_some(self, paths: list[str]) -> None:
        try:
            await obstore.delete_async(self._store, paths)
        except Exception as error:
            failure = classify(error)
            if not isinstance(error, FileNotFoundError) or failure.reason == "no_bucket":
                self._warn("discard", failure)

    async def reset(self) -> None:
        """Start a new epoch. See ``SecondaryTier.reset``.

        Raises:
            TierError: the new epoch could not be stored. The tier finds and accepts no chunks until a reset
                succeeds or it is opened again. After a reopening it may find chunks put before the reset.
        """
        async with self._reset_lock:
            await until_done(self._reset())

    async def _reset(self) -> None:
        self._prefix = None
        self._index.clear()
        self._prefix = await self._cache.advance()

    async def _keep_listing(self) -> None:
        while True:
            pause_s = self.config.list_every_s
            try:
                await self._list()
            except BaseException as error:  # A panic of the client is not an Exception.
                require_fault(error)
                self._warn("list", classify(error))
                pause_s = min(pause_s, _LIST_RETRY_S)
            await asyncio.sleep(pause_s)

    async def _list(self) -> None:
        """List the objects below the configured prefix if there is a bound, else only those of this epoch."""
        prefix = self._prefix
        if prefix is None:
            return
        is_bounded = self.config.max_bytes is not None
        scope = self._cache.layout.all_chunks if is_bounded else prefix
        listing = self._index.start_listing()
        async for objects in obstore.list(self._store, scope, chunk_size=_LIST_BATCH):
            for found in objects:
                is_mine = not is_bounded or found["path"].startswith(f"{prefix}/")
                listing.add(parse_key(found["path"]) if is_mine else None, found["size"])
            if not is_bounded and listing.is_full:
                break
        gone = self._index.finish_listing(listing)
        self._listed.set()
        if gone:
            self._context.removed(gone)

    def _add(self, prefix: str, key: OffloadKey) -> None:
        if prefix == self._prefix and key not in self._leaving:
            self._index.add(key)

    def _remove(self, prefix: str, keys: Sequence[OffloadKey]) -> None:
        """Record and report chunks that left without a discard."""
        if prefix == self._prefix and (gone := self._index.remove(keys, self._context.chunk_bytes)):
            self._context.removed(gone)

    def _warn(self, verb: str, failure: Failure) -> None:
        if failure.reason in RENEWING and self._renewal is not None:
            self._renewal.start()
        repeats = self._log_limit.allow(f"{verb} {failure.reason}", time.monotonic())
        if repeats is not None:
            what = f"; {remedy(self.config, failure)}" if failure.reason == "no_bucket" else ""
            _log.warning("tier %s: %s failed: %s%s%s", self._context.name, verb, failure, what, repeats)


def _outcome(results: Sequence[Result]) -> Outcome:
    return Outcome([status for status, _ in results], Counter(reason for _, reason in results if reason))
