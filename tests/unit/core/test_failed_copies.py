"""Failed copies: dropped chunks, kept chunks, and later lookup results."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvtier._core.messages import Put
from kvtier._core.requests import Request
from kvtier._core.tiering import Tiering
from kvtier._core.transfers import Pinned
from kvtier.keys import OffloadKey, pack_key
from kvtier.policies import ARC
from kvtier_testing import invariants
from tests.unit.core.world import (
    HIT,
    MISS,
    MISSING,
    RETRY,
    answer,
    ask_all,
    fetches,
    keys,
    make,
    reserve,
    step,
    store,
)

KEYS = keys("k", 4)


def load(core: Tiering, request: Request, keys: Sequence[OffloadKey] = KEYS) -> Pinned:
    assert ask_all(core, request, keys) == [HIT] * len(keys)
    pinned = core.acquire(keys, request)
    core.settle(0.0)
    return pinned


@pytest.mark.parametrize("unfilled", [[0], [1, 2], [3], [0, 1, 2, 3]])
def test_unfilled_chunks_stay_hidden(unfilled: list[int]) -> None:
    core = make(8, policy=ARC(), budget=1.0, put_backlog=1.0)
    reservation = reserve(core, KEYS)
    whole = [key for index, key in enumerate(KEYS) if index not in unfilled]
    core.drop_unfilled(reservation, {reservation.slots[index]: "incomplete" for index in unfilled})
    invariants.check(core)
    core.commit(reservation, 0.0)
    invariants.check(core)
    puts = [command for command in core.take_commands() if isinstance(command, Put)]
    assert [key for put in puts for key in put.keys] == whole
    assert [key for event in core.shared.kv_events.take_events() for key in event.keys] == whole
    assert len(core.table.free) == 8 - len(whole)
    counts = core.take_counts()
    assert counts["dropped", "store", "incomplete"] == len(unfilled)
    assert counts["stored",] == len(whole)
    assert ask_all(core, Request("a"), KEYS[:1]) == [HIT if KEYS[0] in whole else RETRY]


def test_endless_copy_frees_keys() -> None:
    core = make(8, 0)
    stuck = reserve(core, KEYS)
    core.drop_unfilled(stuck, dict.fromkeys(stuck.slots, "failed"))
    invariants.check(core)
    assert ask_all(core, Request("a"), KEYS) == [MISS] * 4, "nobody waits for them"
    core.settle(0.0)
    again = reserve(core, KEYS)
    assert again.keys == KEYS
    assert set(again.slots).isdisjoint(stuck.slots)
    core.abort(stuck)  # it has ended after all
    invariants.check(core)
    assert len(core.table.free) == 4


def test_failed_load_misses_for_one() -> None:
    core = make(8, policy=ARC(), budget=1.0, put_backlog=1.0)
    store(core, KEYS)
    request = Request("a")
    core.fail_load(load(core, request), request)
    store(core, KEYS)
    for _ in range(3):
        assert ask_all(core, request, KEYS) == [MISS] * 4
        assert ask_all(core, Request("b"), KEYS) == [HIT] * 4
        core.settle(0.0)
        invariants.check(core)
    core.restart(request)  # preempted
    assert ask_all(core, request, KEYS) == [MISS] * 4
    core.settle(0.0)
    assert core.take_counts()["miss", "load_failed"] == 8, "four before the preemption, four after"
    core.close(request)
    invariants.check(core)


def test_lookup_beside_failed_load() -> None:
    core = make(8, policy=ARC(), budget=1.0, put_backlog=1.0)
    store(core, KEYS)
    request = Request("a")
    pinned = load(core, request)
    other = [*KEYS, pack_key(b"elsewhere")]
    assert ask_all(core, request, other)[-1] is RETRY
    core.fail_load(pinned, request)
    assert ask_all(core, request, other) == [MISS] * 5
    core.settle(0.0)
    invariants.check(core)
    assert fetches(core) == []


def test_void_hit_leaves_the_line() -> None:
    """A load fails in the round in which another request was told of its chunks, and a tier answers."""
    core = make(8, policy=ARC(), budget=1.0, put_backlog=1.0)
    store(core, KEYS)
    request = Request("b")
    (get,) = step(core, Request("a"), keys("elsewhere", 2))
    pinned = load(core, Request("c"))
    assert ask_all(core, request, KEYS) == [HIT] * 4
    core.fail_load(pinned)
    answer(core, get, [MISSING] * 2)
    core.settle(0.0)
    invariants.check(core)
    assert request not in core.holds.pending
