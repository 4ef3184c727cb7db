"""Chunks that clients retain stay in the primary tier, within its budget."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtier._core.requests import Request
from kvtier._core.tiering import Tiering
from tests.unit.core import world
from tests.unit.core.world import keys


def pressed(core: Tiering) -> None:
    """Store so much else that all that may be evicted is."""
    for index in range(4):
        world.store(core, keys(f"other{index}/", 4))
        core.settle(0.0)


def kept_core() -> Tiering:
    return world.make(16, 0, pin_budget=0.25)


def test_store_end_starts_keeping():
    core = kept_core()
    reservation = world.reserve(core, keys("a", 2))
    core.retention.keep("session", keys("a", 2))
    core.settle(0.0)
    core.commit(reservation, 0.0)
    core.settle(0.0)
    pressed(core)
    assert world.there(core, keys("a", 2)) == keys("a", 2)


def test_expired_is_not_kept():
    core = kept_core()
    world.store(core, keys("a", 3))
    core.retention.keep("session", keys("a", 3))
    core.retention.expire("session", 10.0)
    core.settle(9.0)
    assert set(core.retention.pinned) == set(keys("a", 3))
    core.settle(10.0)
    assert core.retention.pinned == {}
    pressed(core)
    assert world.there(core, keys("a", 3)) == []


def test_both_owners_must_end():
    core = kept_core()
    world.store(core, keys("a", 3))
    core.retention.keep("one", keys("a", 2))
    core.retention.keep("two", keys("a", 3))
    core.settle(0.0)
    core.retention.release("two")
    assert set(core.retention.pinned) == set(keys("a", 2))
    core.retention.release("one")
    assert core.retention.pinned == {}


def test_excess_is_refused_from_tail():
    core = kept_core()
    world.store(core, keys("a", 6))
    core.retention.keep("session", keys("a", 6))
    core.settle(0.0)
    assert set(core.retention.pinned) == set(keys("a", 4)), "a quarter of 16 slots"
    assert core.take_counts()["keep_refused", "budget"] == 2
    world.taken(core)


def test_reset_returns_slots():
    core = kept_core()
    world.store(core, keys("a", 3))
    core.retention.keep("session", keys("a", 3))
    core.settle(0.0)
    core.reset()
    assert core.retention.pinned == {}
    assert len(core.table.free) == 16
    core.retention.release("session")
    world.taken(core)


def test_dropped_chunk_is_not_kept():
    core = kept_core()
    world.store(core, keys("a", 3))
    core.retention.keep("session", keys("a", 3))
    core.settle(0.0)
    request = Request()
    world.ask(core, request, keys("a", 1))
    core.fail_load(core.acquire(keys("a", 1), request), request)
    assert set(core.retention.pinned) == set(keys("a", 3)[1:])
    world.taken(core)


def test_shared_chunks_are_paid_once():
    core = world.make(16, 1, pin_budget=0.25, budget=0.25)
    other = Request()
    (get,) = world.step(core, other, keys("a", 4))
    core.on_event(world.answered(get), 0.0)
    core.retention.keep("session", keys("a", 4))
    core.settle(0.0)
    core.close(other)
    assert not core.holds.promoting
    world.taken(core)
    core.retention.release("session")
    world.taken(core)
    (get,) = world.step(core, Request(), keys("b", 4))
    assert len(get.slots) == 4, "the promotion budget is there again"


def test_named_chunks_are_bounded():
    core = kept_core()
    world.store(core, keys("a", 4))
    for index in range(100):
        core.retention.keep(str(index), keys("a", 4))
        core.retention.expire(str(index), 10.0 + index)
    core.settle(0.0)
    assert core.take_counts()["keep_refused", "names"] == 100 * 4 - 16 * 16
    core.settle(10.0 + 63)
    assert core.retention.is_empty
    world.taken(core)


def test_last_end_counts():
    core = kept_core()
    world.store(core, keys("a", 2))
    for turn in range(200):
        core.retention.keep("session", keys("a", 2))
        core.retention.expire("session", 10.0 + turn)
        core.settle(float(turn))
        assert len(core.retention.pinned) == 2
    core.settle(209.0)
    assert core.retention.is_empty


names = st.sampled_from(["one", "two", "three"])
moves = st.lists(
    st.tuples(
        st.sampled_from(["store", "keep", "keep", "release", "expire", "settle", "reset", "audit"]),
        names,
        st.integers(0, 2),
        st.integers(1, 6),
    ),
    max_size=40,
)


@given(moves)
def test_pins_match_kept_chunks(steps):
    core, now_s = kept_core(), 0.0
    for move, name, prompt, count in steps:
        now_s += 0.5
        chunks = keys(f"{prompt}/", count)
        if move == "store" and (reservation := core.reserve(chunks)) is not None:
            core.commit(reservation, now_s)
        elif move == "keep":
            core.retention.keep(name, chunks)
        elif move == "release":
            core.retention.release(name)
        elif move == "expire":
            core.retention.expire(name, now_s + count)
        elif move == "settle":
            core.settle(now_s)
        elif move == "reset":
            core.reset()
        elif move == "audit" and prompt == count == 1:
            core.disable_after_audit(None, "in a test")
        world.taken(core)
    for name in ("one", "two", "three"):
        core.retention.release(name)
    assert core.retention.is_empty
    world.taken(core)
