"""The file tier: each chunk a file, published whole, proven on each get."""

from __future__ import annotations

import asyncio
import errno
import logging
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final

import anyio

from kvtier import native
from kvtier.errors import StateError, TierError
from kvtier.keys import OffloadKey
from kvtier.tiers.base import Batch, Outcome, SecondaryTier, Status, TierConfig, TierContext, Usage
from kvtier.tiers.fs import layout, manifest
from kvtier.tiers.fs.call import FileCall, FileWork, Result, StopFlag
from kvtier.tiers.fs.config import FsConfig
from kvtier.tiers.fs.lanes import Lane, Run, join_all, run_alone, split, tell, until_done
from kvtier.tiers.fs.layout import BLOCK_BYTES
from kvtier.tiers.fs.manifest import LaneExecutor
from kvtier.tiers.fs.namespace import Epoch, Namespace, errno_name
from kvtier.tiers.fs.native_files import NativeFiles
from kvtier.tiers.fs.python_files import PythonFiles
from kvtier.tiers.fs.quarantine import Quarantine
from kvtier.tiers.fs.space import FileSystem, Space

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
    "min_free": "the file system has no more free bytes than min_free_bytes",
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
    "etimedout": "the file system did not answer",
}
_NO_ROOM: Final = frozenset({-errno.ENOSPC, -errno.EDQUOT})
_ILL: Final = frozenset({Result.TORN, Result.FOREIGN, Result.CHECKSUM})
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
    """

    epoch: int | None
    used_bytes: int | None
    limit_bytes: int | None
    quarantined: Mapping[str, int]
    direct_io: bool
    native: bool
    read_only: str | None


@dataclass(frozen=True, slots=True)
class _Opened:
    """What there is between opening and closing."""

    namespace: Namespace
    quarantine: Quarantine
    space: Space

    @staticmethod
    def make(config: FsConfig, context: TierContext) -> tuple[_Opened, Epoch]:
        """Open all of it. Blocks."""
        namespace, epoch = Namespace.open(config, context)
        try:
            # Besides the trailer's block a new file may need directories: the epoch's and two below.
            most_bytes = context.chunk_bytes + BLOCK_BYTES * (1 + layout.CHUNK_DIRECTORIES)
            space = Space(config, most_bytes, partial(FileSystem.of, namespace.root_fd))
        except OSError as error:
            epoch.retire()
            namespace.close()
            name = errno_name(error.errno or 0)
            raise TierError(f"tier {context.name}: {config.root_dir} cannot be measured ({name})") from error
        return _Opened(namespace, Quarantine(namespace.root_fd, namespace.name), space), epoch


class FsTier(SecondaryTier[FsConfig]):
    """Keeps chunks as files below one directory, which several engines may share.

    A put writes a file under a temporary name and renames it; a chunk that is there already is left
    as it is. A get reads the bytes into the slot and proves them by the trailer behind them. A file
    that fails is moved to the namespace's ``quarantine``. When a put or a get is cancelled, chunks
    that were not begun are left, and it returns when those under way have ended.

    A reset starts a new epoch (see ``namespace``). Other engines that have the same directory open
    go on with theirs until they reset or open again.

    Args:
        config: the settings.
        work: what reads and writes files, in place of the native helper or its fallback.
    """

    Config: ClassVar[type[TierConfig]] = FsConfig
    verifies: ClassVar[bool] = True
    medium = "disk"
    reasons: ClassVar[Mapping[str, str]] = _REASONS

    def __init__(self, config: FsConfig, work: FileWork | None = None) -> None:
        super().__init__(config)
        if work is None:
            work = NativeFiles(native.library) if native.library is not None else PythonFiles()
        self._work = work
        self._opened: _Opened | None = None
        self._epoch: Epoch | None = None
        self._serial = 0
        self._lanes: tuple[Lane, ...] = ()
        self._closing = StopFlag()
        self._recount: asyncio.TimerHandle | None = None
        self._resetting = anyio.Lock()

    # --------------------------------------------------------------------- opening, closing

    async def open(self, context: TierContext) -> None:
        """Make or open the place below ``root_dir``. See ``SecondaryTier.open``."""
        if context.chunk_bytes <= 0 or context.chunk_bytes % BLOCK_BYTES:
            raise TierError(
                f"tier {context.name}: chunk_bytes is {context.chunk_bytes}, not n * {BLOCK_BYTES}"
            )
        self._chunk_bytes = context.chunk_bytes
        self._tell_removed = context.removed
        self._start_lanes(context.name)
        try:
            await self._open_place(context)
            await self._first_count()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.aclose()
            raise

    async def aclose(self) -> None:
        """Wait until all threads have ended, and close what is open."""
        if self._recount is not None:
            self._recount.cancel()
        self._closing.set()
        if self._epoch is not None:
            self._epoch.retire()
            self._epoch = None
        if not self._lanes:
            return
        last = Lane(f"{self.config.type}-end", 1)  # the waiting blocks: a thread of its own
        _, cancelled = await run_alone(last, self._end)
        last.close()
        if cancelled is not None:
            raise cancelled

    def _start_lanes(self, name: str) -> None:
        threads = self.config.n_threads
        self._reads = Lane(f"{name}-read", threads, self._work.open_pool(threads))
        self._writes = Lane(f"{name}-write", threads, self._work.open_pool(threads))
        self._lookups = Lane(f"{name}-lookup", _LOOKUP_THREADS)
        self._upkeep = Lane(f"{name}-upkeep", 1)
        self._lanes = (self._reads, self._writes, self._lookups, self._upkeep)

    def _end(self) -> None:
        lanes, self._lanes = self._lanes, ()
        join_all(lanes)
        for lane in lanes:
            if lane.pool:
                self._work.close_pool(lane.pool)
        if self._opened is not None:
            self._opened.namespace.close()

    async def _open_place(self, context: TierContext) -> None:
        opened, cancelled = await run_alone(self._lookups, partial(_Opened.make, self.config, context))
        self._opened, self._epoch = opened
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
    def _here(self) -> _Opened:
        if self._opened is None:
            raise StateError("the file tier is not open")
        return self._opened

    async def _first_count(self) -> None:
        """Count the root in the background, and wait a moment: a small one is known at once."""
        counted = asyncio.Event()
        self._look_after_soon(counted)
        with anyio.move_on_after(_FIRST_COUNT_PATIENCE_S):
            await counted.wait()

    # ----------------------------------------------------------------------------- the verbs

    async def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        """Say which keys have a file. See ``SecondaryTier.contains``."""
        if self._epoch is None or not keys:
            return (False,) * len(keys)
        with self._epoch.hold() as place:
            call = FileCall(place, keys)
            parts = [(i, min(i + _LOOKUPS_A_JOB, len(keys))) for i in range(0, len(keys), _LOOKUPS_A_JOB)]
            await self._finish(self._lookups, call, parts, self._work.contains)
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
            await self._finish(self._writes, call, self._split(self._writes, len(batch)), self._put_job)
        return _outcome(call.results)

    async def get(self, batch: Batch) -> Outcome:
        """Read and prove chunks. See ``SecondaryTier.get``."""
        self._check(batch)
        if self._epoch is None:
            return Outcome.all(Status.ABSENT, len(batch))
        with self._epoch.hold() as place:
            call = FileCall(place, batch.keys, batch.slots, batch.memory, pool=self._reads.pool)
            await self._finish(self._reads, call, self._split(self._reads, len(batch)), self._get_job)
        return _outcome(call.results)

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
        async with self._resetting:
            old, self._epoch = self._epoch, None
            beyond = old.number if old is not None else 0
            if old is not None:
                old.retire()
            try:
                new, cancelled = await run_alone(self._lookups, partial(self._here.namespace.advance, beyond))
            except OSError as error:
                where, name = self.config.root_dir, errno_name(error.errno or 0)
                raise TierError(f"the file tier's reset could not be stored in {where}: {name}") from error
            self._epoch = new
            self._look_after_soon()
            if cancelled is not None:
                raise cancelled

    def usage(self) -> Usage | None:
        """Say how much of ``max_bytes`` is taken. See ``SecondaryTier.usage``."""
        if self._opened is None:
            return None
        return Usage(self._opened.space.last_used_bytes, self._opened.space.limit_bytes)

    def statistics(self) -> FsStatistics:
        """Return what the tier knows of itself. Does not block."""
        return FsStatistics(
            epoch=self._epoch.number if self._epoch is not None else None,
            used_bytes=self._here.space.used_bytes,
            limit_bytes=self._here.space.limit_bytes,
            quarantined=self._here.quarantine.counts(),
            direct_io=self._here.namespace.direct,
            native=isinstance(self._work, NativeFiles),
            read_only=self._here.namespace.read_only,
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

    def _put_job(self, call: FileCall, first: int, end: int) -> None:
        try:
            granted, reason = self._here.space.reserve(end - first)
        except OSError as error:  # the file system cannot even say how much room there is
            call.results[first:end] = array("i", [-(error.errno or errno.EIO)] * (end - first))
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

    def _refuse(self, call: FileCall, first: int, end: int, reason: Result) -> None:
        """Answer for chunks that there is no room for: those that are there already are well."""
        self._work.contains(call, first, end)
        for i in range(first, end):
            if call.results[i] == Result.ABSENT:
                call.results[i] = reason

    def _get_job(self, call: FileCall, first: int, end: int) -> None:
        self._work.get(call, first, end)
        ill = _ill(call.results, first, end)
        for i in ill:
            self._here.quarantine.set_aside(call, i)
        if ill:
            self._tell_removed([call.keys[i] for i in ill])

    def _discard_job(self, call: FileCall, first: int, end: int) -> None:
        self._here.space.removed(self._work.discard(call, first, end))

    # --------------------------------------------------------------------------------- upkeep

    def _look_after_soon(self, counted: asyncio.Event | None = None) -> None:
        """Have the root counted and swept now, and again from time to time."""
        if self._recount is not None:
            self._recount.cancel()
            self._recount = None
        if self._epoch is not None and not self._closing:
            loop = asyncio.get_running_loop()
            self._upkeep.submit(partial(self._look_after, self._epoch.number, loop, counted))

    def _look_after(self, epoch: int, loop: asyncio.AbstractEventLoop, counted: asyncio.Event | None) -> None:
        """Count the root and sweep what is left over. In the upkeep thread; it raises nothing."""
        self._try(self._count, "counted")
        if counted is not None:
            tell(loop, counted.set)
        self._try(partial(self._sweep, epoch), "swept")
        tell(loop, self._plan_next)

    def _plan_next(self) -> None:
        if self._recount is None and not self._closing:
            loop = asyncio.get_running_loop()
            self._recount = loop.call_later(self.config.recount_s, self._look_after_soon)

    def _count(self) -> None:
        self._here.space.count(
            partial(self._work.tree_bytes, self._here.namespace.root_fd, ".", self._closing)
        )

    def _sweep(self, epoch: int) -> None:
        self._here.space.removed(self._here.namespace.sweep(epoch, self._work, self._closing))

    def _try(self, upkeep: Callable[[], None], what: str) -> None:
        try:
            upkeep()
        except Exception:
            if not self._closing:
                _log.warning("%s could not be %s", self.config.root_dir, what, exc_info=True)


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
