"""The state machine of tiering: events in, commands out.

It has one owner, which calls it from one thread and then takes the commands that follow. It never
blocks and reads no clock: time is an argument, in seconds on the owner's clock.

``lookup`` answers each key from present knowledge and notes unknown keys. ``settle``, called when a round of
questions is over, turns the notes into gets. A get looks for its keys in one tier and copies the run of keys
that it finds from the front into its slots: question and transfer cost a waiting request one delay, not two.
Slots for keys that may turn out to be absent come only from free ones, so a question evicts no chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import inf

from kvtier._core import audits, messages
from kvtier._core.cascade import Cascades
from kvtier._core.chunks import Chunk, ChunkTable
from kvtier._core.claims import Claims
from kvtier._core.limits import Limits
from kvtier._core.misses import Misses
from kvtier._core.priorities import Priorities
from kvtier._core.promotion.promotions import Promotions
from kvtier._core.requests import Request
from kvtier._core.reuse_tracker import ReuseTracker
from kvtier._core.shared import PRIMARY, Count, Keys, Notice, SharedState
from kvtier._core.states import ChunkState, Lookup, RequestEvent, RequestState
from kvtier._core.tiers.tier_status import TierStatus
from kvtier._core.transfers import Handle, Pinned, Reservation
from kvtier.errors import StateError
from kvtier.keys import OffloadKey, group_index
from kvtier.policies._base import EvictionPolicy

_READY = ChunkState.READY
_HIT, _MISS, _PENDING, _RETRY = Lookup.HIT, Lookup.MISS, Lookup.PENDING, Lookup.RETRY


class Tiering:
    """Owns the chunks of the primary tier and decides what moves between it and the other tiers.

    ``tiers`` are in lookup order. ``windowed_groups`` are KV cache groups that are not looked up from the
    front of the prompt (sliding windows); their chunks are located first, and promoted as they are asked for.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        tiers: Sequence[TierStatus] = (),
        limits: Limits | None = None,
        *,
        windowed_groups: frozenset[int] = frozenset(),
        track_kv_events: bool = False,
    ) -> None:
        limits = limits or Limits()
        self.table = ChunkTable(policy)
        self.shared = SharedState(self.table, tiers, limits, windowed_groups, track_kv_events=track_kv_events)
        self.promotions = Promotions(self.shared)
        self.holds = self.promotions.holds
        self.cascades = Cascades(self.shared)
        self.claims = Claims(self.shared, self.holds, self.lookup, self.close)
        self.priorities = Priorities(self.shared)
        self.epoch = 0
        self.handles: set[Handle] = set()  # the stores and loads that have not ended
        self._tiers = self.shared.tiers
        self._visible = self.table.visible
        self._counts = self.shared.counts
        self._asked: list[Request] = []
        self._misses = Misses(self.shared)
        self._miss = self._misses.note
        self._round: object = object()
        self._has_damage = False
        # Why nothing is stored, and each round that begins is answered MISS: a word of ``reasons.MISS``.
        # Set by the owner, and by ``disable_after_audit``.
        self.refusal: str | None = None
        self._tracker = ReuseTracker(limits.store_threshold, limits.max_tracker_size)

    # --- lookup ----------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, request: Request) -> Lookup:
        """Return the answer for a key, and note unknown keys for the next ``settle``."""
        if request.round is not self._round:
            if self.refusal is not None or request.state is RequestState.COMPUTED:
                return self._miss(self._round, key, request, self.refusal or "load_failed")
            request.begin_round(self._round, key)
            self._asked.append(request)
        chunk = self._visible.get(key)
        if chunk is not None and chunk.state is _READY:
            request.hits.append(key)
            return _HIT
        return self._unready(key, request, chunk)

    def repeat_answer(self, key: OffloadKey, request: Request) -> Lookup | None:
        """Return the previous answer while nothing has changed since; None if ``lookup`` has to answer.

        The engine asks in each step for each key of each request that waits. After RETRY for its first
        question and MISS for the next, it ends the scan there, and still defers the request.
        """
        if not request.answers_stand or request.first is None:
            return None
        if key == request.first:
            if request.round is not self._round:
                request.round, request.is_repeated = self._round, True
                self._asked.append(request)
            return _RETRY
        if request.round is not self._round:
            return None
        return _MISS if group_index(key) == group_index(request.first) else _RETRY

    def _unready(self, key: OffloadKey, request: Request, chunk: Chunk | None) -> Lookup:
        is_adopted = key in self.table.adopted
        if is_adopted and self.promotions.land_verified(key, request):
            request.hits.append(key)
            return _HIT
        if chunk is None and (key in request.absent or not (is_adopted or self.shared.asks_tiers)):
            return self._miss(self._round, key, request, request.why_absent.get(key, "absent"))
        if chunk is None and not is_adopted and request.tiers is not None and not request.tiers:
            return self._miss(self._round, key, request, "filter")
        if request.state is RequestState.EXPIRED:
            return self._miss(self._round, key, request, "deadline")
        request.wanted.append(key)
        return _PENDING if chunk is not None or key in request.located else _RETRY

    def settle(self, now_s: float) -> None:
        """End a round of questions: promote what is wanted, keep the deadlines, keep the reserve free."""
        self.claims.start_round(now_s)
        self.priorities.expire(now_s)
        if self._misses.requests:
            self._misses.count(self._round)
        asked, self._asked = self._asked, []
        self._round = object()
        if asked or self.holds.pending or self.holds.awaiting or self.shared.transfers:
            self.shared.gate.begin_round()
            self.promotions.start_round(now_s)
            self.promotions.give_up_overdue(now_s)
            self._hold_or_serve(asked, now_s)
            self.promotions.waits.expire(now_s)
            self._promote(asked, now_s)  # only now, when the hits of all are pinned
        if self.claims.arriving:
            self.claims.pin_arrived()
        if self.table.users:
            self._drop_released()
        if self.table.room < self.holds.reserve:
            self.shared.evict(self.holds.free_reserve - self.table.room)
        if self.cascades.reused or self.cascades.offered_again:
            self.cascades.follow_reuse(now_s)
        self.shared.note_policy()
        if self._has_damage:
            self._has_damage = False
            self.disable_after_audit(None, "when it was about to be put into a tier")

    def _hold_or_serve(self, asked: Sequence[Request], now_s: float) -> None:
        """Hold what was found for requests that wait; unpin what the others had."""
        for request in asked:
            if request.state is RequestState.CLOSED:
                continue
            self.priorities.use(request, request.hits)
            if request.wanted:
                self._defer(request, now_s)
            elif request.state is RequestState.EXPIRED:
                self.holds.unhold(request)  # its hits may have been pinned within the round
            else:
                self.served(request)

    def _promote(self, asked: Sequence[Request], now_s: float) -> None:
        """Start gets for requests of this round, and for those whose awaited chunks have arrived."""
        if self.holds.awaiting:
            asked = list(dict.fromkeys([*asked, *self.promotions.follow_waits(now_s)]))
        for request in asked:
            if request.is_waiting and request.locates:
                self.promotions.locate_wanted(request, now_s)
            elif request.is_waiting:
                self.promotions.promote_wanted(request, now_s)
        self.holds.release_awaiting()  # those too that began to in this round

    def _drop_released(self) -> None:
        if released := self.priorities.released():
            self._counts["released",] += len(released)
            self.table.pin(released)
            self._drop(released)

    def next_deadline_s(self) -> float | None:
        """Return the latest time for the next ``settle``; None if nothing is pending."""
        times = [transfer.deadline_s for transfer in self.shared.running]
        times.append(self.promotions.waits.next_s())
        if self.holds.pending:
            times.append(self.shared.gate.wait_until_s)
        return earliest_s if (earliest_s := min(times)) < inf else None

    def served(self, request: Request) -> None:
        """Unpin what is held for a request that waits for nothing now.

        A request whose deadline has passed stays EXPIRED until it is served: its scans wait no more.
        """
        if request in self.holds.pending or request.state is not RequestState.IDLE:
            self.promotions.waits.close(request)
            request.move(RequestEvent.SERVED)
            self.holds.unhold(request)

    def scheduled(self, request: Request) -> None:
        """Note that the engine computes the request from now on, even if answers for a group are pending."""
        request.wanted.clear()
        self.served(request)
        self.promotions.waits.close(request)
        self.shared.gate.running.add(request)

    def restart(self, request: Request) -> None:
        """Note that the request was preempted: the next lookups start afresh.

        Answers and deadlines from before it was served no longer hold. Hits reported in this round stay valid
        until the round ends.
        """
        told = [chunk.key for chunk, when in request.held.items() if when is self._round]
        self.served(request)
        if request.round is not self._round:
            request.lose_blocks("preempted")
        self.shared.gate.running.discard(request)
        request.hits += told
        request.missed.clear()
        request.forget_locations()

    def close(self, request: Request, now_s: float = -inf) -> None:
        """End a request: nothing is held for it, nothing is pending, and the times of its claim begin."""
        request.move(RequestEvent.ENDED)
        self.promotions.waits.close(request, "aborted")
        if request.run.time:
            self._use_prompt(request)
        if request.releases:
            self.priorities.due += request.own
        self.priorities.schedule_end(request, now_s)
        self.shared.gate.running.discard(request)
        self.holds.unhold(request)
        request.forget_answers()
        self.claims.end_request(request, now_s)
        for part in request.parts:
            self.close(part, now_s)
        request.blocks, request.parts = None, {}  # chunks may refer to it for long

    def _defer(self, request: Request, now_s: float) -> None:
        request.move(RequestEvent.DEFERRED)
        if self.epoch or self.shared.windowed:
            # After a reset, chunks of other engines are not for this one. Windows lack some of their chunks.
            self.promotions.waits.close(request)
        if request.wait is not None:
            request.wait.start_clock(now_s)
        self.holds.hold(request)
        self.holds.start_clock(request, now_s)
        self.holds.unpin_unasked(request)

    def _hold_hits(self) -> None:
        """Pin the hits of this round, before an eviction within it."""
        for request in self._asked:
            if request.hits and not request.locates and request.state is not RequestState.CLOSED:
                self.priorities.use(request, request.hits)
                self.holds.hold(request)

    def add_part(self, request: Request, part: Request) -> None:
        """Have a part of a request use the chunks that its blocks name, until the request ends.

        These are the visible ones now, and later those that the request loads or offers. The blocks only
        choose among chunks that are there under their whole keys: a wrong name, or one that chunks share,
        brings no other bytes to any request.
        """
        named = self.table.named(part.blocks or ())
        request.parts[part] = bool(named)
        self._note_use(part, named, named)

    def _note_use(
        self, request: Request, keys: Keys, new: Iterable[OffloadKey], *, is_offered: bool = False
    ) -> None:
        """Note that a request and its parts use chunks; it brought in the ``new`` ones."""
        self.priorities.use(request, keys, new)
        self.claims.use(request, keys, is_offered=is_offered)
        for part in request.parts:
            named = [key for key in keys if part.names(key)]
            request.parts[part] |= bool(named)
            self._note_use(part, named, named, is_offered=is_offered)

    # --- loads -----------------------------------------------------------------------------------

    def acquire(self, keys: Sequence[OffloadKey], request: Request | None = None) -> Pinned:
        """Pin chunks that were answered HIT, for a load. Ends the request's waiting.

        A HIT holds until the round ends, whatever else happens in it, a reset and ``fail_load`` excepted.
        Raises StateError for a key that was not answered HIT in this round.
        """
        request = request or Request()
        chunks = [self._ready(key) for key in keys]
        self.table.pin(chunks)
        self.table.use(chunks, request.run, request.places)
        pinned = Pinned(chunks, [chunk.origin for chunk in chunks])
        for origin, count in Counter(pinned.origins).items():
            self._counts["loaded", PRIMARY if origin is None else self._tiers[origin].name] += count
        self.cascades.reused.update((chunk.key, None) for chunk in chunks if chunk.origin is None)
        for chunk in chunks:
            chunk.origin = None
        self.handles.add(pinned)
        self.holds.promoting.difference_update(chunks)
        self.served(request)
        request.forget_answers()
        origins = zip(keys, pinned.origins, strict=True)
        self._note_use(request, keys, (key for key, tier in origins if tier is not None))
        return pinned

    def release(self, pinned: Pinned) -> None:
        """End a load: its chunks may be evicted again, as recently used ones."""
        self._end(pinned)
        self.table.unpin(pinned.chunks, used=True)
        if self.table.users:
            self.priorities.unpinned(pinned.chunks, (origin is not None for origin in pinned.origins))

    def fail_load(self, pinned: Pinned, request: Request | None = None) -> None:
        """End a load whose copies failed: its chunks are dropped from the primary tier.

        If the request still lives, it is computed: it is never told HIT again. Another load for it
        could fail as well, and so on for ever. A HIT for one of the chunks in the current round is void:
        an engine is told of its copies between rounds.
        """
        self._end(pinned)
        self._counts["dropped", "load", "failed"] += sum(chunk.state is _READY for chunk in pinned.chunks)
        self._drop(pinned.chunks)
        if request is not None:
            self.served(request)
            request.forget_answers()
            request.round = None  # its answers are not those that it had in this round
            request.move(RequestEvent.LOAD_FAILED)

    def _drop(self, chunks: Sequence[Chunk]) -> None:
        """Hide chunks for ever and take a pin from each."""
        self.shared.kv_events.removed([chunk.key for chunk in chunks if chunk.state is _READY])
        self.table.drop(chunks)
        self.claims.drop_lost()

    def _ready(self, key: OffloadKey) -> Chunk:
        chunk = self._visible.get(key)
        if chunk is None or chunk.state is not _READY:
            raise StateError(f"chunk {key.hex()} is not READY: {chunk or 'absent'}")
        return chunk

    def _end(self, handle: Handle) -> None:
        if handle not in self.handles:
            raise StateError(f"{type(handle).__name__} has already ended")
        self.handles.remove(handle)

    # --- stores ----------------------------------------------------------------------------------

    def reserve(self, keys: Sequence[OffloadKey], request: Request | None = None) -> Reservation | None:
        """Reserve slots for a request's ``keys`` that are not there yet; evict for them.

        If room is short only a prefix of them gets slots: a prompt with holes is useless. Returns None
        if there is no slot now, and an empty reservation if there is nothing to store.
        """
        if self.refusal is not None:
            self._counts["store_refused", self.refusal] += len(keys)
            return None
        request = request or Request()
        visible, table, run, places = self._visible, self.table, request.run, request.places
        new = [key for key in dict.fromkeys(keys) if key not in visible]
        if places and not run.time:
            self._use_prompt(request)
        if len(new) < len(keys):
            self.cascades.offer_again(keys)
            places = places or {key: place for place, key in enumerate(keys, self.table.uses)}
            self.table.use([visible[key] for key in keys if key in visible], run, places)
        offered, new = new, self._tracker.admitted(new)
        if len(new) < len(offered):
            self._counts["store_refused", "store_threshold"] += len(offered) - len(new)
        kept_free = self.holds.free_reserve  # a later eviction for it could take chunks of this prompt
        short = len(new) + kept_free - table.room
        if short > 0:
            self._hold_hits()
        evicted = self.shared.evict(short, run)
        if len(new) > (room := max(0, table.room - kept_free)):
            self._counts["store_refused", self.shared.short_of("no_slot")] += len(new) - room
            if not room:
                return None
            front = set(sorted(new, key=lambda key: places.get(key, inf))[:room])
            new = [key for key in new if key in front]
        self._tracker.count(offered)
        reservation = Reservation(self.table.assign_slots(new, run, places, visible=True), new, evicted)
        self.handles.add(reservation)
        self._note_use(request, keys, new, is_offered=True)
        return reservation

    def commit(self, reservation: Reservation, now_s: float) -> None:
        """End a store that has copied its bytes: its filled chunks are READY, and go to the other tiers."""
        if self.refusal == "audit":
            self.abort(reservation)
            return
        self._end(reservation)
        ready = self.cascades.put_stored(reservation.chunks, now_s)
        self._counts["stored",] += len(ready)
        self.shared.kv_events.stored(chunk.key for chunk in ready)

    def abort(self, reservation: Reservation) -> None:
        """End a store that did not copy its bytes, or whose bytes were reset away."""
        self._end(reservation)
        self.table.drop(reservation.chunks)

    def drop_unfilled(self, reservation: Reservation, why: Mapping[int, str]) -> None:
        """Hide the chunks of a store that are not READY whatever follows, and count them as dropped.

        ``why`` has their slots and a reason for each. The slots are out of use until ``commit`` or ``abort``:
        for ever, if a copy that never ended may write to them.
        """
        unfilled = [chunk for chunk in reservation.chunks if chunk.slot in why]
        for chunk in unfilled:
            self._counts["dropped", "store", why[chunk.slot]] += 1
        self.table.pin(unfilled)  # the copy keeps its pin
        self.table.drop(unfilled)

    def _use_prompt(self, request: Request) -> None:
        """Note that a request uses all chunks of its prompt, those too that the device had."""
        visible, run = self._visible, request.run
        found = [chunk for key in request.places if (chunk := visible.get(key)) and chunk.run is not run]
        self.table.use(found, run, request.places)

    # --- events and commands ----------------------------------------------------------------------

    def on_event(self, event: messages.Event, now_s: float) -> None:
        if isinstance(event, messages.GetEnded):
            self._hold_hits()
            self.cascades.backfill(self.promotions.get_ended(event, now_s), now_s)
        elif isinstance(event, messages.PutEnded):
            chunks = self.cascades.put_ended(event, now_s)
            self.holds.free_budget(chunks)
            self.priorities.unpinned(chunks, event.kept)
            self._has_damage = self._has_damage or "audit" in event.reasons
        elif isinstance(event, messages.SlotsReady):
            self.table.add_slots(event.slots)
            self.shared.is_starting = self.shared.is_starting and not event.is_last
            self.holds.resize(len(self.table.all))
            for status in self._tiers:
                status.writes.resize(len(self.table.all))
        elif isinstance(event, messages.TierDown):
            status = self._tiers[event.tier]
            if status.down is None:
                self._counts["tier_down", status.name] += 1
            status.down = event.reason
            self.shared.kv_events.clear(event.tier)
        elif isinstance(event, messages.TierUp):
            status = self._tiers[event.tier]
            if status.down is not None:
                self.shared.notices.append(Notice(f"tier {status.name}", "it is up again"))
            status.down, status.epoch = None, event.epoch
        elif isinstance(event, messages.Removed):
            self.shared.announce_left(event.tier, event.keys)
        elif isinstance(event, messages.ProcessEnded):
            self._counts["process_ended", event.reason] += event.times

    def take_commands(self) -> list[messages.Command]:
        """Return and clear the commands since the last call, in the order to carry them out."""
        commands, self.shared.commands = self.shared.commands, []
        return commands

    def take_notices(self) -> list[Notice]:
        """Return and clear the changes that the log should have a line of."""
        notices, self.shared.notices = self.shared.notices, []
        return notices

    def take_counts(self) -> dict[Count, float]:
        """Return and clear the counts since the last call."""
        counts = dict(self._counts)
        self._counts.clear()
        return counts

    def reset(self) -> None:
        """Make everything stored so far invisible for ever, in every tier.

        Stores and loads in flight must still be ended. Their slots are out of use before.
        """
        self.epoch += 1
        self._asked.clear()
        self.cascades.reused.clear()
        self.cascades.offered_again.clear()
        self._round = object()
        for request in self.holds.awaiting:  # later chunks of other engines are not for this one
            self.promotions.waits.close(request)
        self.claims.clear()
        self.promotions.reset()
        ready = [key for key, chunk in self._visible.items() if chunk.state is _READY]
        self.shared.kv_events.removed(ready)
        self.table.reset()
        for transfer in self.shared.transfers.values():
            transfer.left = frozenset(transfer.keys)
        for tier in range(len(self._tiers)):
            self.shared.kv_events.clear(tier)
            self.shared.commands.append(messages.Reset(tier, self.epoch))

    def note_computed(self, place: int, chunks: float, seconds: float) -> None:
        """Note that the device has computed chunks in this time, around this place of their prompts."""
        self.shared.gate.compute.note(place, chunks, seconds)

    def disable_after_audit(self, tier: int | None, where: str) -> None:
        """Use a tier no more: an audit has found a chunk damaged that came from it.

        Its chunks are dropped, unless they were loaded before. As with ``fail_load``, a HIT in the current
        round is void. ``tier`` is None if the damage arose in the primary tier, or between it and the device.
        Every chunk goes that way, so no tier is used then, and nothing is stored.
        """
        self.refusal = "audit" if tier is None else self.refusal
        self._drop(audits.disable(self.shared, tier, where))

    @property
    def is_idle(self) -> bool:
        """Whether no tier has anything to do."""
        return not self.shared.transfers and not self.shared.commands

    @property
    def is_reset(self) -> bool:
        """Whether every tier that is not down has been reset to the current epoch."""
        return all(status.down is not None or status.epoch == self.epoch for status in self._tiers)
