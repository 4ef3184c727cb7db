"""The tier: each chunk an object, put without a copy and got with one."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

import obstore
from obstore.exceptions import AlreadyExistsError

from kvtier.errors import StateError, TierError
from kvtier.keys import OffloadKey
from kvtier.tiers.base import Batch, Knowledge, Outcome, SecondaryTier, Status, TierContext, Usage
from kvtier.tiers.drain import in_thread, until_done
from kvtier.tiers.faults import require_fault
from kvtier_s3.cache import Cache, Joined
from kvtier_s3.config import S3Config
from kvtier_s3.faults import REASONS, TRANSIENT, Fault, fault_of, is_conflict
from kvtier_s3.holdings import Holdings
from kvtier_s3.lane import Lane
from kvtier_s3.layout import chunk_name, key_of
from kvtier_s3.stores import Store, make_store, where

TRAILER: Final = "kvtier"
"""The object's metadata that holds what proves the chunk, base64: its checksum, key and cache."""

_PAGE: Final = 1000  # objects that one request lists
_QUESTIONS_A_PAGE: Final = 100  # a page takes as long as so many questions after single objects
_LISTED_AT_ONCE: Final = 250
_FIRST_COUNT_PATIENCE_S: Final = 1.0
_LIST_AGAIN_S: Final = 30.0
_PARTS_AT_ONCE: Final = 4
_QUIET_S: Final = 60.0

_log = logging.getLogger("kvtier.tiers.s3")


class S3Tier(SecondaryTier[S3Config]):
    """Keeps each chunk as one object of a bucket."""

    Config = S3Config
    medium = "remote"
    reasons = REASONS
    transient = TRANSIENT

    def __init__(self, config: S3Config) -> None:
        super().__init__(config)
        self._cache_or_none: Cache | None = None
        self._place: str | None = None
        self._counted = asyncio.Event()
        self._lister: asyncio.Task[None] | None = None
        self._holdings = Holdings(config.index_keys, config.max_bytes)
        self._complaints = Complaints()

    # --------------------------------------------------------------------------- coming and going

    async def open(self, context: TierContext) -> None:
        """Find the bucket and the cache in it. See ``SecondaryTier.open``.

        Raises:
            TierError: the bucket cannot be used; the message names the setting and what to do.
        """
        self._context = context
        self._reads = Lane(self.config.max_requests)
        self._writes = Lane(self.config.max_requests)
        self._resetting = asyncio.Lock()
        joined = await self._join(context)
        self._conditional, self._read_only = joined.conditional_puts, joined.read_only
        self._place = joined.place
        if self.config.index_keys or self.config.max_bytes is not None:
            self._lister = asyncio.get_running_loop().create_task(self._keep_listing())
            try:
                await self._wait_for_the_first_count()
            except BaseException:
                await self.aclose()
                raise

    async def aclose(self) -> None:
        """Give the connections back. See ``SecondaryTier.aclose``."""
        lister, self._lister = self._lister, None
        self._place = self._cache_or_none = None
        if lister is not None:
            lister.cancel()
            await asyncio.wait((lister,))

    async def _join(self, context: TierContext) -> Joined:
        timeout = self.config.open_timeout_s
        try:
            async with asyncio.timeout(timeout):
                store = await in_thread(make_store, self.config)
                self._cache_or_none = Cache(store, self.config, context)
                return await self._cache.join()
        except TierError as error:
            title = f"tier {context.name}: "
            raise TierError(title + str(error).removeprefix(title)) from None
        except TimeoutError:
            raise TierError(
                f"tier {context.name}: {where(self.config)} has not answered within open_timeout_s "
                f"({timeout:g}); see that it and whatever gives the credentials can be reached from here"
            ) from None

    async def _wait_for_the_first_count(self) -> None:
        if self.config.max_bytes is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_FIRST_COUNT_PATIENCE_S):
                    await self._counted.wait()

    @property
    def _cache(self) -> Cache:
        if self._cache_or_none is None:
            raise StateError("the tier is not open")
        return self._cache_or_none

    @property
    def _store(self) -> Store:
        return self._cache.store

    # ------------------------------------------------------------------------------------ questions

    def known(self, keys: Sequence[OffloadKey]) -> Sequence[Knowledge]:
        """Say which keys are there as far as is known. See ``SecondaryTier.known``."""
        return self._holdings.known(keys)

    def usage(self) -> Usage | None:
        """Say how many bytes of chunks there are: of all caches below the prefix where max_bytes is set,
        else of this one's. About right. See ``SecondaryTier.usage``."""
        return self._holdings.usage()

    async def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        """Say which keys have an object, be it torn: a get finds that. See ``SecondaryTier.contains``.

        What is known costs nothing. The rest is asked for one by one, many at once; where a listing of the
        epoch needs far fewer requests it comes first.
        """
        place = self._place
        if place is None:
            return (False,) * len(keys)
        there = {key for key in keys if key in self._holdings}
        asked = [key for key in dict.fromkeys(keys) if key not in there]
        pages = len(asked) // _QUESTIONS_A_PAGE
        if pages > len(self._holdings) // _PAGE:
            listed, is_whole = await self._list_some(place, pages)
            there |= listed
            asked = [] if is_whole else [key for key in asked if key not in listed]
        await self._reads.each(len(asked), lambda number: self._ask(place, asked[number], there))
        return [key in there for key in keys]

    async def _ask(self, place: str, key: OffloadKey, there: set[OffloadKey]) -> None:
        try:
            await obstore.head_async(self._store, chunk_name(place, key))
        except FileNotFoundError:
            return
        except Exception as error:
            self._complain("a question", fault_of(error))
            return
        there.add(key)
        self._found(place, key)

    async def _list_some(self, place: str, pages: int) -> tuple[set[OffloadKey], bool]:
        """List the chunks of an epoch; say which are there, and whether these are all."""
        listed: set[OffloadKey] = set()
        try:
            async for objects in obstore.list(self._store, place, chunk_size=_PAGE):
                for found in objects:
                    key = key_of(found["path"])
                    if key is not None:
                        listed.add(key)
                        self._found(place, key)
                pages -= 1
                if not pages:
                    return listed, len(objects) < _PAGE
        except Exception as error:
            self._complain("a listing", fault_of(error))
            return listed, False
        return listed, True

    # ------------------------------------------------------------------------------------ transfers

    async def put(self, batch: Batch) -> Outcome:
        """Put the chunks that are not known to be there. See ``SecondaryTier.put``."""
        place = self._place
        if place is None:
            return Outcome.all(Status.REFUSED, len(batch), "reset")
        if self._read_only:
            return Outcome.all(Status.REFUSED, len(batch), "read_only")
        results = Results(len(batch))

        async def put_one(index: int) -> None:
            results.note(index, *await self._put_one(place, batch, index))

        # The client reads the slots until it says that it has done with them, cancelled or not.
        await self._writes.each_to_its_end(len(batch), put_one)
        if place != self._place:  # they are where nobody will look
            return Outcome.all(Status.REFUSED, len(batch), "reset")
        return results.outcome()

    async def get(self, batch: Batch) -> Outcome:
        """Get chunks into their slots. See ``SecondaryTier.get``."""
        place = self._place
        if place is None:
            return Outcome.all(Status.ABSENT, len(batch))
        results = Results(len(batch))

        async def get_one(index: int) -> None:
            results.note(index, *await self._get_one(place, batch, index))

        # The client does not know the slots: they are written here, and not once this was cancelled.
        await self._reads.each(len(batch), get_one)
        if place != self._place:
            return Outcome.all(Status.ABSENT, len(batch))
        return results.outcome()

    async def _put_one(self, place: str, batch: Batch, index: int) -> tuple[Status, str]:
        key, view = batch.keys[index], batch.views[index]
        if key in self._holdings:
            return Status.OK, ""
        if reason := self._holdings.reserve(view.nbytes):
            return Status.REFUSED, reason
        is_new = False
        try:
            is_new = await self._send(chunk_name(place, key), view, batch.trailers[index])
        except Exception as error:
            fault = fault_of(error)
            self._complain("a put", fault)
            return Status.REFUSED if fault.word == "full" else Status.FAILED, fault.word
        finally:
            self._holdings.settle(view.nbytes, added=is_new)
        self._found(place, key)
        return Status.OK, ""

    async def _send(self, path: str, view: memoryview, trailer: bytes) -> bool:
        """Put one object; say whether it is new."""
        attributes = {TRAILER: base64.b64encode(trailer).decode()}
        if view.nbytes > self.config.part_bytes:
            return await self._send_parts(path, view, attributes)
        try:
            await obstore.put_async(
                self._store,
                path,
                view,
                attributes=attributes,
                mode="create" if self._conditional else "overwrite",
                use_multipart=False,
            )
        except AlreadyExistsError as error:
            if is_conflict(error):
                raise
            return False
        return True

    async def _send_parts(self, path: str, view: memoryview, attributes: dict[str, str]) -> bool:
        """Put one object in parts. That cannot be conditional, so it is asked before."""
        with suppress(FileNotFoundError):
            found = await obstore.head_async(self._store, path)
            if found["size"] == view.nbytes:
                return False
        await obstore.put_async(
            self._store,
            path,
            _parts(view, self.config.part_bytes),
            attributes=attributes,
            use_multipart=True,
            chunk_size=self.config.part_bytes,
            max_concurrency=_PARTS_AT_ONCE,
        )
        return True

    async def _get_one(self, place: str, batch: Batch, index: int) -> tuple[Status, str]:
        key, view = batch.keys[index], batch.views[index]
        path = chunk_name(place, key)
        try:
            result = await obstore.get_async(self._store, path)
            _, nbytes = result.range  # all of it; what the client makes of its metadata costs more
            if nbytes == view.nbytes:
                batch.trailers[index] = _trailer(result.attributes.get(TRAILER, ""))
                view[:] = memoryview(await result.bytes_async())
                return Status.OK, ""
        except FileNotFoundError as error:
            if (fault := fault_of(error)).word == "no_bucket":
                return self._failed("a get", fault)
            self._lost([key])
            return Status.ABSENT, ""
        except Exception as error:
            return self._failed("a get", fault_of(error))
        _log.error("%s has %d bytes instead of %d: it is deleted", path, nbytes, view.nbytes)
        self._lost([key])
        await until_done(self._delete([path]))
        return Status.CORRUPT, "torn"

    def _failed(self, what: str, fault: Fault) -> tuple[Status, str]:
        self._complain(what, fault)
        return Status.FAILED, fault.word

    # ------------------------------------------------------------------------------------ forgetting

    async def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Delete the objects of ``keys``. See ``SecondaryTier.discard``."""
        place = self._place
        if place is None or self._read_only or not keys:
            return
        self._holdings.lost(keys, self._context.chunk_bytes)
        # To its end: a request that is late would delete what is put next.
        await until_done(self._delete([chunk_name(place, key) for key in dict.fromkeys(keys)]))

    async def _delete(self, paths: list[str]) -> None:
        if self.config.provider == "s3":  # no error where there is none, so many can be named at once
            await self._delete_some(paths)
        else:
            await self._writes.each(len(paths), lambda number: self._delete_some([paths[number]]))

    async def _delete_some(self, paths: list[str]) -> None:
        try:
            await obstore.delete_async(self._store, paths)
        except FileNotFoundError as error:
            if (fault := fault_of(error)).word == "no_bucket":
                self._complain("a discard", fault)
        except Exception as error:
            self._complain("a discard", fault_of(error))

    async def reset(self) -> None:
        """Begin a new epoch. See ``SecondaryTier.reset``.

        Raises:
            TierError: it could not be written down. The tier has nothing then and takes nothing, until a
                reset succeeds or it is opened again. Opened again, it may have what was put before.
        """
        async with self._resetting:
            await until_done(self._reset())

    async def _reset(self) -> None:
        self._place = None
        self._holdings.forget()
        self._place = await self._cache.advance()

    # --------------------------------------------------------------------------------------- upkeep

    async def _keep_listing(self) -> None:
        while True:
            pause_s = self.config.list_every_s
            try:
                await self._list()
            except BaseException as error:  # a panic of the client's is no Exception
                require_fault(error)
                self._complain("a listing", fault_of(error))
                pause_s = min(pause_s, _LIST_AGAIN_S)
            await asyncio.sleep(pause_s)

    async def _list(self) -> None:
        """Learn what is there: below the prefix where there is a bound, else in this epoch alone."""
        place = self._place
        if place is None:
            return
        is_bounded = self.config.max_bytes is not None
        scope = self._cache.layout.all_chunks if is_bounded else place
        listing = self._holdings.start_listing()
        async for objects in obstore.list(self._store, scope, chunk_size=_LISTED_AT_ONCE):
            for found in objects:
                is_mine = not is_bounded or found["path"].startswith(f"{place}/")
                listing.add(key_of(found["path"]) if is_mine else None, found["size"])
            if not is_bounded and listing.is_full_of_keys:
                break
        gone = self._holdings.end_listing(listing)
        self._counted.set()
        if gone:
            self._context.removed(gone)

    def _found(self, place: str, key: OffloadKey) -> None:
        if place == self._place:
            self._holdings.found(key)

    def _lost(self, keys: Sequence[OffloadKey]) -> None:
        """Learn that chunks have gone of themselves, and tell whoever was told that they are there."""
        if gone := self._holdings.lost(keys, self._context.chunk_bytes):
            self._context.removed(gone)

    def _complain(self, what: str, fault: Fault) -> None:
        self._complaints.note(self._context.name, what, fault)


class Results:
    """How the chunks of one batch have ended."""

    def __init__(self, count: int) -> None:
        self._statuses = [Status.FAILED] * count
        self._reasons: Counter[str] = Counter()

    def note(self, index: int, status: Status, reason: str) -> None:
        """Note how one chunk has ended."""
        self._statuses[index] = status
        if reason:
            self._reasons[reason] += 1

    def outcome(self) -> Outcome:
        """Make the outcome of the batch."""
        return Outcome(self._statuses, self._reasons)


class Complaints:
    """Logs what went wrong: each kind of fault once a minute, and how often it came."""

    def __init__(self) -> None:
        self._told_s: dict[tuple[str, str], float] = {}
        self._untold: Counter[tuple[str, str]] = Counter()

    def note(self, tier: str, what: str, fault: Fault) -> None:
        """Note a fault, and log it where it was not logged just now."""
        kind, now_s = (what, fault.word), time.monotonic()
        self._untold[kind] += 1
        if now_s - self._told_s.get(kind, -_QUIET_S) >= _QUIET_S:
            self._told_s[kind] = now_s
            times = self._untold.pop(kind)
            often = f" {times} times" if times > 1 else ""
            _log.warning("tier %s: %s failed%s: %s", tier, what, often, fault)


def _parts(view: memoryview, part_bytes: int) -> Iterator[memoryview]:
    for start in range(0, view.nbytes, part_bytes):
        yield view[start : start + part_bytes]


def _trailer(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""  # kvtier finds that it proves nothing
