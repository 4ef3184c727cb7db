"""The resources of an open file tier, and its puts within the root's bounds."""

from __future__ import annotations

import asyncio
import errno
from array import array
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from typing import Final

import anyio

from kvtier.errors import TierError
from kvtier.tiers._base import Batch, TierContext
from kvtier.tiers._waiting import wait_for_end
from kvtier.tiers.fs._config import FsConfig
from kvtier.tiers.fs._epoch import OpenEpoch
from kvtier.tiers.fs._files.native_call import (
    CORRUPT,
    FileCall,
    Result,
    StopFlag,
    Verb,
    chunks_with,
    errno_name,
)
from kvtier.tiers.fs._files.pool import NativePool
from kvtier.tiers.fs._files.workers import Workers, run
from kvtier.tiers.fs._layout import max_disk_bytes
from kvtier.tiers.fs._maintenance.evict import Evictor
from kvtier.tiers.fs._maintenance.maintenance import Maintenance
from kvtier.tiers.fs._maintenance.quarantine import Quarantine
from kvtier.tiers.fs._maintenance.sweep import MAX_FILES
from kvtier.tiers.fs._namespace import OpenNamespace
from kvtier.tiers.fs._quota.ledger import FOLDER, NO_ROOM, Ledger, SharedLedger, stat_file_system
from kvtier.tiers.fs._quota.quota import Quota
from kvtier.tiers.fs._root import Root

_NOT_A_FILE: Final = frozenset({errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ESPIPE})
_NO_LEDGER: Final = f": {FOLDER}/ledger is not a ledger: remove it, and kvtier makes a new one"
_FIRST_COUNT_PATIENCE_S: Final = 1.0
_THREADS: Final = 4
_CHUNKS_TO_OPEN: Final = 16
_FULL: Final = frozenset(-number for number in NO_ROOM)
_NEEDS_ROOM: Final = _FULL | {Result.MAX_BYTES, Result.MIN_FREE}
_FLUSH_S: Final = 0.02
_ROOM_SHARE: Final = 0.2  # share of a put's deadline for waiting for room


class Session:
    """An open file tier, in the event loop. ``open`` sets the attributes annotated below."""

    namespace: OpenNamespace
    quota: Quota
    quarantine: Quarantine
    pool: NativePool
    maintenance: Maintenance

    def __init__(self, config: FsConfig, context: TierContext) -> None:
        self._config = config
        self._context = context
        self._loop = asyncio.get_running_loop()
        self.closing = StopFlag()  # set when the tier closes
        self.epoch: OpenEpoch | None = None  # None also after a failed reset and after closing
        self._all_workers: list[Workers] = []
        self._work = AsyncExitStack()  # stops running work
        self._resources = ExitStack()  # closed in a thread, because closing blocks
        self._closed: asyncio.Future[None] | None = None
        self._serial = 0
        self._flush_is_due = False
        self.workers = self._start_workers("io", _THREADS)  # for the quarantine and for discards

    async def open(self) -> None:
        """Open the root, and wait briefly for its first count, which is enough for a small root.

        TierError if the root cannot be opened; the message has the tier, the path and the errno.
        """
        await run(self.workers, self._open_root)
        self._start_work()
        self.maintenance.start()
        if self.quota.should_be_counted:
            with anyio.move_on_after(_FIRST_COUNT_PATIENCE_S):
                await self.maintenance.counted.wait()

    async def close(self) -> None:
        """End all threads and close all files. See ``FsTier.aclose``."""
        if self.closing:
            if self._closed is not None:
                await asyncio.wait((self._closed,))
            return
        self.closing.set()
        if self.epoch is not None:
            self.epoch.retire()
            self.epoch = None
        try:
            await self._work.aclose()
        finally:
            for workers in self._all_workers:
                workers.close()
            closer = Workers(f"{self._context.name}-close", 1)  # Joining blocks, so it has its own thread.
            self._closed = closer.call(self._close)
            closer.close()
            await asyncio.wait((self._closed,))
            self._closed.result()

    async def set_aside(self, call: FileCall) -> list[int]:
        """Quarantine files that failed their checks. Return the positions of chunks without a file now."""
        corrupt = chunks_with(call.results, CORRUPT)
        return await run(self.workers, partial(self.quarantine.add_all, call, corrupt)) if corrupt else []

    async def put(self, epoch: OpenEpoch, batch: Batch) -> array[int]:
        """Put missing chunks; retry refused ones for a part of the deadline. Return each chunk's result."""
        give_up_at = self._loop.time() + _ROOM_SHARE * self._config.deadline_s
        call = await self._put(epoch, batch)
        if corrupt := await self.set_aside(call):
            call.take_results(corrupt, await self._put(epoch, batch.part(corrupt)))
        while refused := chunks_with(call.results, _NEEDS_ROOM):
            if not await self.maintenance.room_made(give_up_at):
                break
            call.take_results(refused, await self._put(epoch, batch.part(refused)))
        return call.results

    async def _put(self, epoch: OpenEpoch, batch: Batch) -> FileCall:
        call, removals = self._new_call(epoch, batch), self.quota.accounts.removals
        if self.quota.reserve_ahead(len(call)):
            await self._write(epoch, call)
        else:
            await self._put_missing(epoch, call, batch)
        epoch.learn(call)
        if full := chunks_with(call.results, _FULL):
            note = partial(self.maintenance.note_full, -call.results[full[0]], removals)
            await run(self._ledger_worker, note)
        if self.quota.excess:
            self.maintenance.make_room_soon()
        return call

    async def _put_missing(self, epoch: OpenEpoch, call: FileCall, batch: Batch) -> None:
        """Put the chunks without a file, as far as there is room.

        Existing files must not reserve any: chunks would be evicted for it.
        """
        await self.pool.run(call, Verb.CONTAINS, epoch.index)
        missing = chunks_with(call.results, {Result.ABSENT})
        if not missing:
            return
        reserving = self._ledger_worker.call(partial(self._reserve, len(missing)))
        cancelled = await wait_for_end(reserving)
        granted, reason = reserving.result()
        if cancelled is not None:
            self._settle(granted, 0)
            raise cancelled
        for i in missing[granted:]:
            call.results[i] = reason
        if granted:
            part = self._new_call(epoch, batch.part(missing[:granted]))
            await self._write(epoch, part)
            call.take_results(missing[:granted], part)

    async def _write(self, epoch: OpenEpoch, call: FileCall) -> None:
        """Put chunks into reserved room, and settle the reservation, cancelled or not."""
        try:
            await self.pool.run(call, Verb.PUT, epoch.index)
        finally:
            self._settle(len(call), call.added)

    def _new_call(self, epoch: OpenEpoch, batch: Batch) -> FileCall:
        self._serial += len(batch)
        return FileCall(epoch.place, batch.keys, batch.slots, batch.memory, self._serial - len(batch))

    def _reserve(self, chunks: int) -> tuple[int, int]:
        """Reserve room. Return for how many chunks, and the result of the rest. Blocks."""
        try:
            return self.quota.reserve(chunks)
        except OSError as error:  # the file system cannot report its room
            return 0, -(error.errno or errno.EIO)

    def _settle(self, granted: int, added: int) -> None:
        """End a reservation. A timer or the next put reports it to the ledger."""
        if granted:
            self.quota.end_reservation(granted, added)
            if not self._flush_is_due:
                self._flush_is_due = True
                self._loop.call_later(_FLUSH_S, self._flush_soon)

    def _flush_soon(self) -> None:
        self._flush_is_due = False
        if self.quota.has_news:
            self._ledger_worker.submit(self.quota.flush)

    def _start_workers(self, name: str, threads: int = 1) -> Workers:
        self._all_workers.append(Workers(f"{self._context.name}-{name}", threads))
        return self._all_workers[-1]

    def _open_root(self) -> None:
        namespace, self.epoch = self._open_namespace()
        self._resources.callback(namespace.close)
        try:
            ledger = _open_ledger(namespace)
            self._resources.callback(ledger.close)
            self.quota = Quota(self._config, max_disk_bytes(self._context.chunk_bytes), ledger)
        except OSError as error:
            name, hint = errno_name(error.errno), _NO_LEDGER if error.errno in _NOT_A_FILE else ""
            root = self._config.root_dir
            raise TierError(f"tier {self._context.name}: {root} cannot be measured ({name}){hint}") from error
        self._resources.callback(self.quota.flush)
        if namespace.is_new:  # The ledger may count files that were removed by hand.
            self.quota.doubt()
        self.namespace = namespace
        self.quarantine = Quarantine(namespace.root_fd, namespace.name, self._context.chunk_bytes, MAX_FILES)

    def _open_namespace(self) -> tuple[OpenNamespace, OpenEpoch]:
        """Open the namespace. If the file system is full, evict a few chunks first: opening needs blocks."""
        try:
            return OpenNamespace.open(self._config, self._context)
        except TierError as error:
            number = getattr(error.__cause__, "errno", None)
            if number not in NO_ROOM or self._config.eviction == "none":
                raise
        with Root(self._config.root_dir) as root:
            Evictor(root.fd, self.closing).make_room(
                _CHUNKS_TO_OPEN * max_disk_bytes(self._context.chunk_bytes)
            )
        return OpenNamespace.open(self._config, self._context)

    def _start_work(self) -> None:
        config, name = self._config, self._context.name
        try:
            self.pool = NativePool(config.n_threads, config.n_threads)
        except OSError as error:
            raise TierError(f"tier {name}: {error.strerror} (n_threads={config.n_threads})") from error
        self._work.push_async_callback(self.pool.drain)
        self._resources.callback(self.pool.close)
        assert self.epoch is not None
        self.maintenance = Maintenance(
            config,
            self._context,
            self.namespace,
            self.quota,
            self.closing,
            self.epoch,
            slow=self._start_workers("maintain"),
            quick=self._start_workers("evict"),
        )
        self._work.callback(self.maintenance.stop)
        self._ledger_worker = self._start_workers("ledger")  # waits for the ledger's lock

    def _close(self) -> None:
        for workers in self._all_workers:
            workers.join()
        self._resources.close()


def _open_ledger(namespace: OpenNamespace) -> Ledger:
    """Open the root's ledger. If it cannot be written, the root is only read. Blocks."""
    if namespace.read_only is None:
        try:
            return SharedLedger(namespace.root_fd)
        except OSError as error:
            namespace.accept_read_only(error)
    return Ledger(partial(stat_file_system, namespace.root_fd))
