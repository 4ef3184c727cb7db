"""The file tier: chunks as files below a directory, published whole and checked on each get."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final

import anyio
import anyio.lowlevel

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
from kvtier.tiers._faults import require_answers
from kvtier.tiers._waiting import wait_for_end
from kvtier.tiers.fs._config import FsConfig
from kvtier.tiers.fs._epoch import OpenEpoch
from kvtier.tiers.fs._files import chunk_files
from kvtier.tiers.fs._files.native_call import REASONS, THERE, FileCall, Result, Verb, errno_name, outcome_of
from kvtier.tiers.fs._files.workers import run
from kvtier.tiers.fs._layout import BLOCK_BYTES
from kvtier.tiers.fs._quota.ledger import NO_ROOM
from kvtier.tiers.fs._session import Session

_NOTED_AT_ONCE: Final = 512  # used chunks; each takes some 2 us of the event loop
_KNOWLEDGE: Final = (Knowledge.UNKNOWN, Knowledge.PRESENT)
_HAS_FILE: Final = frozenset({Result.EXISTS, Result.TORN})


@dataclass(frozen=True, slots=True)
class FsStatistics:
    """The state of a file tier."""

    epoch: int | None  # that it reads and writes; None after a failed reset
    used_bytes: int | None  # below the root; None before the first count
    limit_bytes: int | None  # allowed below the root; None before the default is known
    quarantined: Mapping[str, int]  # files that failed a check since the tier opened, by reason
    direct_io: bool  # whether files bypass the page cache
    read_only: str | None  # name of the errno that prevents writes; None if the root can be written
    known_chunks: int  # in the index, without asking the disk
    evicted_chunks: int  # by this process, of all namespaces
    evicted_bytes: int  # removed by this process to make room, leftovers included


class FsTier(SecondaryTier[FsConfig]):
    """Keeps chunks as files below one directory, which several engines may share.

    A put does not rewrite a chunk that exists. A get reads the bytes into the slot, checks them by their
    trailer, and moves a damaged file to the namespace's ``quarantine``. A cancelled put or get starts no more
    chunks, and returns when those in flight have ended.

    A reset starts a new epoch. Other engines with the same directory keep theirs until they reset or reopen.
    """

    Config: ClassVar[type[TierConfig]] = FsConfig
    verifies: ClassVar[bool] = True
    medium = "disk"
    reasons: ClassVar[Mapping[str, str]] = REASONS

    def __init__(self, config: FsConfig) -> None:
        super().__init__(config)
        self._session: Session | None = None
        self._chunk_bytes = 0
        self._resetting = anyio.Lock()

    async def open(self, context: TierContext) -> None:
        """Make or open the directories below ``root_dir``. See ``SecondaryTier.open``."""
        if context.chunk_bytes <= 0 or context.chunk_bytes % BLOCK_BYTES:
            raise TierError(
                f"tier {context.name}: chunk_bytes is {context.chunk_bytes}, not n * {BLOCK_BYTES}"
            )
        self._chunk_bytes = context.chunk_bytes
        self._report_removed = context.removed
        session = Session(self.config, context)
        try:
            await session.open()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await session.close()
            raise
        self._session = session

    async def aclose(self) -> None:
        """End all threads and close all files.

        If cancelled, do not wait for a hung disk: a thread closes the files when the disk answers.
        """
        if self._session is not None:
            await self._session.close()

    def _opened(self) -> Session:
        if self._session is None:
            raise StateError("the file tier is not open")
        return self._session

    def known(self, keys: Sequence[OffloadKey]) -> Sequence[Knowledge]:
        """Return PRESENT or UNKNOWN for each key. See ``SecondaryTier.known``, and ``Index``."""
        session = self._session
        if session is None or session.epoch is None:
            return (Knowledge.UNKNOWN,) * len(keys)
        return [_KNOWLEDGE[found] for found in session.epoch.index.known(keys)]

    async def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        """Return which keys have a file. See ``SecondaryTier.contains``."""
        session = self._opened()
        if session.epoch is None or not keys:
            return (False,) * len(keys)
        with session.epoch.hold() as epoch:
            call = FileCall(epoch.place, keys)
            await session.pool.run(call, Verb.CONTAINS, epoch.index)
            epoch.learn(call)
        require_answers(Counter(errno_name(-result) for result in call.results if result < 0), len(keys))
        return [result in _HAS_FILE for result in call.results]

    async def put(self, batch: Batch) -> Outcome:
        """Write the chunks without a file. See ``SecondaryTier.put``."""
        session = self._opened()
        self._check(batch)
        if session.namespace.read_only is not None:
            return Outcome.all(Status.REFUSED, len(batch), session.namespace.read_only)
        if session.epoch is None:
            return Outcome.all(Status.REFUSED, len(batch), "reset_failed")
        if not len(batch):
            return Outcome(())
        with session.epoch.hold() as epoch:
            results = await session.put(epoch, batch)
            there = [key for key, result in zip(batch.keys, results, strict=True) if result in THERE]
            session.maintenance.uses.note_put(there)
        return outcome_of(results)

    async def get(self, batch: Batch) -> Outcome:
        """Read and check chunks. See ``SecondaryTier.get``."""
        session = self._opened()
        self._check(batch)
        if session.epoch is None or not len(batch):
            return Outcome.all(Status.ABSENT, len(batch))
        with session.epoch.hold() as epoch:
            call = FileCall(epoch.place, batch.keys, batch.slots, batch.memory)
            await session.pool.run(call, Verb.GET, epoch.index)
            session.maintenance.uses.note(epoch.learn(call), in_order=True)
            if corrupt := await session.set_aside(call):
                self._report_removed([call.keys[i] for i in corrupt])
        return outcome_of(call.results)

    async def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Note uses of ``keys``; their files' times are set later. See ``SecondaryTier.touch``."""
        for first in range(0, len(keys), _NOTED_AT_ONCE):
            if self._session is not None and self._session.epoch is not None:
                self._session.maintenance.uses.note(keys[first : first + _NOTED_AT_ONCE], in_order=False)
            await anyio.lowlevel.checkpoint()

    async def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Remove the files of ``keys``. See ``SecondaryTier.discard``."""
        session = self._opened()
        if session.epoch is None or session.namespace.read_only is not None or not keys:
            return
        with session.epoch.hold() as epoch:
            call = FileCall(epoch.place, keys)
            await run(session.workers, partial(self._remove, session, call, epoch))
        if failed := Counter(errno_name(-result) for result in call.results if result < 0):
            session.maintenance.warn("discard", f"chunks could not be discarded: {dict(failed)}")

    async def reset(self) -> None:
        """Start a new epoch. See ``SecondaryTier.reset``.

        Raises:
            TierError: the epoch could not be stored. Until a reset succeeds or the tier is reopened, all gets
                miss and all puts are refused. If not even an empty file could be made in the namespace,
                reopening brings back older chunks: log it.
        """
        session = self._opened()
        async with self._resetting:
            old, session.epoch = session.epoch, None
            if old is not None:
                old.retire()
            after = old.number if old is not None else 0
            advancing = session.workers.call(partial(session.namespace.advance, after))
            cancelled = await wait_for_end(advancing)
            try:
                new = advancing.result()
            except OSError as error:
                if cancelled is not None:
                    raise cancelled from error
                if error.errno in NO_ROOM:
                    await run(session.workers, partial(session.maintenance.note_full, error.errno))
                where, name = self.config.root_dir, errno_name(error.errno)
                raise TierError(f"the file tier's reset could not be stored in {where}: {name}") from error
            if session.closing:
                new.retire()
            else:
                session.epoch = new
                session.maintenance.follow(new)
            if cancelled is not None:
                raise cancelled

    def usage(self) -> Usage | None:
        """Return the used bytes and the limit. See ``SecondaryTier.usage``."""
        if self._session is None:
            return None
        return Usage(self._session.quota.used_bytes, self._session.quota.limit)

    def statistics(self) -> FsStatistics:
        """Return the state of the tier. Does not block."""
        session = self._opened()
        return FsStatistics(
            epoch=session.epoch.number if session.epoch is not None else None,
            used_bytes=session.quota.used_bytes,
            limit_bytes=session.quota.limit,
            quarantined=session.quarantine.counts(),
            direct_io=session.namespace.direct,
            read_only=session.namespace.read_only,
            known_chunks=len(session.epoch.index) if session.epoch is not None else 0,
            evicted_chunks=session.maintenance.evicted_chunks,
            evicted_bytes=session.maintenance.evicted_bytes,
        )

    def _check(self, batch: Batch) -> None:
        memory = batch.memory
        if memory.chunk_bytes != self._chunk_bytes or memory.address % BLOCK_BYTES:
            raise ValueError(
                f"slots have {memory.chunk_bytes} bytes at {memory.address:#x}; the tier was opened for "
                f"{self._chunk_bytes} bytes, aligned to {BLOCK_BYTES}"
            )

    def _remove(self, session: Session, call: FileCall, epoch: OpenEpoch) -> None:
        """Remove files and report their bytes to the ledger. Blocks."""
        since = session.quota.mark()
        removed = chunk_files.discard(call)
        epoch.forget(call.keys)
        try:
            session.quota.removed(removed, since)
        except OSError as error:  # the bytes count as used until the next count
            text = f"{removed} bytes were removed, and the ledger cannot be updated: {error}"
            session.maintenance.warn("removed", text)
