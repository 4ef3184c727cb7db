"""A request waits for chunks that no tier has yet: asked for again now and then, until its time is over."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvtier._core.messages import Get, GetEnded, TierDown
from kvtier._core.promotion.waits import (
    FEW_KEYS,
    FIRST_PAUSE_S,
    LAST_S,
    LONGEST_PAUSE_S,
    MOST_KEYS,
    MOST_POLLS,
    PAUSE_SHARE,
    Wait,
)
from kvtier._core.requests import Request
from kvtier._core.states import Lookup
from kvtier._core.tiering import Tiering
from kvtier._core.tiers.tier_status import TierStatus
from kvtier.keys import OffloadKey
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
    taken,
    there,
)

WAIT_S = 10.0
STEP_S = FIRST_PAUSE_S / 4
PROMPT = keys("a", 4)


def waiting() -> Request:
    return Request("decode", wait=Wait(WAIT_S))


def poll(core: Tiering, request: Request, prompt: Sequence[OffloadKey], now_s: float) -> tuple[float, Get]:
    """Go on in steps of the engine until a tier is asked; return when that was, and the get."""
    while True:
        now_s += STEP_S
        if begun := step_as_vllm(core, request, prompt, now_s)[1]:
            (get,) = begun
            return now_s, get


def step_as_vllm(
    core: Tiering, request: Request, prompt: Sequence[OffloadKey], now_s: float
) -> tuple[list[Lookup], list[Get]]:
    """Ask one round of questions, repeated ones answered as such."""
    answers = []
    for key in prompt:
        repeated = core.repeat_answer(key, request)
        answers.append(core.lookup(key, request) if repeated is None else repeated)
        if answers[-1] is MISS:
            break
    core.settle(now_s)
    return answers, fetches(core)


def begin(
    core: Tiering, request: Request, prompt: list[OffloadKey], *found: object, now_s: float = 0.0
) -> None:
    """Ask for a prompt; the tier has what is said."""
    (get,) = step(core, request, prompt, now_s)
    answer(core, get, list(found), now_s)  # type: ignore[arg-type]


def waits(core: Tiering) -> dict[str, float]:
    return {count[1]: number for count, number in core.take_counts().items() if count[0] == "waits"}


def test_poll_is_one_get() -> None:
    core, request = make(), waiting()
    begin(core, request, PROMPT, *[MISSING] * 4)
    assert ask(core, request, PROMPT) == [RETRY] * 4
    when_s, again = poll(core, request, PROMPT, 0.0)
    assert (list(again.keys), list(again.slots)) == (PROMPT, []), "it takes no slot for what may not come"
    assert not answer(core, again, [LOCATED] * 4, when_s)
    assert ask(core, request, PROMPT) == [PENDING] * 4
    core.settle(when_s)
    (get,) = fetches(core)
    assert (list(get.keys), get.located) == (PROMPT, True)
    answer(core, get, [COPIED] * 4, when_s)
    assert ask(core, request, PROMPT) == [HIT] * 4
    core.acquire(PROMPT, request)
    assert waits(core) == {"arrived": 1}


def test_expired_wait_misses() -> None:
    core, request = make(request_deadline_s=5.0), waiting()
    begin(core, request, PROMPT, *[MISSING] * 4)
    assert request.deadline_s == WAIT_S + 5.0
    core.settle(0.0)
    _, (last,) = step_as_vllm(core, request, PROMPT, WAIT_S)
    answer(core, last, [MISSING] * 4, WAIT_S)
    assert ask(core, request, PROMPT) == [MISS]
    core.settle(WAIT_S)
    counts = core.take_counts()
    assert counts["waits", "in_vain"] == 1
    assert counts["miss", "not_arrived"] == 1
    assert ("expired",) not in counts
    assert request.deadline_s is None
    assert not core.promotions.holds.pending


@pytest.mark.parametrize("news_s", [0.0, 3.0])
def test_pause_follows_arrival(news_s: float) -> None:
    """Notice an arrival late by at most a small share of its travel time."""
    core, request, now_s = make(), waiting(), news_s
    begin(core, request, PROMPT, *[MISSING] * 4)
    step_as_vllm(core, request, PROMPT, 0.0)
    if news_s:
        _, (get,) = step_as_vllm(core, request, PROMPT, now_s)
        answer(core, get, [LOCATED, MISSING, MISSING, MISSING], now_s)
        _, (again, get) = step_as_vllm(core, request, PROMPT, now_s)
        assert list(again.keys) == PROMPT[1:], "there may be more by now"
        answer(core, get, [COPIED], now_s)
        answer(core, again, [MISSING] * 3, now_s)
    pauses = {}
    while now_s < WAIT_S - LONGEST_PAUSE_S:
        before_s = now_s
        now_s, get = poll(core, request, PROMPT, now_s)
        answer(core, get, [MISSING] * len(get.keys), now_s)
        pauses[before_s] = now_s - before_s
    for before_s, pause_s in pauses.items():
        wanted_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, PAUSE_SHARE * (before_s - news_s)))
        assert wanted_s - 1e-9 <= pause_s < wanted_s + 2 * STEP_S, (
            f"{before_s - news_s} s after the last news"
        )


def test_vain_questions_are_bounded() -> None:
    wait, now_s, asked = Wait(5.0), 0.0, 0
    wait.start_clock(now_s)
    wait.update(PROMPT, (), (), now_s)
    wait.note_answer(PROMPT, PROMPT, now_s, failed=False)
    assert not wait.await_missing(PROMPT, now_s)
    while not wait.is_over(now_s):
        now_s, asked = wait.again_s, asked + 1
        wait.ask_again()
        wait.note_answer(PROMPT, PROMPT, now_s, failed=False)
    assert asked == 42


def test_pause_asks_nothing() -> None:
    core, request = make(), waiting()
    begin(core, request, PROMPT, *[MISSING] * 4)
    step(core, request, PROMPT)
    for _ in range(100):
        answers, begun = step_as_vllm(core, request, PROMPT, FIRST_PAUSE_S / 2)
        assert (answers, begun) == ([RETRY, MISS], []), "repeated: it waits on"
    assert core.next_deadline_s() == pytest.approx(FIRST_PAUSE_S)


def test_first_chunks_are_repolled() -> None:
    core, request, prompt = make(), waiting(), keys("a", 3 * MOST_KEYS)
    begin(core, request, prompt, *[MISSING] * len(prompt))
    now_s, get = poll(core, request, prompt, 0.0)
    assert list(get.keys) == prompt[:FEW_KEYS]
    answer(core, get, [LOCATED] * FEW_KEYS, now_s)
    more = step_as_vllm(core, request, prompt, now_s)[1][0]
    assert list(more.keys) == prompt[FEW_KEYS:][:MOST_KEYS], "there may be many by now"
    answer(core, more, [MISSING] * MOST_KEYS, now_s)
    _, get = poll(core, request, prompt, now_s)
    assert list(get.keys) == prompt[FEW_KEYS:][:FEW_KEYS]


def test_early_arrival_is_unheld() -> None:
    core, request = make(budget=0.25), waiting()
    begin(core, request, PROMPT, COPIED, COPIED, MISSING, MISSING)
    assert ask(core, request, PROMPT) == [HIT, HIT, RETRY, RETRY]
    core.settle(0.0)
    assert not request.held
    assert not core.holds.promoting
    when_s, again = poll(core, request, PROMPT, 0.0)
    assert list(again.keys) == PROMPT[2:]
    answer(core, again, [LOCATED, MISSING], when_s)
    _, (next_poll, get) = step_as_vllm(core, request, PROMPT, when_s)
    assert (list(get.keys), list(next_poll.keys)) == (PROMPT[2:3], PROMPT[3:])
    answer(core, get, [COPIED], when_s)
    step_as_vllm(core, request, PROMPT, when_s)
    assert not core.holds.promoting
    assert core.table.evictable == 3


def test_budget_is_refilled_at_once() -> None:
    """Chunks that were promoted for a waiting request leave room for its next ones in the same step."""
    core, request, prompt = make(slots=32, budget=0.125), waiting(), keys("a", 9)
    begin(core, request, prompt, *[COPIED] * 4, *[LOCATED] * 4, MISSING)
    answers, (get,) = step_as_vllm(core, request, prompt, 0.0)
    assert answers == [HIT] * 4 + [PENDING] * 4 + [RETRY]
    assert list(get.keys) == prompt[4:8]


def test_full_engine_examines_no_keys() -> None:
    """An engine without room asks for no request; one that awaits more chunks costs its steps nothing."""
    core, request = make(), waiting()
    prompt = [OffloadKey(CountedKey(key)) for key in keys("a", 64)]
    begin(core, request, prompt, *[COPIED] * 8, *[MISSING] * 56)
    core.settle(0.0)
    CountedKey.hashed = 0
    core.settle(0.0)
    assert request.awaits_any
    assert CountedKey.hashed == 0


def test_evicted_chunk_returns_last() -> None:
    core, request, now_s = make(slots=4, budget=1.0), waiting(), 0.0
    begin(core, request, PROMPT, COPIED, COPIED, MISSING, MISSING)
    step_as_vllm(core, request, PROMPT, now_s)
    store(core, keys("b", 4))
    for _ in range(20):
        now_s, get = poll(core, request, PROMPT, now_s)
        assert list(get.keys) == PROMPT[2:]
        answer(core, get, [MISSING] * 2, now_s)
    now_s, get = poll(core, request, PROMPT, now_s)
    answer(core, get, [LOCATED] * 2, now_s)
    _, (rest,) = step_as_vllm(core, request, PROMPT, now_s)
    assert list(rest.keys) == PROMPT[:2]


def test_wait_takes_no_turn() -> None:
    """Its share of the budget goes to a request that came later and waits for no chunk."""
    core, request, other, prompt = make(slots=8, budget=0.5), waiting(), Request(), keys("b", 4)
    begin(core, request, PROMPT, COPIED, COPIED, MISSING, MISSING)
    ask(core, request, PROMPT)
    (get,) = step(core, other, prompt)
    (rest,) = answer(core, get, [COPIED] * 2 + [LOCATED] * 2)
    assert list(rest.keys) == prompt[2:]
    answer(core, rest, [COPIED] * 2)
    ask(core, request, PROMPT)
    assert not step(core, other, prompt)
    assert ask(core, other, prompt) == [HIT] * 4
    assert core.holds.promoting == set(other.held), "the other one holds nothing"


@pytest.mark.parametrize("how", ["abort", "reset", "tier", "failure", "computed"])
def test_wait_ends_at_once(how: str) -> None:
    core, request = make(), waiting()
    begin(core, request, PROMPT, *[MISSING] * 4)
    step_as_vllm(core, request, PROMPT, 0.0)
    now_s, get = poll(core, request, PROMPT, 0.0)
    if how == "abort":
        core.close(request)
        assert waits(core) == {"aborted": 1}
        assert not answer(core, get, [LOCATED] * 4, now_s)
        assert not core.holds.pending
        assert not core.holds.awaiting
        return
    if how == "reset":
        core.reset()
        taken(core)
        answer(core, get, [MISSING] * 4, now_s)
        for more in step(core, request, PROMPT, now_s):
            answer(core, more, [MISSING] * 4, now_s)
    elif how == "computed":
        core.scheduled(request)
        assert ask(core, request, PROMPT) == [RETRY] * 4, "preempted"
        (get,) = step(core, request, PROMPT, now_s) or [get]
        answer(core, get, [MISSING] * 4, now_s)
    elif how == "tier":
        answer(core, get, [MISSING] * 4, now_s)
        core.on_event(TierDown(0, "gone"), now_s)
        step_as_vllm(core, request, PROMPT, now_s + LONGEST_PAUSE_S)
    else:
        answer(core, get, [MISSING] * 4, now_s, connection=4)
    assert ask(core, request, PROMPT) == [MISS]
    core.settle(now_s)
    counts = core.take_counts()
    assert counts["waits", "gave_up"] == 1
    assert ("miss", "not_arrived") not in counts, "its time was not over"
    assert not core.holds.pending
    assert not core.holds.awaiting


def test_reset_ends_waits() -> None:
    """Later stores of other engines belong to an epoch that this one does not read."""
    core, request = make(), waiting()
    core.reset()
    taken(core)
    begin(core, request, PROMPT, *[MISSING] * 4)
    assert ask(core, request, PROMPT) == [MISS]


def test_no_hint_no_wait() -> None:
    core, request, other = make(), waiting(), Request()
    ask(core, request, PROMPT)
    ask(core, other, PROMPT[:2])
    core.settle(0.0)
    (get,) = fetches(core)
    answer(core, get, [MISSING] * 4)
    assert ask(core, other, PROMPT) == [MISS]
    assert ask(core, request, PROMPT) == [RETRY] * 4


def test_windowed_models_do_not_wait() -> None:
    """Only some of a window's chunks are ever stored."""
    core, request = make(windowed=frozenset({1})), waiting()
    begin(core, request, PROMPT, *[MISSING] * 4)
    assert ask(core, request, PROMPT) == [MISS]


# --- where its client says that they are -----------------------------------------------------------

THERE = ("10.0.0.1:18570",)


def test_locations_last_until_end() -> None:
    core, request = make(), Request("decode", wait=Wait(WAIT_S), addresses=THERE)
    (get,) = step(core, request, PROMPT)
    assert get.addresses == THERE
    answer(core, get, [MISSING] * 4)
    now_s, get = poll(core, request, PROMPT, 0.0)
    assert get.addresses == THERE
    answer(core, get, [LOCATED] + [MISSING] * 3, now_s)
    _, (again, located) = step_as_vllm(core, request, PROMPT, now_s)
    assert (again.addresses, located.addresses) == (THERE, ()), "nobody is asked for what is located"
    answer(core, again, [MISSING] * 3, now_s)
    answer(core, located, [COPIED], now_s)
    _, (last,) = step_as_vllm(core, request, PROMPT, WAIT_S)
    assert last.addresses == (), "all are asked"


def test_tiers_hear_all_hints() -> None:
    core = make(tiers=[TierStatus("t0", 60.0), TierStatus("t1", 60.0)])
    one, same, other = (Request(addresses=it) for it in (THERE, THERE, ("10.0.0.2:18570",)))
    for index, (request, of_next) in enumerate([(same, THERE), (other, ()), (Request(), ())]):
        prompt = keys(f"a{index}", 2)
        for it in (one, request):
            ask(core, it, prompt)
        core.settle(0.0)
        (get,) = fetches(core)
        assert get.addresses == THERE
        (get,) = answer(core, get, [MISSING] * 2)
        assert (get.tier, get.addresses) == (1, of_next)
        answer(core, get, [MISSING] * 2)


# --- what the engine does not ask for -------------------------------------------------------------


def settle_until(core: Tiering, now_s: float) -> tuple[float, Get]:
    """Step without lookups until a tier is asked; return the time and the get."""
    while True:
        now_s += STEP_S
        core.settle(now_s)
        if begun := fetches(core):
            (get,) = begun
            return now_s, get


def test_full_engine_still_polls() -> None:
    core, request = make(), waiting()
    begin(core, request, PROMPT, *[MISSING] * 4)
    now_s, get = settle_until(core, 0.0)
    answer(core, get, [LOCATED] * 4, now_s)
    now_s, get = settle_until(core, now_s)
    assert (list(get.keys), get.located) == (PROMPT, True)
    answer(core, get, [COPIED] * 4, now_s)
    core.settle(WAIT_S + 1.0)
    assert ask(core, request, PROMPT) == [HIT] * 4
    core.acquire(PROMPT, request)
    assert waits(core) == {"arrived": 1}


def test_overslept_engine_asks_again() -> None:
    core, request = make(), waiting()
    begin(core, request, PROMPT, *[MISSING] * 4)
    now_s = WAIT_S + LAST_S / 2
    _, (last,) = step_as_vllm(core, request, PROMPT, now_s)
    answer(core, last, [LOCATED] * 4, now_s)
    _, (get,) = step_as_vllm(core, request, PROMPT, now_s)
    answer(core, get, [COPIED] * 4, now_s)
    assert ask(core, request, PROMPT) == [HIT] * 4


def test_last_answer_loads_prefix() -> None:
    core, request = make(), waiting()
    begin(core, request, PROMPT, *[MISSING] * 4)
    _, (last,) = step_as_vllm(core, request, PROMPT, WAIT_S)
    answer(core, last, [LOCATED, LOCATED, MISSING, LOCATED], WAIT_S)
    _, (get,) = step_as_vllm(core, request, PROMPT, WAIT_S)
    assert list(get.keys) == PROMPT[:2]
    answer(core, get, [COPIED] * 2, WAIT_S)
    core.take_counts()
    assert ask(core, request, PROMPT) == [HIT, HIT, MISS]
    core.settle(WAIT_S)
    assert core.take_counts()["miss", "not_arrived"] == 1


def test_no_tier_ends_wait() -> None:
    core, request, others = make(), waiting(), [waiting() for _ in range(MOST_POLLS)]
    begin(core, request, PROMPT, *[MISSING] * 4)
    for index, other in enumerate(others):
        begin(core, other, keys(f"b{index}", 2), MISSING, MISSING)
    for now_s in (WAIT_S - 2.5, WAIT_S - 0.5):  # the polls of the others hang
        request.wait.again_s = WAIT_S  # type: ignore[union-attr]
        core.settle(now_s)
    core.settle(WAIT_S + LAST_S)
    ended = [it for it in (request, *others) if not it.awaits_any]
    assert request in ended
    assert ask(core, request, PROMPT) == [MISS]


def test_sleep_misses_no_deadline() -> None:
    core, requests, now_s = make(), [waiting() for _ in range(MOST_POLLS + 2)], 0.0
    for index, request in enumerate(requests):
        begin(core, request, keys(f"a{index}", 2), MISSING, MISSING)
    settled_s = 0.0
    while core.holds.awaiting:
        core.settle(now_s)
        settled_s = now_s
        next_s = core.next_deadline_s()
        assert next_s is not None
        assert next_s > now_s
        for get in fetches(core):
            core.on_event(GetEnded(get.id, [MISSING] * len(get.keys)), now_s)
            next_s = now_s
        now_s = next_s
    assert settled_s < WAIT_S + LAST_S


# --- others ---------------------------------------------------------------------------------------


def polls(core: Tiering) -> int:
    return sum(transfer.is_poll for transfer in core.shared.running)


def test_polls_are_few_and_fair() -> None:
    core, now_s = make(tiers=[TierStatus("t0", 60.0)]), 0.0
    asked: set[OffloadKey] = set()
    prompts = {f"a{index}": keys(f"a{index}", 2) for index in range(20)}
    for prompt in prompts.values():
        begin(core, waiting(), prompt, MISSING, MISSING)
    for _ in range(20 // MOST_POLLS):
        now_s += LONGEST_PAUSE_S
        core.settle(now_s)
        assert polls(core) == MOST_POLLS
        for get in fetches(core):
            asked.update(get.keys)
            answer(core, get, [MISSING] * 2, now_s)
    assert asked == {key for prompt in prompts.values() for key in prompt}


def test_equal_waits_share_a_poll() -> None:
    core, requests = make(), [waiting() for _ in range(5)]
    for request in requests:
        for get in step(core, request, PROMPT):
            answer(core, get, [MISSING] * 4)
    core.settle(LONGEST_PAUSE_S)
    (get,) = fetches(core)
    answer(core, get, [LOCATED] * 4, LONGEST_PAUSE_S)
    core.settle(LONGEST_PAUSE_S)
    assert not core.holds.awaiting, "all of them have heard of it"


def test_polls_count_finds_once() -> None:
    core, request, now_s = make(), waiting(), 0.0
    begin(core, request, PROMPT, *[MISSING] * 4)
    for _ in range(30):
        now_s, get = poll(core, request, PROMPT, now_s)
        answer(core, get, [MISSING] * 4, now_s)
    now_s, get = poll(core, request, PROMPT, now_s)
    answer(core, get, [LOCATED, LOCATED, MISSING, MISSING], now_s)
    counts = core.take_counts()
    assert [counts[what, "t0"] for what in ("asked", "found", "absent")] == [4 + 2, 2, 4]


@pytest.mark.parametrize("how", ["arrived", "reset", "failure"])
def test_finished_wait_restores_deadline(how: str) -> None:
    core, request = make(request_deadline_s=5.0), waiting()
    begin(core, request, PROMPT, *[MISSING] * 4)
    now_s, get = poll(core, request, PROMPT, 0.0)
    if how == "reset":
        core.reset()
        taken(core)
        assert waits(core) == {"gave_up": 1}
    elif how == "failure":
        answer(core, get, [MISSING] * 4, now_s, connection=4)
    else:
        answer(core, get, [LOCATED] * 4, now_s)
    core.settle(now_s)
    assert request.deadline_s == now_s + 5.0
    assert core.holds.first is request


def test_early_arrivals_evict_nothing() -> None:
    core, request = make(slots=8, reserve=0.25, budget=1.0), waiting()
    begin(core, request, PROMPT, *[MISSING] * 4)
    store(core, keys("b", 5))
    now_s, get = poll(core, request, PROMPT, 0.0)
    answer(core, get, [LOCATED] * 3 + [MISSING], now_s)
    _, begun = step_as_vllm(core, request, PROMPT, now_s)
    (early,) = [get for get in begun if get.located]
    assert list(early.keys) == PROMPT[:1], "one slot is free, and two are the reserve"
    assert len(there(core, keys("b", 5))) == 5


@pytest.mark.parametrize("failing", [0, 1])
def test_failing_tier_ends_wait(failing: int) -> None:
    core, request = make(tiers=2), waiting()
    (get,) = step(core, request, PROMPT)
    (get,) = answer(core, get, [MISSING] * 4)
    answer(core, get, [MISSING] * 4)
    assert ask(core, request, PROMPT) == [RETRY] * 4
    core.settle(0.0)
    now_s, get = poll(core, request, PROMPT, 0.0)
    for tier in range(2):
        assert get.tier == tier
        reasons = {"connection": 4} if tier == failing else {}
        begun = answer(core, get, [MISSING] * 4, now_s, **reasons)  # type: ignore[arg-type]
        get = begun[0] if begun else get
    assert ask(core, request, PROMPT) == [MISS]
    core.settle(now_s)
    assert waits(core) == {"gave_up": 1}


def test_overdue_poll_ends_wait() -> None:
    core, request = make(), waiting()
    begin(core, request, PROMPT, *[MISSING] * 4)
    now_s, _ = poll(core, request, PROMPT, 0.0)
    step_as_vllm(core, request, PROMPT, now_s + 3.0)
    assert ask(core, request, PROMPT) == [MISS]
    core.settle(now_s + 3.0)
    assert waits(core) == {"gave_up": 1}


def test_location_precedes_prefix() -> None:
    core, request = make(), waiting()
    begin(core, request, PROMPT, COPIED, COPIED, MISSING, MISSING)
    ask(core, request, PROMPT)
    core.settle(0.0)
    for _ in range(3):
        step_as_vllm(core, request, PROMPT, 0.0)
    assert not request.held
    assert request.wait is not None
    assert request.wait.leading == 2


def test_gated_wait_is_not_vain() -> None:
    core, request = make(load_gate="latency"), waiting()  # type: ignore[arg-type]
    begin(core, request, PROMPT, *[MISSING] * 4)
    core.shared.gate.compute.note(0, 1, 0.001)
    core.shared.gate.get_ended(0, 10, 60.0, 0.0)
    core.shared.gate.get_ended(0, 10, 60.0, 100.0)
    step_as_vllm(core, request, PROMPT, FIRST_PAUSE_S)
    core.take_counts()
    assert ask(core, request, PROMPT) == [MISS]
    core.settle(FIRST_PAUSE_S)
    assert core.take_counts() == {("miss", "gate"): 1, ("waits", "gave_up"): 1}


def test_new_wait_holds_nothing() -> None:
    core, first, request = make(tiers=2, budget=0.125), Request("first"), waiting()
    step(core, first, keys("b", 1))
    store(core, PROMPT[:1])
    (get,) = step(core, request, PROMPT)
    (next_get,) = answer(core, get, [MISSING] * 3)
    answer(core, next_get, [LOCATED] * 3)
    assert ask(core, request, PROMPT) == [HIT, *[PENDING] * 3]
    core.shared.tiers[1].gets.note_late(99, 0.0)  # another get does not end
    core.settle(0.0)  # there was room for a get of one of the chunks
    assert list(core.holds.awaiting) == [request]
    assert not request.held
