"""Invariants of the core between calls. A check takes time in proportion to the slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import inf

from kvtier._core.chunks import DEFAULT, HIGHEST, LOW, NO_RUN, Chunk, ChunkTable
from kvtier._core.states import BreakerState, ChunkState, RequestState
from kvtier._core.tiering import Tiering
from kvtier.keys import OffloadKey
from kvtier.policies import EvictionPolicy, Run


def check(core: Tiering) -> None:
    """Compare the core's state with the handles that it has given out.

    Raises:
        AssertionError: an invariant does not hold; the message names it.
    """
    _check_table(core.table)
    _check_chunks(core.table, _expected_pins(core))
    _check_requests(core)
    _check_claims(core)
    _check_gates(core)


def _check_table(table: ChunkTable) -> None:
    visible = set(table.visible.values())
    free = {*table.free, *table.adopted.values()}
    held = sum(1 for chunk in table.all if chunk.state is not ChunkState.ABSENT)
    is_own_key = (chunk.key == key for key, chunk in table.visible.items())
    _require(len(free) == table.room, "a slot is free or adopted once")
    _require(len(free) + held == len(table.all), "free and held slots are all slots")
    _require(all(chunk.key == key for key, chunk in table.adopted.items()), "adopted chunks keep their keys")
    _require(table.adopted.keys().isdisjoint(table.visible), "a chunk is adopted or visible")
    _require(len(visible) == len(table.visible), "a chunk is visible under one key")
    _require(all(is_own_key), "chunks are found by their own keys")
    if table._by_block is not None:
        named = sorted(key for same in table._by_block.values() for key in same)
        _require(named == sorted(table.visible), "visible chunks are found by their blocks")


def _check_chunks(table: ChunkTable, pins: Mapping[Chunk, int]) -> None:
    visible = set(table.visible.values())
    free = {*table.free, *table.adopted.values()}
    candidates = 0
    for chunk in table.all:
        state = chunk.state
        may_be_seen = state in (ChunkState.READY, ChunkState.FILLING)
        is_ending = state in (ChunkState.FILLING, ChunkState.DOOMED)
        _require(chunk.pins == pins[chunk], "{} has the pins of its users, {}", chunk, pins[chunk])
        _require((chunk in free) is (state is ChunkState.ABSENT), "{} is free or in use", chunk)
        _require(chunk not in visible or may_be_seen, "{} may be seen", chunk)
        _require(state is not ChunkState.READY or chunk in visible, "{} is READY and can be found", chunk)
        _require(not is_ending or chunk.pins > 0, "{} waits for an end", chunk)
        if chunk in visible:
            candidate = state is ChunkState.READY and not chunk.pins
            priority = table.priority(chunk.key)
            found = [index for index, order in enumerate(table.orders) if chunk.key in order]
            _require(found == [priority] * candidate, "{} of priority {} is in its order", chunk, priority)
            candidates += candidate
    _require(table.evictable == candidates, "the policy knows no more than there is")


def _check_requests(core: Tiering) -> None:
    pending, awaiting = core.holds.pending, core.holds.awaiting
    _require(all(chunk.pins for chunk in core.holds.promoting), "promoted chunks are pinned")
    _require(
        all(request.state.name != "CLOSED" for request in [*pending, *awaiting]),
        "nothing is held for a closed request",
    )
    _require(
        all(request.is_waiting or request in core._asked for request in pending),
        "a request is in line only while it waits, and until the end of its round",
    )
    _require(
        all(request.is_waiting and request not in pending for request in awaiting),
        "a request that awaits chunks waits, and is not in line",
    )


def _check_claims(core: Tiering) -> None:
    table, kept = core.table, core.claims.pinned
    most = int(len(table.all) * core.shared.limits.pin_budget)
    _require(all(table.visible.get(key) is it for key, it in kept.items()), "kept chunks can be found")
    _require(len(kept) <= most, "no more is kept than the budget")
    ending = {request for _, _, request in core.priorities.ending}
    for key, user in table.users.items():
        has_end = user.state is not RequestState.CLOSED or user.priority_s == inf or user in ending
        _require(key in table.visible and key in user.own, "{} has a priority, and is there", key)
        _require(user.priority != DEFAULT, "{} has another priority than others", key)
        _require(has_end, "the priority of {} ends", key)


def watch_evictions(core: Tiering) -> None:
    """Check every eviction from now on.

    Each must free as many chunks as possible, in order of priority, prompt tails first, and no chunk in use.

    Raises:
        AssertionError: later, from the call that evicts; the message names the fault.
    """
    table, shared, evict = core.table, core.shared, core.shared.evict

    def checked(count: int, spared: Run = NO_RUN) -> list[OffloadKey]:
        candidates = {key: chunk for key, chunk in table.visible.items() if not chunk.pins}
        priorities = {key: table.priority(key) for key in candidates}
        places = {key: (chunk.run, priorities[key], chunk.place) for key, chunk in candidates.items()}
        most_high = max(0, int(len(table.all) * shared.limits.pin_budget) - len(core.claims.pinned))
        is_in_budget = _high(table) <= most_high
        kept = sum(chunk.run is spared for chunk in candidates.values())
        wanted = max(0, min(count, table.evictable - kept))
        evicted = evict(count, spared)
        _require(len(evicted) == wanted, "{} of {} evictable chunks are evicted", len(evicted), wanted)
        _require(priorities.keys() >= set(evicted), "nothing in use is evicted")
        others = (key for key, (run, *_) in places.items() if run is not spared and key in table.visible)
        left = min(map(table.priority, others), default=HIGHEST)
        highest = max((priorities[key] for key in evicted), default=LOW)
        if is_in_budget or left == LOW:
            _require(highest <= left, "priority {} is evicted before {}", highest, left)
        _require(count <= 0 or _high(table) <= most_high, "high priorities are given within the budget")
        if type(table.orders[DEFAULT]).add_run is not EvictionPolicy.add_run:
            _check_tails(places, set(evicted))
        return evicted

    setattr(shared, "evict", checked)  # noqa: B010  # mypy takes no assignment to a method


def _check_tails(places: Mapping[OffloadKey, tuple[Run, int, int]], evicted: set[OffloadKey]) -> None:
    """Check that the remaining candidates of each run and priority precede the evicted ones."""
    ends: dict[tuple[Run, int], int] = {}
    for key in evicted:
        run, priority, place = places[key]
        ends[run, priority] = min(place, ends.get((run, priority), place))
    for key, (run, priority, place) in places.items():
        end = ends.get((run, priority))
        if end is not None and key not in evicted:
            _require(place <= end, "place {} is left of a prompt whose place {} was evicted", place, end)


def _high(table: ChunkTable) -> int:
    """Return the number of candidates with high priority."""
    return sum(map(len, table.orders[DEFAULT + 1 :]))


def _expected_pins(core: Tiering) -> Counter[Chunk]:
    pins: Counter[Chunk] = Counter()
    for handle in core.handles:
        pins.update(handle.chunks)
    for transfer in core.shared.transfers.values():
        pins.update(transfer.chunks)
    for request in [*core.holds.pending, *core.holds.awaiting]:
        pins.update(list(request.held))
    pins.update(core.claims.pinned.values())
    return pins


def _check_gates(core: Tiering) -> None:
    for index, gate in enumerate(core.shared.tiers):
        mine = [transfer for transfer in core.shared.transfers.values() if transfer.tier == index]
        backlog = sum(len(transfer.chunks) for transfer in mine if transfer.is_put)
        _require(gate.backlog == backlog, f"the backlog of {gate.name} is that of its puts")
        for verb, breaker in (("put", gate.puts), ("get", gate.gets)):
            overdue = {transfer.id: transfer.is_overdue for transfer in mine if transfer.verb == verb}
            _require(
                breaker.overdue == sum(overdue.values()), f"the overdue {verb}s of {gate.name} are counted"
            )
            is_probed = overdue.get(breaker.probe or 0) is False
            _require(
                is_probed is (breaker.state is BreakerState.HALF_OPEN),
                f"the breaker of the {verb}s of {gate.name} is HALF_OPEN while a probe is under way",
            )


def _require(holds: bool, what: str, *about: object) -> None:
    if not holds:
        raise AssertionError(f"invariant: {what.format(*about)}")
