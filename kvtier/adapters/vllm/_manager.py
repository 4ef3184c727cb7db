"""The vLLM adapter: the scheduler's thread owns the core, and events of the tiers reach it through a queue.

Nothing here waits, takes a lock or does I/O. Events are passed to the core at the next lookup or at the end
of the step. Chunks that were answered HIT stay valid until the step ends.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)

from kvtier._core.chunks import LOW
from kvtier._core.requests import Request
from kvtier._core.states import Lookup
from kvtier._core.tiering import Tiering
from kvtier._core.transfers import Pinned, Reservation
from kvtier._execution.driver import Driver
from kvtier._isolation.process import AnyExecutor
from kvtier._log import GuardedLogger
from kvtier._memory.slot_checksums import SlotChecksums
from kvtier._memory.worker_status import Unfilled
from kvtier._telemetry.dropped_puts import DroppedPuts
from kvtier.adapters.vllm._actions import Actions
from kvtier.adapters.vllm._compat import REPORTS_RESET_FLUSH, TRACKS_BLOCKS, CacheHitSource, places_of
from kvtier.adapters.vllm._hints import EXPLAINED, FROM, OUTCOMES, PARAMS, HintReader, is_prefill
from kvtier.adapters.vllm._telemetry.events import allowed_tiers
from kvtier.adapters.vllm._telemetry.explain import Explainer
from kvtier.adapters.vllm._telemetry.metrics import Published
from kvtier.adapters.vllm._telemetry.steps import StepMeter
from kvtier.keys import group_index

logger = GuardedLogger("kvtier.vllm")

_RESULTS = [LookupResult.MISS] * len(Lookup)
_RESULTS[Lookup.HIT] = LookupResult.HIT
_RESULTS[Lookup.PENDING] = LookupResult.HIT_PENDING
_RESULTS[Lookup.RETRY] = LookupResult.RETRY


@dataclass
class Slots(LoadStoreSpec):
    """Where chunks are in the primary tier; goes to the workers."""

    slots: list[int]
    request: str = ""  # the request of a load
    chunks: Sequence[int] = ()  # number of chunks of a store, by group id


_OF_NEW_CHUNKS = RequestOffloadingContext()
_OF_ALL_CHUNKS = RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)
"""vLLM offers chunks to be stored that the request did not compute, too."""

_TOLD = ("action_id", "outcome", "reason")

_COPY_S = 1.0
"""From a response to the puts of its prompt's last chunks: a step, and a copy from the device."""


@dataclass
class _Flushing:
    """Handles of copies that a reset has cut off, until the workers have surely stopped."""

    reservations: list[Reservation]
    loads: list[Pinned]
    steps_left: int


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The engine's behaviour, as far as the manager depends on it; see ``EngineContext``."""

    steps_ahead: int = 2
    names_resumed: bool = False  # vLLM names a preempted request as new when it resumes (V2 model runner)
    is_blind: bool = False  # vLLM's connector is not told of all new owners of blocks
    has_blocks: Callable[[], bool] = lambda: False
    why_not_stored: Callable[[str], str | None] = lambda _: None


class KVTierManager(OffloadingManager):
    """The manager that vLLM's scheduler calls.

    Args:
        core: the state machine, owned from now on by the scheduler thread.
        executor: runs its commands; started already.
        sources: the name of each secondary tier in vLLM's cache-hit metrics.
        addresses: where other engines read from a tier, by its index.
        peers: addresses of engines that the tiers may ask.
        on_reset: waits for the copies of workers in this process.
        on_shutdown: gives back what the manager was made with; ``drain_s`` is how long it waits for puts.
    """

    def __init__(
        self,
        core: Tiering,
        executor: AnyExecutor,
        published: Published | None = None,
        engine: EngineFacts | None = None,
        *,
        sources: Sequence[CacheHitSource] = (),
        addresses: Mapping[int, str] = MappingProxyType({}),
        peers: Collection[str] = (),
        on_reset: Callable[[], None] = lambda: None,
        on_shutdown: Callable[[], None] = lambda: None,
        drain_s: float = 0.0,
        slot_checksums: SlotChecksums | None = None,
        steps: StepMeter | None = None,
        explainer: Explainer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.core = core
        self._engine = engine or EngineFacts()
        self._published = published or Published(core, executor.activity)
        self._workers = self._published.workers
        self._slot_checksums = slot_checksums
        self._driver = Driver(
            core,
            executor.submit,
            logger,
            slot_checksums=slot_checksums,
            has_damage=self._workers.have_found_damage,
            clock=clock,
        )
        self._sources = sources
        self._addresses = addresses
        self._on_reset = on_reset
        self._on_shutdown = on_shutdown
        self._drain_s = drain_s
        self._steps = steps
        self._events = executor.events
        if not core.shared.kv_events.enabled:
            self._events.most_removed = 0
        self._explainer = explainer or Explainer(self._published.names, clock=clock)
        self._explainer.traces = self._driver.traces
        self._hints = HintReader(clock)
        self.actions = Actions(core, peers, clock)
        self._published.tell_capabilities(self.actions.capabilities)
        self.session = ""  # the session of the request that arrives next
        self._clock = clock
        self.requests: dict[str, Request] = {}
        self._loads: dict[str, Pinned] = {}
        self._failed_loads: set[str] = set()  # requests in ``_loads``
        # The chunks of the last load that came from tiers.
        self._load_sources: dict[OffloadKey, CacheHitSource] = {}
        self._stores: dict[OffloadKey, Reservation] = {}
        self._doubtful: set[Reservation] = set()  # stores in flight that may hold no KV
        self._flushing: list[_Flushing] = []
        self._has_old_blocks = False  # the device may hold KV from before the last reset
        self._closed = False

    # --- requests --------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if req_context.req_id in self.requests:  # an earlier one of this name has not ended
            self.on_request_finished(req_context)
        if self._has_old_blocks and not self._engine.has_blocks():
            self._note_old_blocks()
        tiers = allowed_tiers(req_context.load_tier_filter, self._published.locations)
        request = self.requests[req_context.req_id] = Request(req_context.req_id, tiers)
        params, session, self.session = req_context.kv_transfer_params, self.session, ""
        is_asked, hints = self._hints.read(req_context.req_id, params, req_context.kv_hints)
        needs_all = self.actions.execute(request, hints, session)
        request.places = places_of(req_context)
        if is_asked or self._explainer.is_on:
            self._explainer.follow(req_context, request, hints, is_asked=is_asked)
        is_selective = any(status.writes.is_selective for status in self.core.shared.tiers)
        needs_all = needs_all or is_selective or is_prefill(params) or bool(self.core.table.orders[LOW])
        return _OF_ALL_CHUNKS if needs_all else _OF_NEW_CHUNKS

    def on_request_finished(self, req_context: ReqContext) -> None:
        """See vLLM. Copies of the request can still be in flight."""
        request = self.requests.pop(req_context.req_id, None)
        if request is not None:
            self.actions.count_outcomes(request)
            self.core.close(request, self._clock())
            self._explainer.forget(request.name)
        if self._steps is not None:
            self._steps.forget(req_context.req_id)

    def response_params(self, req_id: str, params: object) -> dict[str, Any] | None:
        """Return the ``kv_transfer_params`` of the response to a request that had ``params``, if any.

        They explain its prefix if its client asked for that, and have the outcomes of its actions. They have
        hints for the decode engine if another engine is to decode its prompt.
        """
        ours: dict[str, Any] = {}
        if (explained := self._explainer.answer(req_id)) is not None:
            ours[EXPLAINED] = msgspec.to_builtins(explained)
        if (request := self.requests.get(req_id)) is not None:
            hints = self.actions.outcomes(request)
            named = [{key: getattr(hint, key) for key in _TOLD} for hint in hints if hint.action_id]
            ours.update({OUTCOMES: named} if named else {})
        if is_prefill(params):
            ours.update(self._hints_for_decode(req_id))
        return {PARAMS: ours} if ours else None

    def _hints_for_decode(self, req_id: str) -> dict[str, Any]:
        """Return how many seconds an engine should wait for a prompt's chunks, and their addresses.

        The copies of the last chunks begin a step after the response, and the puts that follow end within
        their deadline. Empty if no chunk gets into a tier: none takes puts, the request stores nothing, or a
        reset was before.
        """
        core, shared = self.core, self.core.shared
        if core.epoch or self._store_refusal(req_id):
            return {}
        tiers = {
            index: it
            for index, it in enumerate(shared.tiers)
            if it.disabled_reason is None and it.puts.is_closed
        }
        put_s = max((tier.deadline_s + _COPY_S for tier in tiers.values()), default=0.0)
        if not (wait_s := min(put_s, shared.limits.max_wait_s)):
            return {}
        addresses = [self._addresses[index] for index in tiers if index in self._addresses]
        return {"wait_s": wait_s, FROM: addresses} if addresses else {"wait_s": wait_s}

    def restart(self, req_id: str) -> None:
        """Note that a request gets new blocks, also if no chunk of it is looked up."""
        if (request := self.requests.get(req_id)) is not None:
            request.renew_blocks()

    # --- lookups and loads -----------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """See vLLM. Asked for each key of each waiting request in each step."""
        if self._events:
            self._driver.on_events(self._events)
        request = self.requests[req_context.req_id]
        answer = self.core.repeat_answer(key, request) if request.answers_stand else None
        if answer is None:
            answer = self.core.lookup(key, request)
            if self._steps is not None and key == request.first:
                request.base = self._steps.place(req_context, key) or 0
        return _RESULTS[answer]

    def is_audited(self, req_id: str) -> bool:
        """Return whether a load of what a request's lookups have found is audited, so that it can fail."""
        audits, visible = self._slot_checksums, self.core.table.visible
        if audits is None or (request := self.requests.get(req_id)) is None:
            return False
        found = [*request.held, *filter(None, map(visible.get, request.hits))]
        slots = [chunk.slot for chunk in found]
        return any(audits.audited(slots, area) for area in range(audits.areas))

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        request = self.requests[req_context.req_id]
        pinned = self.core.acquire(list(keys), request)
        self._loads[req_context.req_id] = pinned
        self._published.stream.loaded(keys)
        if self._steps is not None:
            self._steps.loaded(req_context, keys)
        if self._driver.traces is not None:
            self._driver.traces.load_began(pinned, req_context.req_id)
        self._explainer.loaded(req_context.req_id, keys, pinned.origins)
        if self._sources:
            origins = zip(keys, pinned.origins, strict=True)
            self._load_sources = {key: self._sources[tier] for key, tier in origins if tier is not None}
        return Slots(pinned.slots, req_context.req_id)

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:  # noqa: ARG002
        """See vLLM: asked for each key right after ``prepare_load``, for a metric."""
        return self._load_sources.get(key, CacheHitSource.HOST)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """See vLLM. Can come after the request's end."""
        pinned = self._loads.pop(req_context.req_id, None)
        if pinned is None:
            logger.error(
                "complete_load(%r) ignored: no load of %d chunks is in flight", req_context.req_id, len(keys)
            )
            return
        failed = req_context.req_id in self._failed_loads
        self._failed_loads.discard(req_context.req_id)
        if failed:
            self._explainer.load_failed(req_context.req_id)
        self._driver.end_load(pinned, self.requests.get(req_context.req_id), failed=failed)

    def fail_loads(self, req_ids: Iterable[str]) -> None:
        """Note that the loads of these requests, about to be completed, did not bring their bytes.

        ``KVTierConnector`` says so. The requests are computed by the engine and not loaded again.
        """
        self._failed_loads.update(req_id for req_id in req_ids if req_id in self._loads)

    # --- stores ----------------------------------------------------------------------------------

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """See vLLM. If room is short a prefix is accepted. Without room the answer is None: not now.

        Nothing is stored while blocks may hold what they do not say: after a reset that left blocks on the
        device, and see ``why_not_stored`` and ``no_store``.
        """
        if self._events:  # the first slots, say
            self._driver.on_events(self._events)
        request = self.requests.get(req_context.req_id)
        if request is not None:  # vLLM's first model runner names no request that resumes after a preemption
            self.core.scheduled(request)
        if refusal := self._store_refusal(req_context.req_id):
            self.core.shared.counts["store_refused", refusal] += len(keys)
            # An empty answer: vLLM does not offer the chunks again.
            return PrepareStoreOutput(keys_to_store=[], store_spec=Slots([]), evicted_keys=[])
        keys = list(keys)
        reservation = self.core.reserve(keys, request)
        if self._steps is not None and request is not None:
            self._steps.offered(req_context, keys, request.first)
        if reservation is None:
            return None
        stored = list(reservation.keys)
        if stored:
            self._stores[stored[0]] = reservation
        else:
            self.core.abort(reservation)
        return PrepareStoreOutput(
            keys_to_store=stored,
            store_spec=Slots(reservation.slots, chunks=_count_by_group(stored)),
            evicted_keys=list(reservation.evicted),
        )

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """See vLLM. ``keys`` come from one ``prepare_store``, in any order."""
        stores = self._stores
        reservation = next((stores.pop(key) for key in keys if key in stores), None)
        if reservation is None:
            logger.error(
                "complete_store(%r) ignored: no store of %d chunks is in flight",
                req_context.req_id,
                len(keys),
            )
            return
        self._end_store(reservation, success, req_context.req_id)

    def fail_stores(self) -> None:
        """Drop all stores in flight: another connector did not fill blocks that requests computed from."""
        self._doubtful.update(self._stores.values())

    # --- steps -----------------------------------------------------------------------------------

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """See vLLM. Called in each step, before or after its stores, by version."""
        for req_id in context.preempted_req_ids:  # a reset's, perhaps: they may be named as new, too
            if (request := self.requests.get(req_id)) is not None:
                self.core.restart(request)
                request.is_placed = request.is_placed and not self._engine.names_resumed
                if self._steps is not None:
                    self._steps.forget(req_id)
        for req_id in context.new_req_ids:
            if (request := self.requests.get(req_id)) is not None:
                self.core.scheduled(request)
                request.place(appends=not TRACKS_BLOCKS)  # of a session
        self._driver.end_round(self._events)
        if self._steps is not None:
            self._steps.start_step()
        if self._explainer.tracked:
            self._explainer.step_ended(context.new_req_ids)
        if self._flushing and not REPORTS_RESET_FLUSH:
            self._count_down()
        if self._workers.is_lost:
            self._stop_copying()

    def has_pending_work(self) -> bool:
        """See vLLM. Puts need no steps. Steps give back slots that a reset cut off, and prefetch chunks."""
        return bool(self._flushing) or self.core.claims.is_promoting

    def reset_cache(self) -> None:
        """See vLLM, which drops its record of running copies; the workers still finish them.

        For a sleep vLLM unmaps the KV cache next. Workers of this process end their copies before; the next
        step would wait for them, too. vLLM resets its connector, without a notice, even if its own reset has
        failed because blocks are in use. Its prefix cache then gives old blocks to later requests.
        """
        self._on_reset()
        self._note_old_blocks()
        if self._stores or self._loads:
            # vLLM tells workers with the next step which copies to wait for. From 0.33 on it says when
            # they are through; before, they are when the step after so many others is scheduled.
            stores, loads = list(self._stores.values()), list(self._loads.values())
            self._flushing.append(_Flushing(stores, loads, self._engine.steps_ahead + 1))
        self._stores.clear()
        self._loads.clear()
        self._failed_loads.clear()
        self._driver.reset()

    def on_new_weights(self) -> None:
        """Hide what is stored: workers get new weights. Copies in flight end as usual."""
        self._note_old_blocks()
        self._driver.reset()

    def on_reset_flushed(self) -> None:
        """See vLLM 0.33: workers have ended the copies that the last reset cut off."""
        while self._flushing:
            self._flush(self._flushing.pop())

    def shutdown(self) -> None:
        """See vLLM. May be called again."""
        if self._closed:
            return
        self._closed = True
        self._driver.on_events(self._events)
        self._published.warn_of_chunks_not_put()
        dropped = DroppedPuts(self.core, self._drain_s, logger, lambda: self.core.shared.counts)
        if unconfirmed := sum(len(store.chunks) for store in self._stores.values()):
            logger.warning(
                "shutdown: %d chunks were still being copied from the device; they are lost", unconfirmed
            )
        self._on_shutdown()
        self._driver.on_events(self._events)
        self._driver.close()
        dropped.warn()

    # --- what is published -----------------------------------------------------------------------

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self._published.take_events()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """See vLLM. Asked at the end of each step; None if nothing has changed."""
        if self._steps is not None:
            self._steps.end_step()
        return self._published.take_stats()

    def config_info(self) -> Sequence[Mapping[str, str]]:
        """See vLLM 0.33."""
        return [self._published.info]

    # --- inside ----------------------------------------------------------------------------------

    def _note_old_blocks(self) -> None:
        self._has_old_blocks = self._engine.has_blocks()
        if self._has_old_blocks:
            logger.warning(
                "nothing is stored until the next reset: the device has blocks from before this one, or from "
                "before new weights; reset with reset_running_requests, or while idle"
            )
            return
        for request in self.requests.values():
            request.lose_blocks("reset")  # also ended ones, whose last chunks vLLM offers in the next step

    def _store_refusal(self, req_id: str) -> str | None:
        """Return why a request stores nothing, in a word of ``reasons.STORE_REFUSED``; else None."""
        refusal = self.core.refusal or ("reset" if self._has_old_blocks else None)
        refusal = refusal or ("neighbour" if self._engine.is_blind else None)
        if (request := self.requests.get(req_id)) is not None:
            refusal = refusal or request.no_store
        return refusal or self._engine.why_not_stored(req_id)

    def _stop_copying(self) -> None:
        """Submit no more copies to the workers. The engine itself continues."""
        if self.core.refusal is None:
            self.core.refusal = "device_lost"
            logger.error("a worker's device is lost: nothing is stored or loaded any more until a restart")

    def _end_store(self, reservation: Reservation, success: bool, request: str = "") -> None:
        """End a store; drop what workers did not fill. If one has lost its device, never use the slots again.

        A copy that was given up may still write into them. It could overwrite a chunk fetched there since,
        and the damaged chunk could get a valid trailer and be put into another tier.
        """
        marks = self._workers.take_marks(reservation.slots)
        changed = [slot for slot, why in marks.items() if why is Unfilled.CHANGED]
        self._driver.inspect(reservation, changed)
        unfilled = {slot: why.name.lower() for slot, why in marks.items()}
        if reservation in self._doubtful:
            self._doubtful.discard(reservation)
            unfilled = dict.fromkeys(reservation.slots, "neighbour") | unfilled
        self.core.drop_unfilled(reservation, unfilled)
        if marks and self._workers.is_lost:
            self._stop_copying()
        elif success:
            self._driver.commit(reservation, request)
        else:
            self.core.abort(reservation)

    def _count_down(self) -> None:
        for flushing in self._flushing:
            flushing.steps_left -= 1
        while self._flushing and self._flushing[0].steps_left <= 0:
            self._flush(self._flushing.pop(0))

    def _flush(self, flushing: _Flushing) -> None:
        for reservation in flushing.reservations:
            self._end_store(reservation, success=False)
        for pinned in flushing.loads:
            self._driver.end_load(pinned)


def _count_by_group(keys: Sequence[OffloadKey]) -> list[int]:
    """Return how many keys each group has, by its id; they come group after group."""
    groups = range(group_index(keys[-1]) + 1 if keys else 0)
    ends = [0, *(bisect_right(keys, group, key=group_index) for group in groups)]
    return [end - start for start, end in pairwise(ends)]
