"""Puts within the bounds of a root: reserving room, writing, and settling what was taken."""

from __future__ import annotations

import asyncio
import errno
from array import array
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

from kvtier.tiers._base import Batch
from kvtier.tiers._drain import wait_for_end
from kvtier.tiers.fs._config import FsConfig
from kvtier.tiers.fs._files.call import FileCall, Result, Verb
from kvtier.tiers.fs._files.pool import NativePool
from kvtier.tiers.fs._files.workers import Workers
from kvtier.tiers.fs._maintenance.known import KnownChunks
from kvtier.tiers.fs._maintenance.maintenance import Maintenance
from kvtier.tiers.fs._outcomes import chunks_with
from kvtier.tiers.fs._quota.quota import Quota

_NEEDS_ROOM: Final = frozenset({Result.MAX_BYTES, Result.MIN_FREE})
_FLUSH_S: Final = 0.02
_ROOM_SHARE: Final = 0.2  # of its deadline a put waits for room


class Puts:
    """The puts of an open tier. In the event loop. ``set_aside`` is that of ``Session``."""

    def __init__(
        self,
        config: FsConfig,
        quota: Quota,
        pool: NativePool,
        maintenance: Maintenance,
        set_aside: Callable[[FileCall], Awaitable[list[int]]],
        name: str,
    ) -> None:
        self.worker: Final = Workers(f"{name}-ledger", 1)  # waits for the ledger's lock
        self._wait_s = _ROOM_SHARE * config.deadline_s
        self._quota = quota
        self._pool = pool
        self._maintenance = maintenance
        self._set_aside = set_aside
        self._loop = asyncio.get_running_loop()
        self._serial = 0
        self._flush_is_due = False

    async def put(self, known: KnownChunks, batch: Batch) -> array[int]:
        """Put the chunks that are not there, and for a part of the deadline again those that a bound refuses.

        Returns what became of each.
        """
        give_up_at = self._loop.time() + self._wait_s
        call = await self._put(known, batch)
        if corrupt := await self._set_aside(call):
            await self._put_again(known, call, batch, corrupt)
        while refused := chunks_with(call.results, _NEEDS_ROOM):
            if not await self._maintenance.room_made(give_up_at):
                break
            await self._put_again(known, call, batch, refused)
        return call.results

    async def _put(self, known: KnownChunks, batch: Batch) -> FileCall:
        call = self._new_call(known, batch)
        if self._quota.reserve_ahead(len(call)):
            await self._write(known, call)
        else:
            await self._put_missing(known, call, batch)
        known.learn(call)
        if self._quota.known.excess:
            self._maintenance.make_room_soon()
        return call

    async def _put_again(
        self, known: KnownChunks, call: FileCall, batch: Batch, chunks: Sequence[int]
    ) -> None:
        call.take_results(chunks, await self._put(known, batch.part(chunks)))

    async def _put_missing(self, known: KnownChunks, call: FileCall, batch: Batch) -> None:
        """Put the chunks that have no file, as many as there is room for.

        Reserves nothing for the others, or chunks would be evicted for it.
        """
        await self._pool.run(call, Verb.CONTAINS, known.index)
        missing = chunks_with(call.results, {Result.ABSENT})
        if not missing:
            return
        reserving = self.worker.call(partial(self._reserve, len(missing)))
        cancelled = await wait_for_end(reserving)
        granted, reason = reserving.result()
        if cancelled is not None:
            self._settle(granted, 0)
            raise cancelled
        for i in missing[granted:]:
            call.results[i] = reason
        if granted:
            part = self._new_call(known, batch.part(missing[:granted]))
            await self._write(known, part)
            call.take_results(missing[:granted], part)

    async def _write(self, known: KnownChunks, call: FileCall) -> None:
        """Put chunks that room is reserved for, and settle what they took, cancelled or not."""
        try:
            await self._pool.run(call, Verb.PUT, known.index)
        finally:
            self._settle(len(call), call.added)

    def _new_call(self, known: KnownChunks, batch: Batch) -> FileCall:
        self._serial += len(batch)
        return FileCall(known.place, batch.keys, batch.slots, batch.memory, self._serial - len(batch))

    def _reserve(self, chunks: int) -> tuple[int, int]:
        """Reserve room. Returns for how many chunks, and the result of the others. Blocks."""
        try:
            return self._quota.reserve(chunks)
        except OSError as error:  # the file system cannot even say how much room there is
            return 0, -(error.errno or errno.EIO)

    def _settle(self, granted: int, added: int) -> None:
        """End a reservation. A timer or the next put reports it to the other engines."""
        if granted:
            self._quota.settle(granted, added)
            if not self._flush_is_due:
                self._flush_is_due = True
                self._loop.call_later(_FLUSH_S, self._flush_soon)

    def _flush_soon(self) -> None:
        self._flush_is_due = False
        if self._quota.has_news:
            self.worker.submit(self._quota.flush)
