"""Announced chunks return to the primary tier in time, at no request's expense."""

from __future__ import annotations

import pytest

from kvtier._core.messages import Get, GetEnded
from kvtier._core.requests import Request
from kvtier._core.tiering import Tiering
from kvtier.keys import OffloadKey
from tests.unit.core import world
from tests.unit.core.world import COPIED, HIT, MISSING, answer, answered, fetches, keys, step

PROMPT = keys("a", 6)


def evicted_core(pin_budget: float = 0.5) -> Tiering:
    """Return a core full of other chunks, whose tier has the prompt, too."""
    core = world.make(slots=16, budget=1.0, pin_budget=pin_budget)
    world.store(core, PROMPT)
    for index in range(4):
        world.store(core, keys(f"other{index}/", 4))
    world.taken(core)
    return core


def due(core: Tiering, now_s: float = 10.0) -> list[Get]:
    core.settle(now_s)
    return fetches(core)


def run(core: Tiering, now_s: float = 10.0) -> int:
    """Settle until nothing is fetched and nothing is looked up any more; return how many gets it took."""
    gets, count, rounds = due(core, now_s), 0, 0
    while gets or not core.prefetches.is_empty:
        count, rounds = count + len(gets), rounds + 1
        assert rounds < 100, "it comes to an end"
        gets = [more for get in gets for more in answer(core, get, answered(get).answers, now_s)]
        gets += due(core, now_s)
    return count


def long_prompt_begun() -> tuple[Tiering, list[OffloadKey], Get]:
    """Return a core that has begun to look for a prompt of 100 chunks, the prompt, and its first get."""
    core = world.make(slots=256, pin_budget=0.5)
    prompt = keys("long", 100)
    world.store(core, prompt)
    for index in range(64):
        world.store(core, keys(f"other{index}/", 4))
    world.taken(core)
    core.prefetches.announce("agent", prompt, from_s=1.0, until_s=30.0)
    (get,) = due(core, 1.0)
    return core, prompt, get


def test_chunks_come_on_time():
    core = evicted_core()
    core.prefetches.announce("agent", PROMPT, from_s=10.0, until_s=30.0)
    assert due(core, 9.0) == []
    assert run(core) > 0
    assert world.there(core, PROMPT) == PROMPT
    assert core.take_counts()["prefetched",] == 6
    for index in range(4):
        world.store(core, keys(f"more{index}/", 2))
    core.settle(29.0)
    assert world.there(core, PROMPT) == PROMPT
    core.settle(30.0)
    assert core.retention.is_empty
    assert core.prefetches.is_empty


def test_present_chunks_are_kept():
    core = world.make(slots=16, budget=1.0, pin_budget=0.5)
    world.store(core, PROMPT)
    core.prefetches.announce("agent", PROMPT, from_s=1.0, until_s=30.0)
    assert due(core) == []
    assert set(core.retention.pinned) == set(PROMPT)
    assert core.take_counts()["prefetched",] == 0


def test_miss_stops_promotion():
    core = evicted_core()
    core.prefetches.announce("agent", PROMPT, from_s=1.0, until_s=30.0)
    (get,) = due(core)
    answer(core, get, [MISSING] * len(get.keys))
    assert run(core) == 0
    assert core.prefetches.is_empty
    assert not any(count[0] == "miss" for count in core.take_counts()), "no request has missed anything"


def test_promotion_obeys_budget():
    core = evicted_core(pin_budget=0.25)
    core.prefetches.announce("agent", PROMPT, from_s=1.0, until_s=30.0)
    run(core)
    assert set(core.retention.pinned) == set(PROMPT[:4]), "a quarter of 16 slots"
    counts = core.take_counts()
    assert counts["prefetched",] == 4
    assert counts["keep_refused", "budget"] == 2


def test_starts_without_requests():
    core = evicted_core()
    client, wanted = Request("client"), keys("tier", 4)
    (get,) = step(core, client, wanted)
    core.prefetches.announce("agent", PROMPT, from_s=1.0, until_s=30.0)
    assert due(core, 1.0) == []
    answer(core, get, answered(get).answers)
    core.close(client)
    assert due(core, 1.0) != []


def test_requests_take_its_slots():
    core = evicted_core()
    core.prefetches.announce("agent", PROMPT, from_s=1.0, until_s=30.0)
    (get,) = due(core, 1.0)
    gets = answer(core, get, [world.LOCATED] * len(get.keys), 1.0)
    client, wanted = Request("client"), keys("tier", 16)
    gets += step(core, client, wanted, 1.0)
    for _ in range(20):  # far more rounds than it takes
        gets = [more for get in gets for more in answer(core, get, answered(get).answers, 1.0)]
        gets += step(core, client, wanted, 1.0)
    assert world.ask(core, client, wanted) == [HIT] * 16, "all of the budget is its own"
    core.release(core.acquire(wanted, client))


def test_requests_share_its_get():
    core = evicted_core()
    core.prefetches.announce("agent", PROMPT, from_s=1.0, until_s=30.0)
    (get,) = due(core, 1.0)
    client = Request("client")
    assert step(core, client, PROMPT, 1.0) == []
    gets = [get]
    while gets:
        gets = [more for get in gets for more in answer(core, get, answered(get).answers, 1.0)]
        gets += step(core, client, PROMPT, 1.0)
    assert world.ask(core, client, PROMPT) == [HIT] * 6


@pytest.mark.parametrize("when", ["before", "during", "after"])
@pytest.mark.parametrize("how", ["release", "reset"])
def test_release_leaves_nothing(when: str, how: str):
    core = evicted_core()
    core.prefetches.announce("agent", PROMPT, from_s=1.0, until_s=30.0)
    gets = due(core, 1.0) if when == "during" else []
    if when == "after":
        run(core, 1.0)
    if how == "reset":
        core.reset()
    else:
        core.prefetches.release("agent")
    world.taken(core)
    for get in gets:
        answer(core, get, [COPIED] * len(get.slots) + [MISSING] * (len(get.keys) - len(get.slots)), 1.0)
    assert run(core, 2.0) == 0
    assert core.prefetches.is_empty
    assert core.retention.is_empty
    assert not core.holds.pending


def test_same_name_replaces():
    core = evicted_core()
    core.prefetches.announce("agent", keys("b", 3), from_s=1.0, until_s=30.0)
    core.prefetches.announce("agent", PROMPT, from_s=5.0, until_s=30.0)
    assert due(core, 1.0) == []
    (get,) = due(core, 5.0)
    assert list(get.keys) == PROMPT


def test_slots_bound_announcements():
    core = world.make(slots=16)
    for index in range(100):
        core.prefetches.announce(f"agent{index}", keys(f"p{index}/", 4), from_s=9.0, until_s=30.0)
    assert core.take_counts()["keep_refused", "names"] == 100 * 4 - 16 * 16


def test_late_announcement_is_forgotten():
    core = evicted_core()
    core.prefetches.announce("agent", PROMPT, from_s=1.0, until_s=30.0)
    assert due(core, 30.0) == []
    assert core.prefetches.is_empty


def test_long_prompt_goes_in_pieces():
    core, prompt, get = long_prompt_begun()
    assert len(get.keys) == 32
    for more in answer(core, get, answered(get).answers, 1.0):
        answer(core, more, answered(more).answers, 1.0)
    run(core, 1.0)
    assert world.there(core, prompt) == prompt


def test_cancel_keeps_promoted_chunks():
    core = evicted_core()
    core.prefetches.announce("agent", PROMPT, from_s=1.0, until_s=30.0)
    run(core, 1.0)
    core.prefetches.cancel("agent")
    assert set(core.retention.pinned) == set(PROMPT), "the conversation is back, and waits for its turn"


def test_quick_request_skips_wait():
    core = world.make(slots=16, budget=1.0, pin_budget=0.5, load_gate="latency")  # type: ignore[arg-type]
    first = Request("first")
    (get,) = step(core, first, keys("first", 2))
    core.on_event(GetEnded(get.id, [COPIED] * 2, {}, 10.0, world.GOOD, elapsed_s=10.0), 0.0)
    core.note_computed(0, 1, 0.001)
    core.close(first)
    core.prefetches.announce("agent", PROMPT, from_s=1.0, until_s=30.0)
    assert due(core, 1.0) != [], "a prefetch makes nobody wait"
    assert due(core, 1.0) == [], "and asks once"
    client = Request("client")
    step(core, client, PROMPT, 1.0)
    assert world.ask(core, client, PROMPT) == [world.MISS]


def test_waiting_asks_no_tier():
    core = world.make(tiers=2, pin_budget=0.5, load_gate="latency")  # type: ignore[arg-type]
    core.note_computed(0, 1, 10.0)
    core.prefetches.announce("agent", PROMPT[:1], from_s=1.0, until_s=30.0)
    (prefetch,) = due(core, 1.0)
    client = Request("client")
    (get,) = step(core, client, PROMPT[:1], 1.0)
    assert answer(core, prefetch, [MISSING], 1.0) == []
    assert step(core, client, PROMPT[:1], 1.0) == [], "the request asks once, too"
    (second,) = answer(core, get, [MISSING], 1.0)
    assert answer(core, second, [COPIED], 1.0) == []
    assert world.there(core, PROMPT[:1]) == PROMPT[:1]


def test_absent_chunks_are_not_asked():
    core = world.make(budget=1.0, pin_budget=0.5)
    core.prefetches.announce("agent", PROMPT, from_s=1.0, until_s=30.0)
    client = Request("client")
    get, rest = step(core, client, PROMPT[:2], 1.0)
    assert [list(get.keys), list(rest.keys)] == [PROMPT[:2], PROMPT[2:]]
    assert answer(core, get, [MISSING] * 2, 1.0) == []
    assert answer(core, rest, [MISSING] * 4, 1.0) == []
    core.close(client)
    world.store(core, PROMPT[:2])
    assert due(core, 1.0) == []
    assert core.prefetches.is_empty


def test_timeout_stops_promotion():
    core, _, get = long_prompt_begun()
    for more in answer(core, get, answered(get).answers, 1.0):
        answer(core, more, answered(more).answers, 1.0)
    assert due(core, 30.0) == []
    assert run(core, 30.0) == 0


def test_kept_chunks_need_no_room():
    core = world.make(slots=16, budget=1.0, pin_budget=0.25)
    world.store(core, PROMPT[:4])
    core.retention.keep("ttl", PROMPT[:4])
    core.settle(0.0)
    core.prefetches.announce("agent", PROMPT[:4], from_s=1.0, until_s=30.0)
    run(core, 1.0)
    core.retention.release("ttl")
    assert set(core.retention.pinned) == set(PROMPT[:4])


def test_only_permitted_tiers_are_asked():
    core = evicted_core()
    core.prefetches.announce("agent", PROMPT, from_s=1.0, until_s=30.0, tiers=frozenset())
    assert run(core, 1.0) == 0


def test_windows_announce_nothing():
    core = world.make(windowed=frozenset({1}))
    core.prefetches.announce("agent", PROMPT, from_s=1.0, until_s=30.0)
    assert core.prefetches.is_empty
