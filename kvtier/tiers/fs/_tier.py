"""The file tier: chunks in files below a directory, published whole, proven on each get."""

from __future__ import annotations

import asyncio
import errno
import logging
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final

import anyio

from kvtier.errors import StateError, TierError
from kvtier.keys import OffloadKey
from kvtier.tiers._base import (
    Batch,
    Knowledge,
    Outcome,
    SecondaryTier,
    Status,
    TierConfig,
    TierContext,
    Usage,
)
from kvtier.tiers.fs._config import FsConfig
from kvtier.tiers.fs._files import ChunkFiles, NativeFiles, make_files
from kvtier.tiers.fs._files.base import most_bytes
from kvtier.tiers.fs._files.call import FileCall, Place, Result, StopFlag, Verb
from kvtier.tiers.fs._files.completions import NativePool
from kvtier.tiers.fs._files.workers import Workers, join_all, run, run_alone
from kvtier.tiers.fs._layout import BLOCK_BYTES
from kvtier.tiers.fs._maintenance.maintenance import Maintenance
from kvtier.tiers.fs._maintenance.quarantine import Quarantine
from kvtier.tiers.fs._namespace import Epoch, Namespace, errno_name
from kvtier.tiers.fs._quota.ledger import FOLDER, Ledger, SharedLedger
from kvtier.tiers.fs._quota.quota import Quota, look_at

_STATUSES: Final = {
    Result.OK: Status.OK,
    Result.EXISTS: Status.OK,
    Result.ABSENT: Status.ABSENT,
    Result.TORN: Status.CORRUPT,
    Result.FOREIGN: Status.CORRUPT,
    Result.CHECKSUM: Status.CORRUPT,
    Result.MIN_FREE: Status.REFUSED,
    Result.MAX_BYTES: Status.REFUSED,
    Result.COUNTING: Status.REFUSED,
}
_REASONS: Final = {
    "max_bytes": "max_bytes is reached",
    "min_free": "the file system has no more free bytes than min_free_bytes, or can hold no more files",
    "counting": "it is not known yet how many bytes root_dir holds",
    "reset_failed": "a reset could not be written down: the tier has nothing and takes nothing",
    "enospc": "the file system is full",
    "edquot": "the disk quota is used up",
    "erofs": "the file system is read-only",
    "eacces": "permission is denied",
    "eperm": "the file system does not permit it",
    "eio": "the device failed",
    "enoent": "a directory below root_dir was removed",
    "estale": "the network file system has lost a file",
    "emfile": "the process has too many open files",
    "enfile": "the machine has too many open files",
    "enomem": "the machine is out of memory",
    "enodev": "the file system is not mounted any more",
    "enotconn": "the file system is not mounted any more",
    "enolck": "the file system has no locks, so that engines could not keep one bound together",
    "etimedout": "the file system did not answer",
}
_KNOWLEDGE: Final = (Knowledge.UNKNOWN, Knowledge.PRESENT)
_NO_ROOM: Final = frozenset({-errno.ENOSPC, -errno.EDQUOT})
_THERE: Final = frozenset({Result.OK, Result.EXISTS})
_HAS_FILE: Final = frozenset({Result.EXISTS, Result.TORN})
_NEEDS_ROOM: Final = frozenset({Result.MAX_BYTES, Result.MIN_FREE})
_CORRUPT: Final = frozenset({Result.TORN, Result.FOREIGN, Result.CHECKSUM})
_GONE: Final = _CORRUPT | {Result.ABSENT}
_IS_NO_FILE: Final = frozenset({errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ESPIPE})
_NO_LEDGER: Final = f": remove what is at {FOLDER}/ledger, which is no ledger; it is made anew"
_FIRST_COUNT_PATIENCE_S: Final = 1.0
_LOOKUP_THREADS: Final = 2
_PUT_THREADS: Final = 2
_FLUSH_S: Final = 0.02
_ROOM_SHARE: Final = 0.2  # of its deadline a put waits for room

_log = logging.getLogger("kvtier.tiers.fs")


@dataclass(frozen=True, slots=True)
class FsStatistics:
    """The state of a file tier.

    Attributes:
        epoch: number of the epoch that it reads and writes; None after a reset that failed.
        used_bytes: bytes below the root, as far as known; None before the first count.
        limit_bytes: bytes that may be there; None before the default is known.
        quarantined: files that failed a check since the tier opened, by reason.
        direct_io: whether files bypass the page cache.
        native: whether the native helper does the work.
        read_only: why nothing can be written, as an errno's name; None where all is well.
        known_chunks: chunks that the tier knows of without asking the disk.
        evicted_chunks: chunks that were evicted by this process, of all namespaces.
        evicted_bytes: bytes that were removed by this process to make room, leftovers included.
    """

    epoch: int | None
    used_bytes: int | None
    limit_bytes: int | None
    quarantined: Mapping[str, int]
    direct_io: bool
    native: bool
    read_only: str | None
    known_chunks: int
    evicted_chunks: int
    evicted_bytes: int


@dataclass(frozen=True, slots=True)
class _Opened:
    """What there is between opening and closing."""

    namespace: Namespace
    quarantine: Quarantine
    quota: Quota
    ledger: Ledger

    @staticmethod
    def make(config: FsConfig, context: TierContext) -> tuple[_Opened, Epoch]:
        """Open all of it. Blocks."""
        namespace, epoch = Namespace.open(config, context)
        look = partial(look_at, namespace.root_fd)
        ledger: Ledger | None = None
        try:
            writable = namespace.read_only is None
            ledger = SharedLedger(namespace.root_fd, look) if writable else Ledger(look())
            quota = Quota(config, most_bytes(context.chunk_bytes), ledger, look)
        except OSError as error:
            if ledger is not None:
                ledger.close()
            epoch.retire()
            namespace.close()
            name, hint = errno_name(error.errno or 0), _NO_LEDGER if error.errno in _IS_NO_FILE else ""
            raise TierError(
                f"tier {context.name}: {config.root_dir} cannot be measured ({name}){hint}"
            ) from error
        quarantine = Quarantine(namespace.root_fd, namespace.name)
        return _Opened(namespace, quarantine, quota, ledger), epoch

    def close(self) -> None:
        """Give back the lease and all that is open. Blocks."""
        with suppress(OSError):
            self.quota.flush()
        self.ledger.close()
        self.namespace.close()


class FsTier(SecondaryTier[FsConfig]):
    """Keeps chunks as files below one directory, which several engines may share.

    A put does not rewrite a chunk that exists. A get reads the bytes into the slot and proves
    them by their trailer. What fails is moved to the namespace's ``quarantine``. When a put or a get is
    cancelled, chunks that were not begun are left, and it returns when those under way have ended.

    A reset starts a new epoch (see ``namespace``). Other engines that have the same directory open
    go on with theirs until they reset or open again.

    Args:
        config: the settings.
        files: what reads and writes files, in place of the native helper or its fallback.
    """

    Config: ClassVar[type[TierConfig]] = FsConfig
    verifies: ClassVar[bool] = True
    medium = "disk"
    reasons: ClassVar[Mapping[str, str]] = _REASONS

    def __init__(self, config: FsConfig, files: ChunkFiles | None = None) -> None:
        super().__init__(config)
        self._files = files if files is not None else make_files()
        self._opened: _Opened | None = None
        self._epoch: Epoch | None = None
        self._serial = 0
        self._pool: NativePool | None = None
        self._workers: tuple[Workers, ...] = ()
        self._closing = StopFlag()
        self._flush_is_due = False
        self._maintenance: Maintenance | None = None
        self._resetting = anyio.Lock()

    # --------------------------------------------------------------------- opening, closing

    async def open(self, context: TierContext) -> None:
        """Make or open the directories below ``root_dir``. See ``SecondaryTier.open``."""
        if context.chunk_bytes <= 0 or context.chunk_bytes % BLOCK_BYTES:
            raise TierError(
                f"tier {context.name}: chunk_bytes is {context.chunk_bytes}, not n * {BLOCK_BYTES}"
            )
        self._chunk_bytes = context.chunk_bytes
        self._lookups = Workers(f"{context.name}-lookup", _LOOKUP_THREADS)
        self._puts = Workers(f"{context.name}-put", _PUT_THREADS)
        self._workers = (self._lookups, self._puts)
        try:
            opened, cancelled = await run_alone(self._lookups, partial(_Opened.make, self.config, context))
            self._opened, self._epoch = opened
            if cancelled is not None:
                raise cancelled
            self._pool = self._make_pool()
            await self._begin_maintenance(context)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.aclose()
            raise

    async def aclose(self) -> None:
        """Wait until all threads have ended, and close what is open.

        Whoever is cancelled meanwhile does not wait for a disk that hangs: no transfer is under way, and a
        thread goes on to close what is open when the disk answers.
        """
        self._closing.set()
        if self._maintenance is not None:
            self._maintenance.stop()
        if self._epoch is not None:
            self._epoch.retire()
            self._epoch = None
        if not self._workers:
            return
        interrupted = await self._pool.drain() if self._pool is not None else None
        last = Workers(f"{self.config.type}-close", 1)  # the waiting blocks: a thread of its own
        closed = asyncio.wrap_future(last.call(self._close))
        last.close()
        await asyncio.wait((closed,))
        closed.result()
        if interrupted is not None:
            raise interrupted

    def _close(self) -> None:
        workers, self._workers = self._workers, ()
        join_all(workers)
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        if self._opened is not None:
            self._opened.close()

    def _make_pool(self) -> NativePool | None:
        if isinstance(self._files, NativeFiles):
            with suppress(NotImplementedError, OSError):
                return NativePool(self._files.library, self.config.n_threads, self.config.n_threads)
        return None  # two threads, and Python's lock between them, do the work

    @property
    def _maintained(self) -> Maintenance:
        if self._maintenance is None:
            raise StateError("the file tier is not open")
        return self._maintenance

    @property
    def _here(self) -> _Opened:
        if self._opened is None:
            raise StateError("the file tier is not open")
        return self._opened

    async def _begin_maintenance(self, context: TierContext) -> None:
        """Look after the root from now on, and wait a moment: what a small one holds is known at once."""
        here, epoch = self._here, self._epoch
        assert epoch is not None
        self._report_removed = context.removed
        self._maintenance = Maintenance(
            self.config,
            here.namespace,
            here.quota,
            self._files,
            self._closing,
            context.removed,
            context.lost,
            epoch,
        )
        self._workers += self._maintenance.workers
        counted = asyncio.Event()
        self._maintenance.begin(counted)
        if here.quota.used_bytes is None:
            with anyio.move_on_after(_FIRST_COUNT_PATIENCE_S):
                await counted.wait()

    # ----------------------------------------------------------------------------- the verbs

    def known(self, keys: Sequence[OffloadKey]) -> Sequence[Knowledge]:
        """Return which chunks are there, as far as this opener knows. See ``SecondaryTier.known``.

        Another process may have removed them since, and then a get finds nothing. What is not known is
        UNKNOWN and never ABSENT: another process may have put it.
        """
        if self._maintenance is None or self._epoch is None:
            return (Knowledge.UNKNOWN,) * len(keys)
        return [_KNOWLEDGE[found] for found in self._maintenance.index.known(keys)]

    async def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        """Return which keys have a file. See ``SecondaryTier.contains``."""
        if self._epoch is None or not keys:
            return (False,) * len(keys)
        with self._epoch.hold() as place:
            call = FileCall(place, keys)
            await run(self._lookups, partial(self._files.contains, call, 0, len(call)), call.stop)
            self._learn(call)
        return [result in _HAS_FILE for result in call.results]

    async def put(self, batch: Batch) -> Outcome:
        """Write the chunks that are not there yet. See ``SecondaryTier.put``."""
        self._check(batch)
        if self._here.namespace.read_only is not None:
            return Outcome.all(Status.REFUSED, len(batch), self._here.namespace.read_only)
        if self._epoch is None:
            return Outcome.all(Status.REFUSED, len(batch), "reset_failed")
        if not len(batch):
            return Outcome(())
        with self._epoch.hold() as place:
            return _outcome(await self._put_in_time(place, batch))

    async def get(self, batch: Batch) -> Outcome:
        """Read and prove chunks. See ``SecondaryTier.get``."""
        self._check(batch)
        if self._epoch is None:
            return Outcome.all(Status.ABSENT, len(batch))
        with self._epoch.hold() as place:
            call = FileCall(place, batch.keys, batch.slots, batch.memory)
            if len(batch):
                await self._get(call)
        return _outcome(call.results)

    async def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Note that ``keys`` were used. See ``SecondaryTier.touch``: their files' times are set later."""
        if self._maintenance is not None and self._epoch is not None:
            self._maintenance.note_used(keys)

    async def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Remove the files of ``keys``. See ``SecondaryTier.discard``."""
        if self._epoch is None or self._here.namespace.read_only is not None or not keys:
            return
        with self._epoch.hold() as place:
            call = FileCall(place, keys)
            await run(self._lookups, partial(self._remove, call), call.stop)
        if failed := Counter(errno_name(-result) for result in call.results if result < 0):
            self._maintained.warn("discard", f"chunks could not be discarded: {dict(failed)}")

    async def reset(self) -> None:
        """Start a new epoch. See ``SecondaryTier.reset``.

        Raises:
            TierError: it could not be written down. The tier then has nothing and takes nothing until a
                reset succeeds or it is opened again. Where not even an empty file could be made in the
                namespace, opening it again brings back what was put before: log it.
        """
        async with self._resetting:
            old, self._epoch = self._epoch, None
            if old is not None:
                old.retire()
            advance = partial(self._here.namespace.advance, old.number if old is not None else 0)
            try:
                new, cancelled = await run_alone(self._lookups, advance)
            except OSError as error:
                where, name = self.config.root_dir, errno_name(error.errno or 0)
                raise TierError(f"the file tier's reset could not be stored in {where}: {name}") from error
            self._epoch = new
            if self._maintenance is not None and not self._closing:
                self._maintenance.follow(new)
            if cancelled is not None:
                raise cancelled

    def usage(self) -> Usage | None:
        """Return how much of ``max_bytes`` is taken. See ``SecondaryTier.usage``."""
        if self._opened is None:
            return None
        return Usage(self._opened.quota.used_bytes, self._opened.quota.limit_bytes)

    def statistics(self) -> FsStatistics:
        """Return what the tier knows of itself. Does not block."""
        return FsStatistics(
            epoch=self._epoch.number if self._epoch is not None else None,
            used_bytes=self._here.quota.used_bytes,
            limit_bytes=self._here.quota.limit_bytes,
            quarantined=self._here.quarantine.counts(),
            direct_io=self._here.namespace.direct,
            native=self._files.is_native,
            read_only=self._here.namespace.read_only,
            known_chunks=len(self._maintained.index),
            evicted_chunks=self._maintained.evicted_chunks,
            evicted_bytes=self._maintained.evicted_bytes,
        )

    # ---------------------------------------------------------------------- transfers and jobs

    def _check(self, batch: Batch) -> None:
        memory = batch.memory
        if memory.chunk_bytes != self._chunk_bytes or memory.address % BLOCK_BYTES:
            raise ValueError(
                f"slots have {memory.chunk_bytes} bytes at {memory.address:#x}; the tier was opened for "
                f"{self._chunk_bytes} bytes, aligned to {BLOCK_BYTES}"
            )

    async def _put_in_time(self, place: Place, batch: Batch) -> array[int]:
        """Put the chunks, and for a part of the deadline again those that a bound refuses."""
        give_up_at = asyncio.get_running_loop().time() + _ROOM_SHARE * self.config.deadline_s
        results = await self._put(place, batch)
        while refused := _refused(results):
            if not await self._maintained.room_made(give_up_at):
                break
            for i, result in zip(refused, await self._put(place, batch.part(refused)), strict=True):
                results[i] = result
        return results

    async def _put(self, place: Place, batch: Batch) -> array[int]:
        """Put the chunks that are not there and that there is room for.

        No room is asked for those that are there, or they would evict chunks.
        """
        call = self._call(place, batch)
        if self._here.quota.reserve_ahead(len(call)):
            await self._write(call, batch, range(len(call)))
        else:
            await self._write_missing(call, batch)
        if corrupt := _corrupt(call.results):  # something else is where a file should be
            await run(self._puts, partial(self._replace, call, corrupt))
        self._learn(call)
        if self._here.quota.excess_bytes:
            self._maintained.make_room_soon()
        return call.results

    async def _write_missing(self, call: FileCall, batch: Batch) -> None:
        """Put the chunks that have no file, as many as there is room for."""
        (missing, granted, reason), cancelled = await run_alone(
            self._puts, partial(self._reserve_missing, call), call.stop
        )
        if cancelled is not None:
            self._settle(granted, 0)
            raise cancelled
        for i in missing[granted:]:
            call.results[i] = reason
        if granted:
            await self._write(call, batch, missing[:granted])

    async def _write(self, call: FileCall, batch: Batch, chunks: Sequence[int]) -> None:
        """Put chunks that room is reserved for, and settle what they took, cancelled or not."""
        part = call if len(chunks) == len(call) else self._call(call.place, batch.part(chunks))
        added, cancelled = 0, None
        try:
            added, cancelled = await self._transfer(part, Verb.PUT)
        finally:
            self._settle(len(part), added)
        if cancelled is not None:
            raise cancelled
        if part is not call:
            for i, result, inode in zip(chunks, part.results, part.inodes, strict=True):
                call.results[i], call.inodes[i] = result, inode

    async def _transfer(self, call: FileCall, verb: Verb) -> tuple[int, asyncio.CancelledError | None]:
        """See ``NativePool.transfer``. Without the helper one thread does all of it."""
        if self._pool is not None:
            return await self._pool.transfer(call, verb, self._maintained.index)
        if verb is Verb.PUT:
            return await run_alone(self._puts, partial(self._files.put, call, 0, len(call)), call.stop)
        _, cancelled = await run_alone(self._lookups, partial(self._files.get, call, 0, len(call)), call.stop)
        return 0, cancelled

    def _settle(self, granted: int, added: int) -> None:
        """End a reservation. A timer reports it to the other engines, unless a put does it sooner."""
        if granted:
            self._here.quota.settle(granted, added)
            if not self._flush_is_due:
                self._flush_is_due = True
                asyncio.get_running_loop().call_later(_FLUSH_S, self._flush_soon)

    def _flush_soon(self) -> None:
        self._flush_is_due = False
        if self._here.quota.has_news and not self._closing:
            self._puts.submit(self._flush)

    def _flush(self) -> None:
        with suppress(OSError):  # the next put, or the next look at the ledger, reports it
            self._here.quota.flush()

    async def _get(self, call: FileCall) -> None:
        _, cancelled = await self._transfer(call, Verb.GET)
        if cancelled is not None:
            raise cancelled
        self._maintained.note_used(self._learn(call))
        if corrupt := _corrupt(call.results):
            await run(self._lookups, partial(self._set_all_aside, call, corrupt))

    def _call(self, place: Place, batch: Batch) -> FileCall:
        self._serial += len(batch)
        return FileCall(place, batch.keys, batch.slots, batch.memory, self._serial - len(batch))

    def _reserve_missing(self, call: FileCall) -> tuple[list[int], int, int]:
        """Reserve room for the chunks that have no file.

        Returns:
            Which chunks those are, for how many of them there is room, and the result of the others.
        """
        self._files.contains(call, 0, len(call))
        missing = [i for i, result in enumerate(call.results) if result == Result.ABSENT]
        return missing, *(self._reserve(len(missing)) if missing else (0, Result.OK))

    def _reserve(self, chunks: int) -> tuple[int, int]:
        """Reserve room. Returns for how many chunks, and the result of the others."""
        try:
            return self._here.quota.reserve(chunks)
        except OSError as error:  # the file system cannot even say how much room there is
            return 0, -(error.errno or errno.EIO)

    def _replace(self, call: FileCall, corrupt: Sequence[int]) -> None:
        """Set aside what is in the place of chunks, and put these again."""
        for i in corrupt:
            self._set_aside(call, i)
            granted, reason = self._reserve(1)
            added = 0
            try:
                if granted:
                    added = self._files.put(call, i, i + 1)
                else:
                    call.results[i] = reason
            finally:
                self._here.quota.settle(granted, added)
        self._flush()

    def _set_all_aside(self, call: FileCall, corrupt: Sequence[int]) -> None:
        for i in corrupt:
            self._set_aside(call, i)
        self._report_removed([call.keys[i] for i in corrupt])

    def _set_aside(self, call: FileCall, i: int) -> None:
        result, inode = Result(call.results[i]), call.inodes[i]
        self._here.quarantine.set_aside(call.place.data_dir, call.keys[i], result, inode)

    def _remove(self, call: FileCall) -> None:
        since = self._here.quota.mark()
        removed = self._files.discard(call, 0, len(call))
        self._maintained.learn(call.place, (), call.keys)
        try:
            self._here.quota.removed(removed, since)
        except OSError as error:  # then the root is taken to hold them until it is counted again
            text = f"{removed} bytes were removed, and the ledger cannot be updated: {error}"
            self._maintained.warn("removed", text)

    def _learn(self, call: FileCall) -> Sequence[OffloadKey]:
        """Note which chunks are there. Returns them."""
        there: Sequence[OffloadKey] = call.keys
        gone: Sequence[OffloadKey] = ()
        if any(call.results):
            found = list(zip(call.keys, call.results, strict=True))
            there = tuple(key for key, result in found if result in _THERE)
            gone = tuple(key for key, result in found if result in _GONE)
        self._maintained.learn(call.place, () if call.is_noted else there, gone)
        return there


def _corrupt(results: array[int]) -> list[int]:
    """Return the chunks whose files failed a check. Mostly there are none, and it costs little."""
    return [i for i, result in enumerate(results) if result in _CORRUPT] if any(results) else []


def _refused(results: array[int]) -> list[int]:
    """Return the chunks that a bound refuses."""
    return [i for i, result in enumerate(results) if result in _NEEDS_ROOM] if any(results) else []


def _outcome(results: array[int]) -> Outcome:
    if not any(results):
        return Outcome.all(Status.OK, len(results))
    reasons: Counter[str] = Counter()
    statuses = []
    for result in results:
        status = _status(result)
        statuses.append(status)
        if status not in (Status.OK, Status.ABSENT):
            reasons[errno_name(-result) if result < 0 else Result(result).name.lower()] += 1
    return Outcome(tuple(statuses), reasons)


def _status(result: int) -> Status:
    if result in _NO_ROOM:
        return Status.REFUSED
    return Status.FAILED if result < 0 else _STATUSES[Result(result)]
