"""How chunks of other tiers are found and brought: prefix first, shared, within bounds, by a deadline."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvtier._core.messages import Answer, Get, GetEnded, Put, PutEnded
from kvtier._core.promotion.waits import Wait
from kvtier._core.requests import Request
from kvtier._core.states import RequestState
from kvtier._core.tiering import Tiering
from kvtier.errors import StateError
from kvtier.keys import OffloadKey
from kvtier_testing import invariants
from tests.unit.core.world import (
    COPIED,
    HIT,
    LOCATED,
    MISS,
    MISSING,
    PENDING,
    RETRY,
    CountedKey,
    answer,
    ask,
    fetches,
    keys,
    make,
    step,
    store,
)


def test_lookup_and_get_are_one_delay() -> None:
    core, request, prompt = make(), Request(), keys("a", 4)
    assert ask(core, request, prompt) == [RETRY] * 4
    core.settle(0.0)
    (fetch,) = fetches(core)
    assert (fetch.tier, list(fetch.keys), len(fetch.slots), fetch.located) == (0, prompt, 4, False)
    assert answer(core, fetch, [COPIED] * 4) == []
    assert ask(core, request, prompt) == [HIT] * 4
    pinned = core.acquire(prompt, request)
    assert pinned.slots == list(fetch.slots)
    assert pinned.origins == [0] * 4
    core.release(pinned)
    again = core.acquire(prompt)
    assert again.origins == [None] * 4, "the second load comes from the primary tier"


@pytest.mark.parametrize(("second", "expected"), [(LOCATED, [1, 2, 3]), (MISSING, [])])
def test_next_tier_may_close_gap(second: Answer, expected: list[int]) -> None:
    core, request, prompt = make(slots=8, tiers=2, budget=1.0), Request(), keys("a", 4)
    store(core, keys("old", 8))
    (fetch,) = step(core, request, prompt)
    first, gap = sorted(answer(core, fetch, [LOCATED, MISSING, LOCATED, LOCATED]), key=lambda f: -f.tier)[
        ::-1
    ]
    assert (first.tier, list(first.keys), first.located) == (0, prompt[:1], True)
    assert (gap.tier, list(gap.keys), gap.located) == (1, prompt[1:2], False)
    answer(core, first, [COPIED])
    begun = answer(core, gap, [second])
    begun += step(core, request, prompt)
    assert sorted(prompt.index(key) for fetch in begun for key in fetch.keys) == expected


def test_located_chunk_is_got() -> None:
    core, prompt = make(slots=8, tiers=2, budget=1.0), keys("a", 4)
    store(core, keys("old", 8))
    one, two, three = Request(), Request(), Request()
    (prefix,) = step(core, one, prompt[:2])
    (suffix,) = step(core, two, prompt)
    (suffix,) = answer(core, suffix, [MISSING] * 2)
    assert answer(core, suffix, [LOCATED] * 2) == []
    (same,) = step(core, three, prompt[2:])
    assert step(core, two, prompt) == []  # now it waits for this one, too
    core.close(three)
    assert answer(core, same, [MISSING] * 2) == []
    answer(core, prefix, [LOCATED] * 2)
    (fetch,) = step(core, two, prompt)
    assert (fetch.tier, list(fetch.keys), fetch.located) == (1, prompt[2:], True)


def test_suffix_waits_for_prefix() -> None:
    core, prompt = make(slots=8, budget=1.0), keys("a", 4)
    store(core, keys("old", 8))
    one, two = Request(), Request()
    (prefix,) = step(core, one, prompt[:2])
    (suffix,) = step(core, two, prompt)
    assert list(suffix.keys) == prompt[2:]
    assert answer(core, suffix, [LOCATED] * 2) == []
    assert step(core, two, prompt) == []
    (promoting,) = answer(core, prefix, [LOCATED] * 2)
    assert [list(fetch.keys) for fetch in step(core, two, prompt)] == [prompt[2:]]
    answer(core, promoting, [COPIED] * 2)
    assert ask(core, two, prompt) == [HIT, HIT, PENDING, PENDING]


def test_absent_chunk_evicts_nothing() -> None:
    core = make(slots=16, budget=0.5, reserve=0.25)
    store(core, keys("old", 16))
    core.settle(0.0)
    kept = len(core.table.visible)
    assert kept == 12, "the reserve is free"
    for index in range(10):
        request, prompt = Request(), keys(f"absent{index}-", 6)
        (fetch,) = step(core, request, prompt)
        assert len(fetch.slots) == 4
        answer(core, fetch, [MISSING] * 6)
        assert ask(core, request, prompt) == [MISS]
        core.close(request)
        core.settle(0.0)
    assert len(core.table.visible) == kept
    assert not core.take_counts()["evicted",]


def test_miss_counts_once_per_request() -> None:
    core, prompt = make(), keys("a", 4)
    other, request = Request(), Request()
    (rest,) = step(core, other, prompt[2:])
    (front,) = step(core, request, prompt)
    answer(core, rest, [MISSING] * 2)
    assert ask(core, request, prompt) == [RETRY, RETRY, MISS]
    core.settle(0.0)
    assert ("miss", "absent") not in core.take_counts(), "an earlier chunk is still pending"
    answer(core, front, [MISSING] * 2)
    for _ in range(3):  # the engine has no blocks for it
        assert ask(core, request, prompt) == [MISS]
        core.settle(0.0)
    assert core.take_counts()["miss", "absent"] == 1


def test_first_request_fits_budget() -> None:
    core, first, second = make(slots=16, budget=0.25), Request(), Request()
    long, other = keys("long", 8), keys("other", 8)
    (fetch,) = step(core, first, long)
    assert len(fetch.slots) == 4
    (waits,) = step(core, second, other)
    assert waits.slots == []
    assert answer(core, fetch, [COPIED] * 4 + [LOCATED] * 4) == []
    assert answer(core, waits, [LOCATED] * 8) == []
    assert ask(core, first, long) == [HIT] * 4 + [MISS]
    assert ask(core, second, other) == [PENDING] * 8, "the second waits for its turn"
    core.settle(0.0)
    assert {count: n for count, n in core.take_counts().items() if count[0] == "miss"} == {
        ("miss", "budget"): 1
    }
    ask(core, first, long)
    core.release(core.acquire(long[:4], first))
    (turn,) = step(core, second, other)
    assert list(turn.keys) == other[:4], "the budget is free again"


def test_full_budget_yields_to_first() -> None:
    core, first, second = make(slots=16, budget=0.25), Request(), Request()
    mine, other = keys("mine", 4), keys("other", 4)
    store(core, keys("old", 16))
    (waits,) = step(core, first, mine)
    (sooner,) = step(core, second, other)
    (promoting,) = answer(core, sooner, [LOCATED] * 4)
    assert answer(core, waits, [LOCATED] * 4) == []
    assert step(core, first, mine) == [], "what is on its way is waited for"
    answer(core, promoting, [COPIED] * 4)
    (turn,) = step(core, first, mine)
    assert (list(turn.keys), len(turn.slots)) == (mine, 4)
    assert ask(core, second, other) == [HIT] * 4, "there are other slots"
    assert ("miss", "budget") not in core.take_counts()


def test_held_slots_yield_to_first() -> None:
    core, first, second, third = make(slots=4, budget=1.0), Request(), Request(), Request()
    store(core, keys("old", 4))
    (waits,) = step(core, first, keys("mine", 3))
    step(core, second, [*keys("old", 1), *keys("more", 1)])
    step(core, third, [*keys("old", 4), *keys("more", 1)])
    assert answer(core, waits, [LOCATED] * 3) == [], "all slots are held"
    (turn,) = step(core, first, keys("mine", 3))
    assert len(turn.slots) == 3
    again = [core.repeat_answer(keys("old")[0], request) for request in (second, third)]
    assert again == [RETRY, None], "only a request that lost a chunk is asked for all its keys again"
    assert ask(core, second, keys("old", 1)) == [HIT], "who comes last loses first"
    assert ask(core, third, keys("old", 4)) == [HIT, RETRY, RETRY, RETRY]


def test_unwanted_chunks_are_released() -> None:
    """Its engine has the first chunks by now: another request of the same prefix has run."""
    core, request, there, wanted = make(slots=8), Request(), keys("there", 2), keys("wanted", 2)
    store(core, there)
    step(core, request, [*there, *wanted])
    assert [core.table.visible[key].pins for key in there] == [1, 1]
    step(core, request, [*there, *wanted])
    assert [core.table.visible[key].pins for key in there] == [1, 1], "it asks as before"
    step(core, request, [there[1], *wanted])
    assert [core.table.visible[key].pins for key in there] == [0, 1]
    core.repeat_answer(there[1], request)
    core.settle(0.0)
    assert [core.table.visible[key].pins for key in there] == [0, 1], "two questions stand for all"


def test_repeated_scan_keeps_holds() -> None:
    core, request, there, wanted = make(slots=8), Request(), keys("there", 2), keys("wanted", 2)
    store(core, there)
    (fetch,) = step(core, request, [*there, *wanted])
    assert core.repeat_answer(there[0], request) is RETRY
    answer(core, fetch, [COPIED] * 2)
    assert core.repeat_answer(there[1], request) is None
    assert ask(core, request, [there[1], *wanted]) == [HIT] * 3
    core.settle(1.0)
    assert [core.table.visible[key].pins for key in [*there, *wanted]] == [1] * 4
    store(core, keys("new", 8))
    assert ask(core, request, [*there, *wanted]) == [HIT] * 4


@pytest.mark.parametrize("tiers", [1, 2])
@pytest.mark.parametrize("event", ["get ended", "overdue"])
@pytest.mark.parametrize("wait_s", [None, 10.0])
def test_change_after_repeated_scan_keeps_holds(tiers: int, event: str, wait_s: float | None) -> None:
    """Two questions stood for all: the chunks between them were asked for."""
    core, there, wanted = make(tiers=tiers), keys("there", 4), keys("wanted", 2)
    request = Request(wait=Wait(wait_s) if wait_s else None)
    store(core, there)
    (fetch,) = step(core, request, [*there, *wanted])
    assert [core.repeat_answer(key, request) for key in there[:2]] == [RETRY, MISS]
    if event == "get ended":
        answer(core, fetch, [COPIED] * 2)
    core.settle(3.0 if event == "overdue" else 0.0)
    assert [core.table.visible[key].pins for key in there] == [1] * 4


def test_standing_scan_is_two_questions() -> None:
    core, request, prompt = make(), Request(), keys("a", 4)
    assert core.repeat_answer(prompt[0], request) is None, "it was not asked yet"
    (fetch,) = step(core, request, prompt)
    assert core.repeat_answer(prompt[1], request) is None, "another scan"
    for now_s in (1.0, 2.0):
        assert [core.repeat_answer(key, request) for key in prompt[:2]] == [RETRY, MISS]
        assert core.repeat_answer(keys("a", 1, group=1)[0], request) is RETRY, (
            "a miss would end the scan of its group"
        )
        core.settle(now_s)
        assert fetches(core) == []
        assert (request.is_waiting, request.deadline_s) == (True, 5.0)
    answer(core, fetch, [COPIED] * 4)
    assert core.repeat_answer(prompt[0], request) is None
    assert ask(core, request, prompt) == [HIT] * 4


def test_a_step_without_news_examines_few_keys() -> None:
    core, requests = make(slots=64, budget=0.25), [Request() for _ in range(8)]
    store(core, keys("old", 64))
    prompts = [[OffloadKey(CountedKey(key)) for key in keys(f"{name}-", 256)] for name in range(8)]

    def run_steps() -> int:
        for _ in range(3):
            CountedKey.hashed = 0
            for request, prompt in zip(requests, prompts, strict=True):
                if core.repeat_answer(prompt[0], request) is None:
                    ask(core, request, prompt)
            core.settle(0.0)
        return CountedKey.hashed // len(requests)

    assert run_steps() < 8, "all are in flight"
    gets = fetches(core)
    (second,) = _located(core, gets[1:])
    assert run_steps() < 8, "the second has all of the budget"
    assert _located(core, gets[:1]) == []
    assert run_steps() < 8, "the first waits for the budget"
    answer(core, second, [COPIED] * 16)
    run_steps()
    (first,) = fetches(core)
    assert list(first.keys) == prompts[0][:16], "the budget is free"
    assert run_steps() < 8


def _located(core: Tiering, gets: Sequence[Get]) -> list[Get]:
    """Report all keys of gets as located; return the gets that follow."""
    return [get for ended in gets for get in answer(core, ended, [LOCATED] * len(ended.keys))]


def test_windows_are_located_first() -> None:
    core, request = make(windowed=frozenset({1})), Request()
    window, prefix = keys("w", 6, group=1), keys("p", 2)
    for key in [*reversed(window), *prefix]:
        assert core.lookup(key, request) is RETRY
    core.settle(0.0)
    by_prefix, located = fetches(core)
    assert (list(by_prefix.keys), len(by_prefix.slots)) == (prefix, 2)
    assert (sorted(located.keys), located.slots) == (sorted(window), [])
    answer(core, by_prefix, [COPIED] * 2)
    assert answer(core, located, [LOCATED] * 6) == []
    # The engine needs the last two only; they are fetched as they are asked for.
    assert [core.lookup(key, request) for key in window[:3:-1]] == [PENDING] * 2
    core.settle(0.0)
    (fetch,) = fetches(core)
    assert (list(fetch.keys), fetch.located) == (window[:3:-1], True)


def test_passed_request_holds_nothing() -> None:
    """It was loaded without waiting for the rest; the rest must not stay pinned for its whole life."""
    core, request, prompt = make(slots=8, budget=1.0), Request(), keys("a", 4)
    store(core, prompt[:2])
    (fetch,) = step(core, request, prompt)
    ask(core, request, prompt)
    core.release(core.acquire(prompt[:2], request))
    core.settle(0.0)
    answer(core, fetch, [COPIED] * 2)
    assert not request.held
    assert len(core.holds.promoting) == 0
    assert ask(core, Request(), prompt) == [HIT] * 4


def test_transfers_end_once() -> None:
    core, request = make(), Request("r")
    (fetch,) = step(core, request, keys("a", 1))
    answer(core, fetch, [COPIED])
    with pytest.raises(StateError, match=f"transfer {fetch.id} has ended"):
        answer(core, fetch, [COPIED])
    core.close(request)
    with pytest.raises(StateError, match="request 'r' is CLOSED"):
        core.close(request)


# --- which tiers may be asked for a request --------------------------------------------------------


def test_only_filtered_tiers_are_asked() -> None:
    core, request, prompt = make(tiers=3), Request("r", frozenset({1})), keys("a", 2)
    (fetch,) = step(core, request, prompt)
    assert fetch.tier == 1
    assert answer(core, fetch, [MISSING] * 2) == []
    assert ask(core, request, prompt) == [MISS]
    counts = core.take_counts()
    assert {name: count for name, count in counts.items() if name[0] == "skipped"} == {
        ("skipped", "t0", "filter"): 2,
        ("skipped", "t2", "filter"): 2,
    }


def test_different_filters_do_not_wait() -> None:
    core, prompt = make(tiers=2), keys("a", 2)
    first, second = Request("first"), Request("second", frozenset({1}))
    (slow,) = step(core, first, prompt)
    (fast,) = step(core, second, prompt)
    assert (slow.tier, fast.tier) == (0, 1)
    answer(core, fast, [MISSING] * 2)
    assert ask(core, second, prompt) == [MISS], "it does not wait for the tier that it may not be served from"
    assert ask(core, first, prompt) == [RETRY] * 2
    core.settle(0.0)
    assert fetches(core) == [], "and the other one still waits for its own"
    answer(core, slow, [COPIED] * 2)
    assert ask(core, first, prompt) == [HIT] * 2
    assert ask(core, second, prompt) == [HIT] * 2, "in the primary tier it is there for all"


# --- preemption ------------------------------------------------------------------------------------


def test_preempted_is_looked_up_anew() -> None:
    core, request, prompt = make(), Request(), keys("a", 2)
    (fetch,) = step(core, request, prompt[:1])
    answer(core, fetch, [MISSING])
    step(core, request, prompt[1:], now_s=0.0)
    core.settle(10.0)
    assert request.state is RequestState.EXPIRED
    assert ask(core, request, prompt) == [MISS]
    core.restart(request)
    assert ask(core, request, prompt) == [RETRY] * 2, "what was not there then may be there now"


def test_preempted_keeps_its_hits() -> None:
    core, request, prompt = make(slots=4), Request(), keys("a", 3)
    store(core, prompt[:2])
    assert ask(core, request, prompt) == [HIT, HIT, RETRY]
    core.restart(request)
    core.settle(0.0)
    assert [list(fetch.keys) for fetch in fetches(core)] == [prompt[2:]]
    assert {chunk.key for chunk in request.held} == set(prompt[:2])


# --- what a later tier brings goes to the earlier ones -----------------------------------------------


def test_later_tier_feeds_earlier() -> None:
    core, request, prompt = make(tiers=3), Request(), keys("a", 2)
    for _ in range(2):
        step(core, request, prompt)
    first = next(iter(core.shared.transfers.values()))
    core.on_event(GetEnded(first.id, [COPIED, MISSING]), 0.0)
    (second,) = fetches(core)
    core.on_event(GetEnded(second.id, [MISSING]), 0.0)
    (third,) = fetches(core)
    assert (third.tier, list(third.keys)) == (2, prompt[1:])
    core.on_event(GetEnded(third.id, [COPIED]), 0.0)
    invariants.check(core)
    puts = core.take_commands()
    assert all(isinstance(put, Put) for put in puts)
    assert [(put.tier, list(put.keys)) for put in puts] == [(0, prompt[1:]), (1, prompt[1:])]  # type: ignore[union-attr]
    assert core.take_counts()["backfilled", "t1"] == 1
    for put in puts:
        core.on_event(PutEnded(put.id, [True]), 0.0)  # type: ignore[union-attr]
        invariants.check(core)
    assert ask(core, request, prompt) == [HIT, HIT]


def test_locating_brings_nothing() -> None:
    core, request, prompt = make(tiers=2), Request(locates=True), keys("a", 4)
    store(core, prompt[:1])
    (first,) = step_over(core, request, prompt)
    assert (first.tier, list(first.keys), list(first.slots)) == (0, prompt[1:], [])
    (second,) = answer(core, first, [LOCATED, MISSING, LOCATED])
    assert (second.tier, list(second.keys), list(second.slots)) == (1, prompt[2:3], [])
    assert answer(core, second, [MISSING]) == []
    assert [core.lookup(key, request) for key in prompt] == [HIT, PENDING, MISS, PENDING]
    assert [key in request.located for key in prompt] == [False, True, False, True]
    core.settle(0.0)
    assert fetches(core) == [], "what is known is not asked again"
    core.close(request)
    invariants.check(core)


def test_locating_takes_no_turn() -> None:
    core, loading, locating, prompt = make(), Request(), Request(locates=True), keys("a", 2)
    (fetch,) = step(core, loading, prompt)
    assert step_over(core, locating, prompt) == []
    answer(core, fetch, [COPIED, MISSING])
    assert [core.lookup(key, locating) for key in prompt] == [HIT, MISS]
    core.close(locating)
    assert ask(core, loading, prompt) == [HIT, MISS]


def test_locating_is_not_first_in_line() -> None:
    core, locating, loading = make(slots=4, budget=1.0), Request(locates=True), Request()
    mine, other = keys("a", 3), keys("b", 4)
    store(core, mine[:2])
    step_over(core, locating, mine)
    assert core.table.evictable == 2, "what it was told is there may leave"
    (fetch,) = step(core, loading, other)
    more = answer(core, fetch, [LOCATED] * len(fetch.keys))
    assert sum(len(get.slots) for get in more) == 4, "the one that loads is first, and gets all slots"
    invariants.check(core)


def test_located_key_is_not_got() -> None:
    core, loading, locating, prompt = make(slots=4), Request(), Request(locates=True), keys("a", 4)
    store(core, keys("b", 4))  # so that what is found is brought by another get
    (fetch,) = step(core, loading, prompt)
    step_over(core, locating, prompt)
    core.close(loading)
    assert answer(core, fetch, [LOCATED] * 4) == []
    invariants.check(core)


def test_locating_holds_nothing() -> None:
    core, loading, locating, prompt = make(), Request(), Request(locates=True), keys("a", 4)
    (fetch,) = step(core, loading, prompt)
    step_over(core, locating, prompt)
    answer(core, fetch, [COPIED] * 4)
    core.close(loading)
    assert core.table.evictable == 4
    assert not core.holds.promoting
    invariants.check(core)


def step_over(core: Tiering, request: Request, prompt: Sequence[OffloadKey]) -> list[Get]:
    """Ask for every key, whatever the answers before it, and return the fetches that came of it."""
    for key in prompt:
        core.lookup(key, request)
    core.settle(0.0)
    return fetches(core)


def test_expired_request_holds_nothing_after_its_round() -> None:
    core, request, stored = make(), Request(), keys("s")
    store(core, stored)
    (fetch,) = step(core, request, keys("m"))
    core.settle(5.0)
    assert request.state is RequestState.EXPIRED
    assert ask(core, request, stored) == [HIT]
    answer(core, fetch, [MISSING], 5.1)  # a get may evict when it ends, so it pins the round's hits
    assert request.held
    core.settle(5.2)
    assert not request.held
    assert not core.holds.pending
