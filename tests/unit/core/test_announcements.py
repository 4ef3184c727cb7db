"""What is announced: never more than there is, each chunk once, within a bound."""

from __future__ import annotations

import pytest

from kvtier.core.admission import Limits, TierGate
from kvtier.core.announcements import Announcements, Change
from kvtier.core.messages import Answer, Fetch, Fetched, Put, PutEnded, Removed, SlotsReady, TierDown
from kvtier.core.policies.lru import LRU
from kvtier.core.requests import Request
from kvtier.core.tiering import Tiering
from kvtier.keys import OffloadKey, pack_key


def keys(name: str, count: int) -> list[OffloadKey]:
    return [pack_key(f"{name}{index}".encode()) for index in range(count)]


def make(tiers: int = 1, limits: Limits | None = None) -> Tiering:
    gates = [TierGate(f"t{index}") for index in range(tiers)]
    core = Tiering(LRU(), gates, limits, track_changes=True)
    core.on_event(SlotsReady(range(16)), 0.0)
    return core


def put(core: Tiering, prompt: list[OffloadKey]) -> Put:
    """Store chunks; return the put that follows, with nothing announced yet of its tier."""
    reservation = core.reserve(prompt)
    assert reservation is not None
    core.commit(reservation, 0.0)
    core.take_changes()
    (command,) = core.take_commands()
    assert isinstance(command, Put)
    return command


def fetch(core: Tiering, prompt: list[OffloadKey]) -> Fetch:
    request = Request()
    for key in prompt:
        core.lookup(key, request)
    core.settle(0.0)
    (command,) = core.take_commands()
    assert isinstance(command, Fetch)
    return command


def of_tier(core: Tiering) -> list[Change]:
    return [change for change in core.take_changes() if change.tier is not None]


def test_a_chunk_is_announced_once_and_taken_back_once() -> None:
    core, prompt = make(), keys("a", 2)
    core.on_event(PutEnded(put(core, prompt).id, [True, True]), 0.0)
    assert of_tier(core) == [Change(tuple(prompt), 0, removed=False)]
    core.on_event(Removed(0, [prompt[1], *keys("never", 1)]), 0.0)
    core.on_event(Removed(0, [prompt[1]]), 0.0)
    assert of_tier(core) == [Change((prompt[1],), 0, removed=True)]


def test_a_chunk_that_was_lost_twice_is_taken_back_once() -> None:
    """Lost, got again and lost again, before anybody was told: that is one event."""
    announcements = Announcements(1, 10, enabled=True)
    (key,) = keys("a", 1)
    announcements.stored([key], 0)
    announcements.removed([key, key], 0)
    assert announcements.take() == [Change((key,), 0, removed=False), Change((key,), 0, removed=True)]


def test_what_a_fetch_finds_is_announced_and_what_it_misses_is_taken_back() -> None:
    core, prompt = make(), keys("a", 3)
    command = fetch(core, prompt)
    answers = [Answer.LANDED, Answer.LOCATED, Answer.MISSING]
    core.on_event(Fetched(command.id, answers), 0.0)
    assert core.take_changes() == [
        Change((prompt[0],), None, removed=False, found=True),
        Change(tuple(prompt[:2]), 0, removed=False, found=True),
    ]
    (again,) = core.take_commands()  # for what was located
    assert isinstance(again, Fetch)
    core.on_event(Fetched(again.id, [Answer.MISSING]), 0.0)
    assert of_tier(core) == [Change((prompt[1],), 0, removed=True)]


def test_what_left_while_it_was_being_put_is_not_announced() -> None:
    core, prompt = make(), keys("a", 2)
    command = put(core, prompt)
    core.on_event(Removed(0, [prompt[0]]), 0.0)  # put, and evicted for the next, before the put has ended
    core.on_event(PutEnded(command.id, [True, True]), 0.0)
    assert of_tier(core) == [Change((prompt[1],), 0, removed=False)]


def test_what_left_while_it_was_looked_for_is_not_announced() -> None:
    core, prompt = make(), keys("a", 2)
    command = fetch(core, prompt)
    core.on_event(Removed(0, [prompt[0]]), 0.0)
    core.on_event(Fetched(command.id, [Answer.LOCATED] * 2), 0.0)
    assert of_tier(core) == [Change((prompt[1],), 0, removed=False, found=True)]


def test_another_tiers_loss_is_its_own() -> None:
    core, prompt = make(tiers=2), keys("a", 1)
    reservation = core.reserve(prompt)
    assert reservation is not None
    core.commit(reservation, 0.0)
    core.take_changes()
    core.on_event(Removed(1, prompt), 0.0)
    for command in core.take_commands():
        assert isinstance(command, Put)
        core.on_event(PutEnded(command.id, [True]), 0.0)
    assert of_tier(core) == [Change(tuple(prompt), 0, removed=False)]


def test_a_tier_that_is_down_has_nothing() -> None:
    core, prompt = make(), keys("a", 2)
    first, second = put(core, prompt[:1]), put(core, prompt[1:])
    core.on_event(PutEnded(first.id, [True]), 0.0)
    core.take_changes()
    core.on_event(TierDown(0, "gone"), 0.0)
    core.on_event(PutEnded(second.id, [True]), 0.0)
    assert of_tier(core) == [Change((prompt[0],), 0, removed=True)]


@pytest.mark.parametrize("found", [False, True])
def test_what_was_under_way_at_a_reset_is_not_announced(found: bool) -> None:
    core, prompt = make(), keys("a", 2)
    command = fetch(core, prompt) if found else put(core, prompt)
    core.reset()
    core.take_changes()
    if found:
        core.on_event(Fetched(command.id, [Answer.LANDED, Answer.LOCATED]), 0.0)
    else:
        core.on_event(PutEnded(command.id, [True, True]), 0.0)
    assert core.take_changes() == []


def test_a_reset_takes_back_what_every_tier_had() -> None:
    core, prompt = make(), keys("a", 2)
    core.on_event(PutEnded(put(core, prompt).id, [True, True]), 0.0)
    core.take_changes()
    core.reset()
    assert core.take_changes() == [
        Change(tuple(prompt), None, removed=True),
        Change(tuple(prompt), 0, removed=True),
    ]


def test_beyond_the_bound_the_oldest_are_taken_back_first() -> None:
    told = Announcements(1, 3, enabled=True)
    old, new = keys("old", 2), keys("new", 2)
    told.stored(old, 0)
    told.stored(new, 0)
    assert told.take() == [
        Change(tuple(old), 0, removed=False),
        Change((old[0],), 0, removed=True),
        Change(tuple(new), 0, removed=False),
    ]
    many = keys("many", 9)
    told.stored(many, 0)
    told.clear(0)
    assert told.take() == [
        Change((old[1], *new), 0, removed=True),
        Change(tuple(many[:3]), 0, removed=False),
        Change(tuple(many[:3]), 0, removed=True),
    ]
