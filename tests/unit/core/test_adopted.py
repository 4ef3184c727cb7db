"""Chunks of the engine before: verified in their own slots, and given up when others need the slots."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from kvtier._core.limits import Limits
from kvtier._core.messages import SlotsReady
from kvtier._core.requests import Request
from kvtier._core.slot_trailers import SlotTrailers
from kvtier._core.tiering import Tiering
from kvtier._core.tiers.tier_status import TierStatus
from kvtier.policies import LRU
from tests.unit.core.world import (
    COPIED,
    HIT,
    LOCATED,
    MISS,
    MISSING,
    RETRY,
    answer,
    ask,
    fetches,
    keys,
    reserve,
    step,
)


class Voided(list[object], SlotTrailers):
    """The slots whose entries were voided, and None for each reset; the slots that are ``verified``."""

    verified: Collection[int] = ()

    def fill(self, slots: Collection[int]) -> None:
        self.extend(slots)

    def drop(self, slots: Collection[int]) -> None:
        self.extend(slots)

    def use(self, slots: Collection[int]) -> None:
        pass

    def reset(self) -> None:
        self.append(None)

    def is_verified(self, slot: int) -> bool:
        return slot in self.verified


OLD, NEW = keys("old", 4), keys("new", 8)
SLOTS = dict(zip(OLD, (6, 2, 0, 5), strict=True))


def make(*tiers: str, budget: float = 1.0) -> Tiering:
    """Return a core of eight slots, four of them with adopted chunks."""
    statuses = [TierStatus("adopted", in_place=True), *map(TierStatus, tiers)]
    core = Tiering(LRU(), statuses, Limits(promotion_reserve=0.0, promotion_budget=budget))
    core.table.adopt(Voided(), SLOTS)
    core.on_event(SlotsReady(range(8)), 0.0)
    return core


def test_chunks_are_verified_in_their_slots() -> None:
    core, request = make(), Request()
    (get,) = step(core, request, OLD[:3])
    assert (get.tier, get.keys, get.slots) == (0, OLD[:3], [6, 2, 0])
    answer(core, get, [COPIED, COPIED, MISSING])
    assert ask(core, request, OLD[:3]) == [HIT, HIT, MISS]
    assert core.acquire(OLD[:2], request).slots == [6, 2]
    assert core.table.room == 6


def test_verified_chunks_are_hits_without_a_get() -> None:
    core, request, entries = make(), Request(), Voided()
    core.table.trailers, entries.verified = entries, (6, 0)
    assert ask(core, request, OLD[:3]) == [HIT, RETRY, HIT]
    core.settle(0.0)
    (get,) = fetches(core)
    assert get.slots == [2]
    answer(core, get, [COPIED])
    assert ask(core, request, OLD[:3]) == [HIT, HIT, HIT]
    assert core.acquire(OLD[:3], request).origins == [0, 0, 0]
    assert entries == []


@pytest.mark.parametrize("allowed", [frozenset[int](), frozenset({1})])
def test_no_filter_hides_them(allowed: frozenset[int]) -> None:
    core, request = make("files"), Request(tiers=allowed)
    (get,) = step(core, request, OLD[:2])
    assert get.tier == 0
    answer(core, get, [COPIED] * 2)
    assert ask(core, request, OLD[:2]) == [HIT, HIT]


def test_verified_chunks_can_be_evicted() -> None:
    core, request = make(), Request()
    core.table.trailers = entries = Voided()
    entries.verified = SLOTS.values()
    assert ask(core, request, OLD) == [HIT] * 4
    core.close(request)
    assert core.table.evictable == 4
    assert reserve(core, NEW).evicted == OLD[::-1]  # the tail of a prompt first


@pytest.mark.parametrize("tier", [None, 0])
def test_no_chunk_is_a_hit_after_damage(tier: int | None) -> None:
    core = make()
    core.table.trailers = entries = Voided()
    entries.verified = SLOTS.values()
    core.disable_after_audit(tier, "in a test")
    assert [core.lookup(key, request) for request in [Request()] for key in OLD] == [MISS] * 4


def test_others_are_missed_at_once() -> None:
    assert ask(make(), Request(), NEW[:1]) == [MISS]


def test_others_are_asked_of_the_next_tier() -> None:
    core, request = make("files"), Request()
    assert ask(core, request, [OLD[0], NEW[0]]) == [RETRY, RETRY]
    core.settle(0.0)
    gets = fetches(core)
    assert [(get.tier, get.keys) for get in gets] == [(0, [OLD[0]]), (1, [NEW[0]])]
    assert 6 not in gets[1].slots


def test_stores_take_free_slots_first_then_the_least_recently_used() -> None:
    core = make()
    assert not {*SLOTS.values()} & {*reserve(core, NEW[:4]).slots}
    taken = reserve(core, NEW[4:6])
    assert sorted(taken.slots) == [2, 6]
    assert not taken.evicted
    assert ask(core, Request(), OLD[:1]) == [MISS]
    assert ask(core, Request(), OLD[2:3]) == [RETRY]


def test_a_chunk_that_is_stored_anew_gives_up_its_slot() -> None:
    core = make()
    reserve(core, OLD[:1])
    assert [*core.table.adopted] == OLD[1:]
    assert core.table.room == 7


def test_located_chunks_that_were_given_up_are_asked_of_the_next_tier() -> None:
    core, request = make("files", budget=1 / 8), Request()
    (get,) = step(core, request, OLD[:2])
    assert get.slots == [6]
    reserve(core, NEW[:5])  # four free slots, and the one of OLD[1]
    (get,) = answer(core, get, [COPIED, LOCATED])
    assert (get.tier, get.keys) == (1, OLD[1:2])


def test_whatever_fills_drops_or_resets_slots_voids_entries() -> None:
    core, request, voided = make(), Request(), Voided()
    core.table.trailers = voided
    answer(core, step(core, request, OLD[:1])[0], [COPIED])
    assert voided == []
    stored = reserve(core, NEW[:1])
    assert voided == stored.slots
    core.abort(stored)
    core.fail_load(core.acquire(OLD[:1], request), request)
    assert voided == stored.slots * 2 + [6]
    core.reset()
    core.disable_after_audit(None, "in a test")
    assert voided[-2:] == [None, None]


@pytest.mark.parametrize("tier", [None, 1])
def test_nothing_is_adopted_after_a_failed_audit(tier: int | None) -> None:
    core = make("files")
    core.table.trailers = voided = Voided()
    core.disable_after_audit(tier, "in a test")
    assert voided == [None]


@pytest.mark.parametrize("is_running", [False, True])
def test_a_reset_gives_them_up(is_running: bool) -> None:
    core = make()
    get = step(core, Request(), OLD[:1])[0] if is_running else None
    core.reset()
    assert not core.table.adopted
    assert core.table.room == (7 if is_running else 8)
    core.take_commands()
    if get is not None:
        answer(core, get, [COPIED])
    assert ask(core, Request(), OLD[:1]) == [MISS]
    assert core.table.room == 8


def test_probe_spares_adopted_chunks() -> None:
    """The next tier is probed with a chunk that was given up, while another one is about to be got."""
    windows, others = keys("old", 1, group=1), keys("other", 2)
    statuses = [TierStatus("adopted", in_place=True), TierStatus("files")]
    limits = Limits(promotion_reserve=0.0, promotion_budget=0.25, load_gate="latency")
    core = Tiering(LRU(), statuses, limits, windowed_groups=frozenset({1}))
    core.table.adopt(Voided(), {windows[0]: 0, OLD[0]: 1, others[0]: 2, others[1]: 3})
    core.on_event(SlotsReady(range(8)), 0.0)
    core.note_computed(0, 10, 0.01)
    core.shared.gate.get_ended(1, 1, 9.0, 0.0)
    assert core.shared.gate.decide_to_compute(1, 1, 1, 0, 1, 0.0)
    (budget,) = step(core, holder := Request(), others)
    located = step(core, request := Request(), [*OLD[:1], *windows])
    for get in located:
        answer(core, get, [LOCATED])
    answer(core, budget, [COPIED, COPIED])
    ask(core, holder, others)
    core.release(core.acquire(others, holder))
    core.commit(reserve(core, NEW[:5]), 0.0)  # four free slots, and the one of the window
    core.take_commands()
    probe, get = step(core, request, [*OLD[:1], *windows], 1.0)
    assert (probe.tier, probe.keys) == (1, windows)
    assert (get.tier, get.keys) == (0, OLD[:1])
