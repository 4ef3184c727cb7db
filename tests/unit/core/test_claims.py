"""Clients' claims on chunks, beside requests of others. ``tests/property/test_claims.py`` has the rules."""

from __future__ import annotations

import pytest

from kvtier._core.claims import MOST_PER_SLOT
from kvtier._core.messages import Get, GetEnded
from kvtier._core.requests import Request, Terms
from kvtier._core.tiering import Tiering
from kvtier.keys import OffloadKey
from tests.unit.core import world
from tests.unit.core.world import COPIED, HIT, MISSING, answer, answered, fetches, keys, step

PROMPT = keys("a", 6)
FROM_S, OVER_S = 10.0, 40.0  # when the prompt of ``announce`` is promoted, and no more kept


def begin(core: Tiering, name: str = "agent", kept_s: float = 0.0, next_use_s: float = 0.0) -> Request:
    request = Request()
    core.claims.start_request(request, Terms(name, kept_s, next_use_s))
    return request


def announce(core: Tiering, prompt: list[OffloadKey] = PROMPT, tiers: frozenset[int] | None = None) -> None:
    """End a request at time 0 whose prompt is needed again after 20 s."""
    request = begin(core, next_use_s=20.0)
    request.tiers = tiers
    core.claims.use(request, prompt)
    core.close(request, 0.0)


def evicted_core(prompt: list[OffloadKey] = PROMPT, slots: int = 16) -> Tiering:
    """Return a core full of other chunks, whose tier has the prompt, too."""
    core = world.make(slots, budget=1.0, pin_budget=0.5)
    world.store(core, prompt)
    for index in range(slots // 4):
        world.store(core, keys(f"other{index}/", 4))
    world.taken(core)
    return core


def due(core: Tiering, now_s: float = FROM_S) -> list[Get]:
    core.settle(now_s)
    return fetches(core)


def run(core: Tiering, now_s: float = FROM_S) -> None:
    """Answer gets for far more rounds than it takes."""
    gets: list[Get] = []
    for _ in range(20):
        gets = [more for get in gets for more in answer(core, get, answered(get).answers, now_s)]
        gets += due(core, now_s)


def test_stored_chunks_are_kept_until_over() -> None:
    core = world.make(16, 0, pin_budget=0.25)
    request = begin(core, kept_s=10.0)
    reservation = world.reserve(core, PROMPT[:3], request)
    core.settle(0.0)
    core.commit(reservation, 0.0)
    core.close(request, 5.0)
    for index in range(4):
        core.settle(10.0)
        world.store(core, keys(f"other{index}/", 4))
    assert world.there(core, PROMPT) == PROMPT[:3]
    core.settle(15.0)
    assert core.claims.is_empty


def test_prefetch_of_kept_chunks_keeps_them_longer() -> None:
    core = world.make(16, pin_budget=0.5)
    world.store(core, PROMPT)
    request = begin(core, kept_s=5.0)
    core.claims.use(request, PROMPT)
    core.close(request, 0.0)
    core.settle(0.0)
    assert core.claims.promote("agent", 10.0, 4.0, None)
    core.settle(13.9)
    assert set(core.claims.pinned) == set(PROMPT)
    core.settle(14.0)
    assert core.claims.is_empty


def test_needed_chunks_return_on_time() -> None:
    core = evicted_core()
    announce(core)
    assert due(core, FROM_S - 1) == []
    run(core)
    assert core.take_counts()["prefetched",] == 6
    core.settle(OVER_S - 1)
    assert set(core.claims.pinned) == set(PROMPT)
    core.settle(OVER_S)
    assert core.claims.is_empty


def test_promotion_waits_for_room() -> None:
    core = evicted_core()
    core.claims.use(begin(core, "other", kept_s=9.0), keys("other3/", 4))
    core.claims.use(begin(core, "other", kept_s=9.0), keys("other2/", 4))
    announce(core)
    run(core)
    assert set(core.claims.pinned) == {*keys("other3/", 4), *keys("other2/", 4)}, "all of the budget"
    assert not core.claims.is_promoting, "an engine need not step for it"
    core.claims.release("other")
    run(core)
    assert set(core.claims.pinned) == set(PROMPT)


def test_promotion_behind_a_request_needs_no_steps() -> None:
    """A paused engine does not ask for the request again; it ends its pause when nothing needs a step."""
    core = evicted_core()
    announce(core)
    client = Request("client")
    step(core, client, keys("elsewhere", 2), FROM_S - 1)
    assert due(core) == []
    assert not core.claims.is_promoting
    core.close(client)
    assert core.claims.is_promoting
    run(core)
    assert set(core.claims.pinned) == set(PROMPT)


def test_slots_bound_claims() -> None:
    core = world.make(16, 0, pin_budget=0.25)
    world.store(core, PROMPT[:4])
    for index in range(100):
        request = begin(core, str(index), kept_s=9.0, next_use_s=9.0 * (index % 2))
        core.claims.use(request, PROMPT[:4])
        core.close(request, 0.0)
    assert core.take_counts()["keep_refused", "names"] == 150 * 4 - MOST_PER_SLOT * 16
    core.settle(18.0)
    assert core.claims.is_empty


def test_ended_request_without_time_claims_nothing() -> None:
    core = world.make()
    request = begin(core, kept_s=9.0)
    core.claims.use(request, PROMPT)
    core.close(request)
    core.settle(0.0)
    assert core.claims.is_empty


def test_shared_chunks_are_paid_once() -> None:
    core = world.make(16, 1, pin_budget=0.25, budget=0.25)
    other = Request()
    (get,) = step(core, other, keys("a", 4))
    core.on_event(answered(get), 0.0)
    core.claims.use(begin(core, kept_s=9.0), keys("a", 4))
    core.settle(0.0)
    core.close(other)
    assert not core.holds.promoting
    core.claims.release("agent")
    (get,) = step(core, Request(), keys("b", 4))
    assert len(get.slots) == 4, "the promotion budget is there again"


def test_miss_counts_for_no_request() -> None:
    core = evicted_core()
    announce(core)
    (get,) = due(core)
    answer(core, get, [MISSING] * len(get.keys))
    assert due(core) == []
    assert core.claims.is_empty
    assert not any(count[0] == "miss" for count in core.take_counts())


def test_promotion_starts_without_requests() -> None:
    core = evicted_core()
    client = Request("client")
    announce(core)
    (get,) = step(core, client, keys("tier", 4), FROM_S - 1)
    assert due(core) == []
    answer(core, get, answered(get).answers, FROM_S)
    core.close(client)
    assert due(core) != []


def test_requests_take_its_slots() -> None:
    core = evicted_core()
    announce(core)
    (get,) = due(core)
    gets = answer(core, get, [world.LOCATED] * len(get.keys), FROM_S)
    client, wanted = Request("client"), keys("tier", 16)
    gets += step(core, client, wanted, FROM_S)
    for _ in range(20):  # far more rounds than it takes
        gets = [more for get in gets for more in answer(core, get, answered(get).answers, FROM_S)]
        gets += step(core, client, wanted, FROM_S)
    assert world.ask(core, client, wanted) == [HIT] * 16, "all of the budget is its own"


def test_requests_share_its_get() -> None:
    core = evicted_core()
    announce(core)
    gets = due(core)
    client = Request("client")
    assert step(core, client, PROMPT, FROM_S) == []
    while gets:
        gets = [more for get in gets for more in answer(core, get, answered(get).answers, FROM_S)]
        gets += step(core, client, PROMPT, FROM_S)
    assert world.ask(core, client, PROMPT) == [HIT] * 6


@pytest.mark.parametrize("how", ["release", "reset", "return", "time"])
def test_end_amid_promotion_leaves_nothing(how: str) -> None:
    core = evicted_core()
    announce(core)
    gets = due(core)
    if how == "release":
        core.claims.release("agent")
    elif how == "reset":
        core.reset()
    elif how == "return":
        core.close(begin(core))
    core.settle(OVER_S if how == "time" else FROM_S)
    assert core.claims.is_empty
    assert not core.holds.pending
    world.taken(core)
    for get in gets:
        answer(core, get, [COPIED] * len(get.slots) + [MISSING] * (len(get.keys) - len(get.slots)), OVER_S)
    assert due(core, OVER_S) == []
    assert not core.holds.promoting


def test_long_prompt_goes_in_pieces() -> None:
    prompt = keys("long", 100)
    core = evicted_core(prompt, slots=256)
    announce(core, prompt)
    (get,) = due(core)
    assert len(get.keys) == 32
    for more in answer(core, get, answered(get).answers, FROM_S):
        answer(core, more, answered(more).answers, FROM_S)
    run(core)
    assert world.there(core, prompt) == prompt


def test_quick_request_skips_wait() -> None:
    core = world.make(slots=16, budget=1.0, pin_budget=0.5, load_gate="latency")  # type: ignore[arg-type]
    first = Request("first")
    (get,) = step(core, first, keys("first", 2))
    core.on_event(GetEnded(get.id, [COPIED] * 2, {}, 10.0, world.GOOD, elapsed_s=10.0), 0.0)
    core.note_computed(0, 1, 0.001)
    core.close(first)
    announce(core)
    assert due(core) != [], "a prefetch makes nobody wait"
    assert due(core) == [], "and asks once"
    client = Request("client")
    step(core, client, PROMPT, FROM_S)
    assert world.ask(core, client, PROMPT) == [world.MISS]


def test_waiting_asks_no_tier() -> None:
    core = world.make(tiers=2, pin_budget=0.5, load_gate="latency")  # type: ignore[arg-type]
    core.note_computed(0, 1, 10.0)
    announce(core, PROMPT[:1])
    (prefetch,) = due(core)
    client = Request("client")
    (get,) = step(core, client, PROMPT[:1], FROM_S)
    assert answer(core, prefetch, [MISSING], FROM_S) == []
    assert step(core, client, PROMPT[:1], FROM_S) == [], "the request asks once, too"
    (second,) = answer(core, get, [MISSING], FROM_S)
    assert answer(core, second, [COPIED], FROM_S) == []
    assert world.there(core, PROMPT[:1]) == PROMPT[:1]


def test_absent_chunks_are_not_asked() -> None:
    core = world.make(budget=1.0, pin_budget=0.5)
    announce(core)
    client = Request("client")
    get, rest = step(core, client, PROMPT[:2], FROM_S)
    assert [list(get.keys), list(rest.keys)] == [PROMPT[:2], PROMPT[2:]]
    assert answer(core, get, [MISSING] * 2, FROM_S) == []
    assert answer(core, rest, [MISSING] * 4, FROM_S) == []
    core.close(client)
    world.store(core, PROMPT[:2])
    assert due(core) == []
    core.settle(OVER_S)
    assert core.claims.is_empty


@pytest.mark.parametrize("has_windows", [False, True])
def test_only_permitted_tiers_are_asked(has_windows: bool) -> None:
    core = world.make(windowed=frozenset({1}) if has_windows else frozenset())
    announce(core, tiers=None if has_windows else frozenset())
    assert due(core) == []
    assert core.claims.is_empty
