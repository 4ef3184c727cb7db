"""The file tier: chunks in files below a directory, published whole, proven on each get."""

from __future__ import annotations

import asyncio
import errno
import logging
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Final, cast

import anyio

from kvtier.errors import StateError, TierError
from kvtier.keys import OffloadKey
from kvtier.tiers.base import (
    Batch,
    Knowledge,
    Outcome,
    Status,
    TierConfig,
    TierContext,
    Usage,
)
from kvtier.tiers.fs import formats, layout, manifest
from kvtier.tiers.fs.accounts import FileSystem
from kvtier.tiers.fs.bell import Begun, Bell
from kvtier.tiers.fs.call import FileCall, Result, StopFlag, Verb
from kvtier.tiers.fs.config import FsConfig
from kvtier.tiers.fs.lanes import Lane, Run, join_all, run_alone, split, until_done
from kvtier.tiers.fs.layout import BLOCK_BYTES
from kvtier.tiers.fs.ledger import FOLDER, Books, Ledger, PrivateBooks
from kvtier.tiers.fs.manifest import LaneExecutor
from kvtier.tiers.fs.namespace import Epoch, Namespace, errno_name
from kvtier.tiers.fs.quarantine import Quarantine
from kvtier.tiers.fs.space import Space, look_at
from kvtier.tiers.fs.store import Store
from kvtier.tiers.fs.striped import OneRoot, StripedFs
from kvtier.tiers.fs.upkeep import Upkeep

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
    "root_down": "one of several roots could not be opened",
}
_KNOWLEDGE: Final = (Knowledge.UNKNOWN, Knowledge.PRESENT)
_NO_ROOM: Final = frozenset({-errno.ENOSPC, -errno.EDQUOT})
_THERE: Final = frozenset({Result.OK, Result.EXISTS})
_ILL: Final = frozenset({Result.TORN, Result.FOREIGN, Result.CHECKSUM})
_GONE: Final = _ILL | {Result.ABSENT}
_IS_NO_FILE: Final = frozenset({errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ESPIPE})
_NO_LEDGER: Final = f": remove what is at {FOLDER}/ledger, which is no ledger; it is made anew"
_FIRST_COUNT_PATIENCE_S: Final = 1.0
_LOOKUP_THREADS: Final = 2
_LOOKUPS_A_JOB: Final = 256

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
        evicted_units: files that were evicted by this process, of all namespaces.
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
    evicted_units: int
    evicted_bytes: int


@dataclass(frozen=True, slots=True)
class _Opened:
    """What there is between opening and closing."""

    namespace: Namespace
    store: Store
    quarantine: Quarantine
    space: Space
    ledger: Ledger | None

    @staticmethod
    def make(config: FsConfig, context: TierContext, given: Store | None) -> tuple[_Opened, Epoch]:
        """Open all of it. Blocks. The format depends on what is there, where no store is given."""
        namespace, epoch = Namespace.open(config, context)
        look = partial(look_at, namespace.root_fd)
        ledger = None
        try:
            store = given or formats.make_store(config, epoch.place)
            books, ledger = _books(namespace, look)
            space = Space(config, store.most_bytes(context.chunk_bytes), books, look)
        except OSError as error:
            if ledger is not None:
                ledger.close()
            epoch.retire()
            namespace.close()
            name, hint = errno_name(error.errno or 0), _NO_LEDGER if error.errno in _IS_NO_FILE else ""
            raise TierError(
                f"tier {context.name}: {config.root_dir} cannot be measured ({name}){hint}"
            ) from error
        quarantine = Quarantine(namespace.root_fd, namespace.name, store)
        return _Opened(namespace, store, quarantine, space, ledger), epoch

    def close(self) -> None:
        """Give back the lease and all that is open. Blocks."""
        if self.ledger is not None:
            with suppress(OSError):
                self.space.refresh()
            self.ledger.close()
        self.namespace.close()


def _books(namespace: Namespace, look: Callable[[], FileSystem]) -> tuple[Books, Ledger | None]:
    if namespace.read_only is not None:
        return PrivateBooks(look()), None
    ledger = Ledger(namespace.root_fd, look)
    return ledger, ledger


class FsTier(OneRoot):
    """Keeps chunks as files below one directory, which several engines may share.

    How they lie there is the format's matter (``store``). A put leaves a chunk as it is that is there
    already. A get reads the bytes into the slot and proves them by their trailer. What fails is moved
    to the namespace's ``quarantine``. When a put or a get is cancelled, chunks that were not begun are
    left, and it returns when those under way have ended.

    A reset starts a new epoch (see ``namespace``). Other engines that have the same directory open
    go on with theirs until they reset or open again.

    Args:
        config: the settings.
        work: what reads and writes files, in place of what ``format`` and the root's content ask for.
    """

    Config: ClassVar[type[TierConfig]] = FsConfig
    verifies: ClassVar[bool] = True
    medium = "disk"
    reasons: ClassVar[Mapping[str, str]] = _REASONS

    def __new__(cls, config: FsConfig, work: Store | None = None) -> FsTier:
        """Make a tier of one root, or where there are several one that spreads chunks over them."""
        if config.more_root_dirs:
            return cast(FsTier, StripedFs(config, partial(cls, work=work)))
        return super().__new__(cls)

    def __init__(self, config: FsConfig, work: Store | None = None) -> None:
        super().__init__(config)
        self._given = work
        self._opened: _Opened | None = None
        self._epoch: Epoch | None = None
        self._serial = 0
        self._pool = 0
        self._bell: Bell | None = None
        self._lanes: tuple[Lane, ...] = ()
        self._closing = StopFlag()
        self._upkeep: Upkeep | None = None
        self._resetting = anyio.Lock()

    # --------------------------------------------------------------------- opening, closing

    async def open(self, context: TierContext) -> None:
        """Make or open the place below ``root_dir``. See ``SecondaryTier.open``."""
        if context.chunk_bytes <= 0 or context.chunk_bytes % BLOCK_BYTES:
            raise TierError(
                f"tier {context.name}: chunk_bytes is {context.chunk_bytes}, not n * {BLOCK_BYTES}"
            )
        context = _as_named_here(self.config, context)
        self._chunk_bytes = context.chunk_bytes
        self._tell_removed = context.removed
        self._tell_lost = context.lost
        self._lookups = Lane(f"{context.name}-lookup", _LOOKUP_THREADS)
        self._lanes = (self._lookups,)
        try:
            await self._open_place(context)
            self._start_lanes(context.name)
            await self._begin_upkeep()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.aclose()
            raise

    async def aclose(self) -> None:
        """Wait until all threads have ended, and close what is open."""
        self._closing.set()
        if self._upkeep is not None:
            self._upkeep.stop()
        if self._epoch is not None:
            self._epoch.retire()
            self._epoch = None
        if not self._lanes:
            return
        interrupted = await self._bell.silence() if self._bell is not None else None
        self._bell = None
        last = Lane(f"{self.config.type}-end", 1)  # the waiting blocks: a thread of its own
        _, cancelled = await run_alone(last, self._end)
        last.close()
        if cancelled is not None or interrupted is not None:
            raise cancelled or interrupted or asyncio.CancelledError

    def _start_lanes(self, name: str) -> None:
        readers = self.config.n_read_threads or self.config.n_threads
        writers = self.config.n_write_threads or self.config.n_threads
        self._pool = self._work.open_pool(readers, writers)
        if self._pool:
            with suppress(NotImplementedError):
                self._bell = Bell(self._work, self._pool)
        self._reads = Lane(f"{name}-read", readers, self._pool)
        self._writes = Lane(f"{name}-write", writers, self._pool)
        self._lanes += (self._reads, self._writes)

    def _end(self) -> None:
        lanes, self._lanes = self._lanes, ()
        join_all(lanes)
        if self._opened is None:
            return
        if self._pool:
            self._work.close_pool(self._pool)
            self._pool = 0
        self._work.close()
        self._opened.close()

    async def _open_place(self, context: TierContext) -> None:
        opened, cancelled = await run_alone(
            self._lookups, partial(_Opened.make, self.config, context, self._given)
        )
        self._opened, self._epoch = opened
        self._work = self._opened.store
        if cancelled is not None:
            raise cancelled
        await self._agree_on_identity(self._opened.namespace, context)

    async def _agree_on_identity(self, place: Namespace, context: TierContext) -> None:
        """Compare or write the manifest; to the end, for a file that is being opened must be closed."""
        folder = self.config.root_dir
        agreeing = asyncio.ensure_future(
            manifest.agree(
                folder / place.name / layout.MANIFEST,
                None if place.read_only else folder / place.tmp_dir / layout.MANIFEST,
                context.identity,
                context.name,
                LaneExecutor(self._lookups),
            )
        )
        cancelled = await until_done(agreeing)
        error = agreeing.exception()
        if cancelled is not None:
            raise cancelled
        if isinstance(error, OSError):
            name = errno_name(error.errno or 0)
            raise TierError(f"tier {context.name}: {place.name}/{layout.MANIFEST} ({name})") from error
        if error is not None:
            raise error

    @property
    def _tended(self) -> Upkeep:
        if self._upkeep is None:
            raise StateError("the file tier is not open")
        return self._upkeep

    @property
    def _here(self) -> _Opened:
        if self._opened is None:
            raise StateError("the file tier is not open")
        return self._opened

    async def _begin_upkeep(self) -> None:
        """Look after the root from now on, and wait a moment: what a small one holds is known at once."""
        here, epoch = self._here, self._epoch
        assert epoch is not None
        self._upkeep = Upkeep(
            self.config,
            here.namespace,
            here.space,
            self._work,
            self._closing,
            self._tell_removed,
            self._tell_lost,
            epoch,
        )
        self._lanes += self._upkeep.lanes
        counted = asyncio.Event()
        self._upkeep.begin(counted)
        if here.space.used_bytes is None:
            with anyio.move_on_after(_FIRST_COUNT_PATIENCE_S):
                await counted.wait()

    # ----------------------------------------------------------------------------- the verbs

    def known(self, keys: Sequence[OffloadKey]) -> Sequence[Knowledge]:
        """Say which chunks are there, as far as this opener has heard. See ``SecondaryTier.known``.

        Another process may have removed them since, and then a get finds nothing. What was not heard of is
        UNKNOWN and never ABSENT: another process may have put it.
        """
        if self._upkeep is None or self._epoch is None:
            return (Knowledge.UNKNOWN,) * len(keys)
        return [_KNOWLEDGE[found] for found in self._upkeep.index.known(keys)]

    async def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        """Say which keys have a file. See ``SecondaryTier.contains``."""
        if self._epoch is None or not keys:
            return (False,) * len(keys)
        with self._epoch.hold() as place:
            call = FileCall(place, keys)
            parts = [(i, min(i + _LOOKUPS_A_JOB, len(keys))) for i in range(0, len(keys), _LOOKUPS_A_JOB)]
            await self._finish(self._lookups, call, parts, self._contains_job)
        return [result == Result.OK for result in call.results]

    async def put(self, batch: Batch) -> Outcome:
        """Write the chunks that are not there yet. See ``SecondaryTier.put``."""
        self._check(batch)
        if self._here.namespace.read_only is not None:
            return Outcome.all(Status.REFUSED, len(batch), self._here.namespace.read_only)
        if self._epoch is None:
            return Outcome.all(Status.REFUSED, len(batch), "reset_failed")
        with self._epoch.hold() as place:
            call = FileCall(place, batch.keys, batch.slots, batch.memory, self._serial, self._writes.pool)
            self._serial += len(batch)
            if not await self._put_at_once(call):
                await self._finish(self._writes, call, self._split(self._writes, len(batch)), self._put_job)
        return _outcome(call.results)

    async def get(self, batch: Batch) -> Outcome:
        """Read and prove chunks. See ``SecondaryTier.get``."""
        self._check(batch)
        if self._epoch is None:
            return Outcome.all(Status.ABSENT, len(batch))
        with self._epoch.hold() as place:
            call = FileCall(place, batch.keys, batch.slots, batch.memory, pool=self._reads.pool)
            if not await self._get_at_once(call):
                await self._finish(self._reads, call, self._split(self._reads, len(batch)), self._get_job)
        return _outcome(call.results)

    async def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Learn that ``keys`` were used. See ``SecondaryTier.touch``: their files are told later."""
        if self._upkeep is not None and self._epoch is not None:
            self._upkeep.note_used(keys)

    async def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Remove the files of ``keys``. See ``SecondaryTier.discard``."""
        if self._epoch is None or self._here.namespace.read_only is not None or not keys:
            return
        with self._epoch.hold() as place:
            call = FileCall(place, keys)
            await self._finish(self._lookups, call, [(0, len(keys))], self._discard_job)
        if failed := Counter(errno_name(-result) for result in call.results if result < 0):
            _log.warning("chunks could not be discarded: %s", dict(failed))

    async def reset(self) -> None:
        """Start a new epoch. See ``SecondaryTier.reset``.

        Raises:
            TierError: it could not be written down. The tier then has nothing and takes nothing until a
                reset succeeds or it is opened again. Where not even an empty file could be made in the
                namespace, opening it again brings back what was put before: tell somebody.
        """
        await self._begin_epoch(self._here.namespace.advance, "reset")

    @property
    def epoch(self) -> int | None:
        """See ``OneRoot.epoch``."""
        return self._epoch.number if self._epoch is not None else None

    async def catch_up(self, number: int) -> None:
        """See ``OneRoot.catch_up``."""
        await self._begin_epoch(lambda _: self._here.namespace.catch_up(number), "new epoch")

    async def _begin_epoch(self, begin: Callable[[int], Epoch], what: str) -> None:
        """Leave the epoch, whose number ``begin`` is given, for another. TierError: then there is none."""
        async with self._resetting:
            old, self._epoch = self._epoch, None
            beyond = old.number if old is not None else 0
            if old is not None:
                old.retire()
            try:
                new, cancelled = await run_alone(self._lookups, partial(begin, beyond))
            except OSError as error:
                where, name = self.config.root_dir, errno_name(error.errno or 0)
                raise TierError(f"the file tier's {what} could not be stored in {where}: {name}") from error
            self._epoch = new
            if self._upkeep is not None and not self._closing:
                self._upkeep.follow(new)
            if cancelled is not None:
                raise cancelled

    def usage(self) -> Usage | None:
        """Say how much of ``max_bytes`` is taken. See ``SecondaryTier.usage``."""
        if self._opened is None:
            return None
        return Usage(self._opened.space.used_bytes, self._opened.space.limit_bytes)

    def statistics(self) -> FsStatistics:
        """Return what the tier knows of itself. Does not block."""
        return FsStatistics(
            epoch=self._epoch.number if self._epoch is not None else None,
            used_bytes=self._here.space.used_bytes,
            limit_bytes=self._here.space.limit_bytes,
            quarantined=self._here.quarantine.counts(),
            direct_io=self._here.namespace.direct,
            native=self._work.is_native,
            read_only=self._here.namespace.read_only,
            known_chunks=len(self._tended.index),
            evicted_units=self._tended.evicted_units,
            evicted_bytes=self._tended.evicted_bytes,
        )

    # ------------------------------------------------------------------------- jobs and waits

    def _check(self, batch: Batch) -> None:
        memory = batch.memory
        if memory.chunk_bytes != self._chunk_bytes or memory.address % BLOCK_BYTES:
            raise ValueError(
                f"slots have {memory.chunk_bytes} bytes at {memory.address:#x}; the tier was opened for "
                f"{self._chunk_bytes} bytes, aligned to {BLOCK_BYTES}"
            )

    def _split(self, lane: Lane, count: int) -> list[tuple[int, int]]:
        """Cut a batch into jobs; a pool does that by itself, without the interpreter."""
        if lane.pool:
            return [(0, count)] if count else []
        return split(count, self._chunk_bytes, lane.threads - lane.jobs)

    async def _finish(
        self,
        lane: Lane,
        call: FileCall,
        parts: Sequence[tuple[int, int]],
        job: Callable[[FileCall, int, int], object],
    ) -> None:
        """Do the call's jobs. Whatever happens, when it returns or raises none of them runs any more."""
        if not parts:
            return
        run = Run(lane, [partial(job, call, first, end) for first, end in parts])
        cancelled = await run.end(call.stop)
        if cancelled is not None:
            raise cancelled
        run.results()

    def _begin(self, call: FileCall, verb: Verb) -> Begun | None:
        """Have the pool do a call and note what is there. None: it cannot."""
        if self._bell is None:
            return None
        call.note_in(self._tended.index)
        begun = self._bell.begin(call, verb)
        if begun is None:
            call.note_in(None)
        return begun

    async def _put_at_once(self, call: FileCall) -> bool:
        """Put without a thread of Python's, where room is leased already. False: it was not begun."""
        here, chunks = self._here, len(call)
        if self._bell is None or not chunks or not here.space.reserve_at_once(chunks):
            return False
        if here.space.needs_renewal:
            self._tended.renew_lease_soon()
        begun = self._begin(call, Verb.PUT)
        if begun is None:
            here.space.settle(chunks, 0)
            return False
        cancelled = await begun.end()
        here.space.settle(chunks, begun.total or 0)
        if cancelled is not None:
            raise cancelled
        if _ill(call.results, 0, chunks):  # something else is where a file should be
            await self._finish(self._writes, call, [(0, chunks)], self._put_again_job)
        self._learn(call, 0, chunks)
        if here.space.excess_bytes:
            self._tended.make_room_soon()
        return True

    async def _get_at_once(self, call: FileCall) -> bool:
        """Get without a thread of Python's. False: it was not begun."""
        begun = self._begin(call, Verb.GET) if len(call) else None
        if begun is None:
            return False
        cancelled = await begun.end()
        if cancelled is not None:
            raise cancelled
        if _ill(call.results, 0, len(call)):
            await self._finish(self._reads, call, [(0, len(call))], self._got_job)
        else:
            self._got(call, 0, len(call))
        return True

    def _put_again_job(self, call: FileCall, first: int, end: int) -> None:
        for i in _ill(call.results, first, end):
            self._here.quarantine.set_aside(call, i)
            self._put_job(call, i, i + 1)

    def _contains_job(self, call: FileCall, first: int, end: int) -> None:
        self._work.contains(call, first, end)
        self._learn(call, first, end)

    def _put_job(self, call: FileCall, first: int, end: int) -> None:
        try:
            granted, reason = self._here.space.reserve(end - first)
        except OSError as error:  # the file system cannot even say how much room there is
            self._refuse(call, first, end, -(error.errno or errno.EIO))
            return
        added = 0
        try:
            added = self._work.put(call, first, first + granted)
            for i in _ill(call.results, first, first + granted):
                self._here.quarantine.set_aside(call, i)
                added += self._work.put(call, i, i + 1)
        finally:
            self._here.space.settle(granted, added)
        if first + granted < end:
            self._refuse(call, first + granted, end, reason)
        self._learn(call, first, end)
        if self._here.space.excess_bytes:
            self._tended.make_room_soon()

    def _refuse(self, call: FileCall, first: int, end: int, reason: int) -> None:
        """Answer for chunks that cannot be written: those that are there already are well."""
        self._work.contains(call, first, end)
        for i in range(first, end):
            if call.results[i] == Result.ABSENT:
                call.results[i] = reason

    def _get_job(self, call: FileCall, first: int, end: int) -> None:
        self._work.get(call, first, end)
        self._got_job(call, first, end)

    def _got_job(self, call: FileCall, first: int, end: int) -> None:
        ill = _ill(call.results, first, end)
        for i in ill:
            self._here.quarantine.set_aside(call, i)
        self._got(call, first, end)
        if ill:
            self._tell_removed([call.keys[i] for i in ill])

    def _got(self, call: FileCall, first: int, end: int) -> None:
        self._tended.note_used(self._learn(call, first, end))

    def _discard_job(self, call: FileCall, first: int, end: int) -> None:
        since = self._here.space.mark()
        removed = self._work.discard(call, first, end)
        self._tended.learn(call.place, (), call.keys[first:end])
        try:
            self._here.space.changed(-removed, since)
        except OSError as error:  # then the root is taken to hold them until it is counted again
            _log.warning("%d bytes were removed, and the ledger cannot be told: %s", removed, error)

    def _learn(self, call: FileCall, first: int, end: int) -> Sequence[OffloadKey]:
        """Note which chunks are there. Returns them."""
        keys, results = call.keys[first:end], call.results[first:end]
        there: Sequence[OffloadKey] = keys
        gone: Sequence[OffloadKey] = ()
        if any(results):
            there = tuple(key for key, result in zip(keys, results, strict=True) if result in _THERE)
            gone = tuple(key for key, result in zip(keys, results, strict=True) if result in _GONE)
        self._tended.learn(call.place, () if call.is_noted else there, gone)
        return there


def _as_named_here(config: FsConfig, context: TierContext) -> TierContext:
    """Name the cache as vLLM's own fs tier does, where the root is shared with it."""
    if config.layout == "kvtier":
        return context
    if context.identity.native is None:
        raise TierError(
            f"tier {context.name}: layout is 'vllm', but this is no engine of vLLM's that could say what "
            "its own fs tier calls this cache: leave layout and integrity away"
        )
    _log.warning(
        "%s: layout 'vllm' with integrity 'none': files have no checksum and no identity, as those of vLLM's "
        "own fs tier. Damaged bytes, weights or quantisation that were changed under the same name, and "
        "engines that vLLM's own names do not tell apart CAN GIVE WRONG TOKENS",
        context.name,
    )
    return replace(context, identity=context.identity.native)


def _ill(results: array[int], first: int, end: int) -> list[int]:
    """Return the chunks whose files failed a check. Mostly there are none, and it costs little."""
    mine = results[first:end]
    if not any(mine):
        return []
    return [first + i for i, result in enumerate(mine) if result in _ILL]


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
