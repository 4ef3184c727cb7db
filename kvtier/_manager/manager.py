"""TieringManager: the asyncio interface of kvtier, for programs with their own event loop.

The event loop owns the core and runs the tiers; device copies run on their own threads or streams. A task
that is cancelled during a copy waits for the end of the copy, because only then can its slots be reused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from operator import index
from warnings import warn

import anyio
import anyio.to_thread

from kvtier._core.messages import Event, SlotsReady, TierDown, TierUp
from kvtier._core.requests import Request
from kvtier._core.states import Lookup
from kvtier._core.tiering import Tiering
from kvtier._core.transfers import Pinned, Reservation
from kvtier._device._engine import TransferEngine
from kvtier._execution.driver import Driver
from kvtier._execution.executor import CLOSE_S, LAST_STEP_S, Executor, NamedTier, Post
from kvtier._execution.gauges import GaugeReader, Gauges
from kvtier._identity import Identity
from kvtier._isolation.remote import RemoteExecutor
from kvtier._log import GuardedLogger
from kvtier._manager.checks import CallChecks
from kvtier._manager.device_copies import DeviceCopies
from kvtier._manager.handles import Acquired, Written
from kvtier._manager.statistics import Statistics
from kvtier._memory.region import Region
from kvtier._memory.slot_checksums import SlotChecksums
from kvtier._telemetry.dropped_puts import DroppedPuts
from kvtier.keys import OffloadKey
from kvtier.tiers._loop_clock import LoopClock
from kvtier.tiers._waiting import call_soon, until_done

logger = GuardedLogger("kvtier.manager")

_FIRST_SLOTS_S = 10.0
_MOST = 10**9


class TieringManager:
    """Stores, looks up and loads chunks. An async context manager, returned by ``kvtier.open_manager``.

    Call it only from the event loop that entered it. Elsewhere, before it is entered and after ``aclose``,
    calls raise StateError. A wrong argument raises TypeError or ValueError before anything starts.
    """

    def __init__(
        self,
        *,
        core: Tiering,
        tiers: Sequence[NamedTier],
        identity: Identity,
        region: Region,
        engine: TransferEngine,
        blocks_per_chunk: int,
        num_blocks: Sequence[int],
        drain_s: float,
        close_s: float = CLOSE_S,
        slot_checksums: SlotChecksums | None = None,
        make_executor: Callable[[Post], Executor | RemoteExecutor] | None = None,
    ) -> None:
        self._core = core
        self._region = region
        self._engine = engine
        self._checks = CallChecks(blocks_per_chunk, num_blocks)
        self._drain_s = drain_s
        self._close_s = close_s
        self._slot_checksums = slot_checksums
        self._clock = clock = LoopClock()
        make = make_executor or partial(
            Executor, tiers, identity, region, slot_checksums=slot_checksums, clock=clock
        )
        self._executor = make(self._on_event)
        self._driver = Driver(
            core,
            self._executor.submit,
            logger,
            slot_checksums=slot_checksums,
            has_damage=lambda: engine.audits.failed > 0,
            clock=clock.now,
        )
        self._serving: asyncio.Future[None] | None = None
        self._serves = anyio.Event()
        self._closing = anyio.Event()
        self._changed = anyio.Event()
        self._copies = DeviceCopies(engine, self._checks, self._notify)
        self._counts: dict[tuple[str, ...], float] = {}

    async def __aenter__(self) -> TieringManager:
        loop = self._checks.bind()
        first_slots = anyio.Event()

        def slots_ready(slots: range) -> None:
            call_soon(loop, partial(self._on_event, SlotsReady(slots, is_last=not slots)))
            call_soon(loop, first_slots.set)

        self._region.populate(slots_ready)
        self._clock.start()
        self._engine.set_wakeup(lambda: call_soon(loop, self._copies.collect))
        self._serving = asyncio.ensure_future(self._serve())
        self._checks.is_open = True
        try:
            await self._serves.wait()
            if self._serving.done():
                self._serving.result()  # raises the error of the start
            with anyio.move_on_after(_FIRST_SLOTS_S):
                await first_slots.wait()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    # --- what engines call -----------------------------------------------------------------------

    async def lookup(self, keys: Sequence[OffloadKey]) -> int:
        """Return how many leading ``keys`` a load would find.

        Promotes chunks that only secondary tiers have, within ``promotion_budget``. Returns the
        chunks that have arrived within ``request_deadline_s``.
        """
        keys = self._checks.keys(keys)
        with self._request() as request:
            return await self._find(keys, request)

    async def locate(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Return for each key whether any tier probably has it. Promotes nothing.

        Keys that are not known within ``request_deadline_s`` count as absent.
        ``load_gate`` has no effect.
        """
        keys = self._checks.keys(keys)
        with self._request() as request:
            request.locates = True
            found: dict[OffloadKey, bool] = {}
            epoch = self._core.epoch
            while not self._scan_each(keys, request, found):
                self._driver.settle()
                if self._scan_each(keys, request, found):
                    break
                await self._next_change()
                if epoch != self._core.epoch:  # a reset has hidden the chunks found so far
                    epoch = self._core.epoch
                    found.clear()
            return [found[key] for key in keys]

    @asynccontextmanager
    async def acquire(self, keys: Sequence[OffloadKey]) -> AsyncIterator[Acquired]:
        """Yield the leading chunks that are found, pinned in the primary tier until the block ends.

        Chunks of a load that is still running then stay pinned until it ends.
        """
        keys = self._checks.keys(keys)
        with self._request() as request:
            count = await self._find(keys, request)
            pinned = self._core.acquire(keys[:count], request)
            acquired = Acquired(keys[:count], pinned, self._region, self._copies, self._end_load)
            self._driver.settle()
            try:
                yield acquired
            finally:
                acquired._give_back()

    async def load(self, keys: Sequence[OffloadKey], blocks: Sequence[int]) -> int:
        """Copy the leading chunks that are found to the device.

        Args:
            keys: offload keys in the order of the prompt.
            blocks: block ids, ``blocks_per_chunk`` for each key.

        Returns:
            The number of chunks loaded. The blocks of the others are unchanged.

        Raises:
            TransferError: the device copy failed, or a reset came before its end; the blocks' contents are
                undefined. After DeviceStuckError the copy may even continue.
            TypeError, ValueError: ``keys`` or ``blocks`` is wrong, or they do not fit each other.
        """
        keys = self._checks.keys(keys)
        blocks = self._checks.blocks(keys, blocks)
        async with self.acquire(keys) as acquired:
            if acquired.keys:
                await acquired.load(blocks[: len(acquired.keys) * self._checks.blocks_per_chunk])
            return len(acquired.keys)

    async def store(self, keys: Sequence[OffloadKey], blocks: Sequence[int]) -> int:
        """Copy chunks from the device to the primary tier. Puts into the secondary tiers follow.

        Do not write to the blocks while this runs.

        Args:
            keys: offload keys in the order of the prompt. Chunks that the primary tier has are skipped.
            blocks: block ids, ``blocks_per_chunk`` for each key.

        Returns:
            The number of chunks copied: fewer than the new ones if there was no room.

        Raises:
            TransferError: the device copy failed; nothing was stored. After DeviceStuckError the copy may
                continue, so its slots stay out of use.
            TypeError, ValueError: ``keys`` or ``blocks`` is wrong, or they do not fit each other.
        """
        keys = self._checks.keys(keys)
        blocks = self._checks.blocks(keys, blocks)
        reservation = self._core.reserve(keys)
        if reservation is None or not reservation.keys:
            if reservation is not None:
                self._core.abort(reservation)
            self._driver.settle()  # a tier may want what is offered again
            return 0
        place = {key: number for number, key in enumerate(keys)}
        width = self._checks.blocks_per_chunk
        mine = [block for key in reservation.keys for block in blocks[place[key] * width :][:width]]
        with self._filling(reservation):
            try:
                await self._copies.store(reservation.keys, reservation.slots, mine)
            finally:
                self._driver.inspect(reservation)
        return 0 if self._core.refusal else len(reservation.keys)

    @asynccontextmanager
    async def write(self, keys: Sequence[OffloadKey]) -> AsyncIterator[Written]:
        """Yield slots for the ``keys`` that the primary tier lacks. The caller fills them.

        The chunks are stored when the block ends, and their puts into the secondary tiers follow. If it
        raises, nothing is stored, and the slots stay out of use until all views of them are gone: a thread
        may still write. If space is short, the leading keys get slots, or none does.
        """
        keys = self._checks.keys(keys)
        reservation = self._core.reserve(keys)
        if reservation is None:
            yield Written((), (), self._region)
            return
        if self._slot_checksums is not None:
            self._slot_checksums.forget(reservation.slots)  # the caller fills them: no store or get does it
        written = Written(reservation.keys, reservation.slots, self._region)
        with self._filling(reservation, written):
            try:
                yield written
            finally:
                written._give_back()

    def report_computed(self, chunks: int, seconds: float, *, first: int = 0) -> None:
        """Report how long computing took: lookups end before chunks that are faster to compute than to load.

        See ``load_gate``. Without any report, everything is loaded.

        Args:
            chunks: how many chunks of a prompt were computed.
            seconds: how long that took.
            first: index of the first of them in the prompt.

        Raises:
            TypeError, ValueError: ``chunks`` is below 1, ``seconds`` or ``first`` below 0, or one no number.
        """
        self._checks.require_open()
        chunks, first = index(chunks), index(first)
        if not (1 <= chunks <= _MOST and 0 <= seconds <= _MOST and 0 <= first <= _MOST):
            raise ValueError(
                f"report_computed({chunks}, {seconds}, first={first}): chunks must be at least 1, seconds "
                f"and first at least 0, and all of them at most {_MOST}"
            )
        self._core.note_computed(first + chunks // 2, chunks, float(seconds))

    async def reset(self) -> None:
        """Hide everything stored so far, permanently and in every tier. For new weights.

        Returns when every tier has been reset. A tier that fails, or takes longer than its ``deadline_s``,
        is not used until its reset succeeds.
        """
        self._checks.require_open()
        self._driver.reset()
        self._notify()
        await self._resets_ended()

    def statistics(self) -> Statistics:
        """Return the current state and the counts since the manager was opened. Works when closed, too."""
        self._checks.require_owner()
        for name, count in self._core.take_counts().items():
            self._counts[name] = self._counts.get(name, 0) + count
        if self._slot_checksums is not None:
            self._counts["audited",] = self._engine.audits.chunks
        return Statistics.of(self._core, self._counts)

    def _metrics(self) -> tuple[Mapping[tuple[str, ...], float], Gauges, int]:
        """Return the counts, the gauges and the bytes of a chunk, for ``prometheus_collector``."""
        chunk_bytes = self._region.chunk_bytes
        reader = GaugeReader(self._core, self._executor.activity, chunk_bytes)
        return self.statistics().counts, dict(zip(reader.gauges, reader.read(), strict=True)), chunk_bytes

    async def drain(self) -> None:
        """Wait until every copy, put and get in flight has ended."""
        self._checks.require_open()
        await self._drain()

    async def _drain(self) -> None:
        while self._copies.in_flight:
            await self._changed.wait()
        self._driver.settle()  # puts that wait for the end of a store
        while self._copies.in_flight or not self._core.is_idle:
            await self._changed.wait()

    async def drain_puts(self) -> None:
        """Wait until every put in flight has ended or passed its deadline. Gets are not waited for."""
        self._checks.require_open()
        self._driver.settle()
        while any(transfer.is_put for transfer in self._core.shared.running):
            await self._next_change()
            self._driver.settle()

    async def aclose(self) -> None:
        """Drain for at most ``drain_on_shutdown_s``, and release everything.

        Lookups in flight end with the chunks that have arrived; device copies run to their end. Leaving
        ``async with`` calls it. It may be called again. A tier that does not end seconds after its
        cancellation is abandoned, with an error in the log. It may still touch slots, so the primary tier's
        memory stays allocated until the process ends. Its task stays in the event loop too, and
        ``asyncio.run`` waits for it.
        """
        self._checks.require_owner()
        if not self._checks.is_open:
            return
        self._checks.is_open = False
        end_by_s = time.monotonic() + self._drain_s + self._close_s
        self._executor.end_by_s = end_by_s - LAST_STEP_S
        dropped = DroppedPuts(self._core, self._drain_s, logger, lambda: self.statistics().counts)
        try:
            with anyio.move_on_after(self._drain_s):
                await self._drain()
                await self._resets_ended()
        finally:
            self._forget_tiers()
            self._closing.set()
            try:
                await until_done(asyncio.ensure_future(self._close(end_by_s)))
            finally:
                self._driver.close()
                self._clock.stop()
                dropped.warn()

    # --- inside ----------------------------------------------------------------------------------

    def _end_load(self, pinned: Pinned) -> None:
        self._driver.end_load(pinned)
        self._notify()

    @contextmanager
    def _request(self) -> Iterator[Request]:
        request = Request()
        try:
            yield request
        finally:
            self._core.close(request)
            self._driver.settle()
            self._notify()  # chunks held for this request are free for other requests

    @contextmanager
    def _filling(self, reservation: Reservation, written: Written | None = None) -> Iterator[None]:
        """Store the slots that the block fills; if it raises, nothing is stored.

        Slots that an abandoned copy, or a thread with a view, may still write to stay out of use.
        """
        try:
            yield
            self._driver.settle()  # a tier with overdue puts gets no more
        except BaseException:
            is_used = not self._copies.stuck_slots.isdisjoint(reservation.slots)
            if not is_used and (written is None or not written._used_views):
                self._core.abort(reservation)
            else:
                self._core.drop_unfilled(reservation, dict.fromkeys(reservation.slots, "failed"))
                if written is not None:
                    written._when_unused(partial(self._abort_soon, reservation))
            raise
        else:
            self._driver.commit(reservation)
        finally:
            self._driver.dispatch()
            self._notify()

    def _abort_soon(self, reservation: Reservation) -> None:
        """Free the slots of a write that was given up. Any thread may call it, more than once."""
        assert self._checks.loop is not None
        call_soon(self._checks.loop, partial(self._abort, reservation))

    def _abort(self, reservation: Reservation) -> None:
        if reservation in self._core.handles:
            self._core.abort(reservation)
            self._notify()

    async def _find(self, keys: Sequence[OffloadKey], request: Request) -> int:
        """Look up until nothing is pending; return how many leading keys are HIT in this very round."""
        hits, pending = self._scan(keys, request)
        while pending:
            self._driver.settle()
            hits, pending = self._scan(keys, request)  # a deadline, or a tier that is down, answers at once
            if pending:
                await self._next_change()
                hits, pending = self._scan(keys, request)
        return hits

    def _scan(self, keys: Sequence[OffloadKey], request: Request) -> tuple[int, bool]:
        pending = False
        for count, key in enumerate(keys):
            answer = self._core.lookup(key, request)
            if answer is Lookup.MISS:
                return count, pending
            pending = pending or answer is not Lookup.HIT
        return len(keys), pending

    def _scan_each(self, keys: Sequence[OffloadKey], request: Request, found: dict[OffloadKey, bool]) -> bool:
        """Look up the keys that are not in ``found``, and add what is known. Return whether all are known."""
        for key in keys:
            if key in found:
                continue  # otherwise each round would count the miss again
            answer = self._core.lookup(key, request)
            if answer is Lookup.HIT or key in request.located:
                found[key] = True
            elif answer is Lookup.MISS:
                found[key] = False
        return all(key in found for key in keys)

    async def _resets_ended(self) -> None:
        while not self._core.is_reset:
            self._executor.submit(())  # a tier process that has just started may have missed them
            await self._changed.wait()

    async def _next_change(self) -> None:
        deadline_s = self._core.next_deadline_s()
        wait_s = None if deadline_s is None else max(0.0, deadline_s - self._clock.now())
        with anyio.move_on_after(wait_s):
            await self._changed.wait()

    async def _serve(self) -> None:
        """Run the executor, in its own task: it cannot be left while a tier does not end."""
        try:
            async with self._executor:
                self._serves.set()
                await self._closing.wait()
        finally:
            if self._checks.is_open and not self._closing.is_set():
                text = "TieringManager was not closed: puts in flight are lost. Use async with, or aclose()"
                warn(text, ResourceWarning, stacklevel=1, source=self)
            self._serves.set()
            self._forget_tiers()

    def _forget_tiers(self) -> None:
        """Mark all tiers as down, so that they get no more work."""
        for tier in range(len(self._core.shared.tiers)):
            self._on_event(TierDown(tier, "closed"))

    async def _close(self, end_by_s: float) -> None:
        """Wait for tiers and device copies in flight, wake their tasks, and free the memory."""
        assert self._serving is not None
        await asyncio.wait((self._serving,), timeout=max(0.0, end_by_s - time.monotonic()))
        await anyio.to_thread.run_sync(self._engine.close)
        self._engine.set_wakeup(None)
        self._copies.collect()
        if self._serving.done():
            await anyio.to_thread.run_sync(self._region.close)
            self._serving.result()  # raises the error that ended it
        else:
            logger.error(
                "a tier did not close in time and may still use the primary tier's memory: the memory stays "
                "allocated until this process ends"
            )

    def _on_event(self, event: Event) -> None:
        if isinstance(event, TierUp) and self._closing.is_set():
            return  # it was in flight: the tier gets no further request
        self._driver.on_event(event)
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
