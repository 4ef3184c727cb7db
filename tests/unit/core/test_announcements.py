"""What is announced: never more than there is, each chunk once, within a bound."""

from __future__ import annotations

import pytest

from kvtier._core.announcements import Announcements, Change
from kvtier._core.messages import Fetched, PutEnded, Removed, TierDown
from kvtier._core.requests import Request
from kvtier._core.tiering import Tiering
from tests.unit.core.world import (
    LANDED,
    LOCATED,
    MISSING,
    answer,
    keys,
    make,
    put_ends,
    puts,
    reserve,
)
from tests.unit.core.world import step as ask_for


def of_tier(core: Tiering) -> list[Change]:
    return [change for change in core.take_changes() if change.tier is not None]


def test_a_store_is_announced_when_it_is_committed_and_by_a_tier_that_kept_it() -> None:
    core, prompt = make(), keys("a", 2)
    reservation = reserve(core, prompt)
    assert core.take_changes() == []
    core.abort(reservation)
    (command,) = puts(core, prompt)
    assert core.take_changes() == [Change(tuple(prompt), None, removed=False)]
    put_ends(core, command, [True, False])
    assert core.take_changes() == [Change((prompt[0],), 0, removed=False)]
    filling = reserve(core, keys("b", 1))
    core.reset()
    assert core.take_changes() == [
        Change(tuple(prompt), None, removed=True),
        Change((prompt[0],), 0, removed=True),
    ]
    core.commit(filling, 0.0)
    assert core.take_changes() == []


def test_a_chunk_is_announced_once_and_removed_once() -> None:
    core, prompt = make(), keys("a", 2)
    (command,) = puts(core, prompt)
    put_ends(core, command)
    assert of_tier(core) == [Change(tuple(prompt), 0, removed=False)]
    core.on_event(Removed(0, [prompt[1], *keys("never", 1), prompt[1]]), 0.0)
    core.on_event(Removed(0, [prompt[1]]), 0.0)
    assert of_tier(core) == [Change((prompt[1],), 0, removed=True)]


def test_what_a_fetch_finds_is_announced_and_what_it_misses_is_removed() -> None:
    core, prompt = make(), keys("a", 3)
    (command,) = ask_for(core, Request(), prompt)
    (again,) = answer(core, command, [LANDED, LOCATED, MISSING])  # for what was located
    assert core.take_changes() == [
        Change((prompt[0],), None, removed=False, found=True),
        Change(tuple(prompt[:2]), 0, removed=False, found=True),
    ]
    answer(core, again, [MISSING])
    assert of_tier(core) == [Change((prompt[1],), 0, removed=True)]


@pytest.mark.parametrize("is_put", [True, False])
def test_what_left_while_it_was_put_or_looked_for_is_not_announced(is_put: bool) -> None:
    core, prompt = make(tiers=2), keys("a", 2)
    command = (puts(core, prompt) if is_put else ask_for(core, Request(), prompt))[0]
    core.on_event(Removed(0, [prompt[0]]), 0.0)
    core.on_event(Removed(1, [prompt[1]]), 0.0)  # another tier's loss is its own
    core.on_event(PutEnded(command.id, [True] * 2) if is_put else Fetched(command.id, [LOCATED] * 2), 0.0)
    assert of_tier(core) == [Change((prompt[1],), 0, removed=False, found=not is_put)]


def test_a_tier_that_is_down_has_nothing() -> None:
    core, prompt = make(), keys("a", 2)
    (first,), (second,) = puts(core, prompt[:1]), puts(core, prompt[1:])
    put_ends(core, first)
    core.take_changes()
    core.on_event(TierDown(0, "gone"), 0.0)
    put_ends(core, second)
    assert of_tier(core) == [Change((prompt[0],), 0, removed=True)]


@pytest.mark.parametrize("is_put", [True, False])
def test_what_was_in_flight_at_a_reset_is_not_announced(is_put: bool) -> None:
    core, prompt = make(), keys("a", 2)
    (command,) = puts(core, prompt) if is_put else ask_for(core, Request(), prompt)
    core.reset()
    core.take_changes()
    core.on_event(PutEnded(command.id, [True] * 2) if is_put else Fetched(command.id, [LANDED, LOCATED]), 0.0)
    assert core.take_changes() == []


def test_beyond_the_bound_the_oldest_are_removed_first() -> None:
    announcements = Announcements(1, 3, enabled=True)
    old, new = keys("old", 2), keys("new", 2)
    announcements.stored(old, 0)
    announcements.stored(new, 0)
    assert announcements.take() == [
        Change(tuple(old), 0, removed=False),
        Change((old[0],), 0, removed=True),
        Change(tuple(new), 0, removed=False),
    ]
    many = keys("many", 9)
    announcements.stored(many, 0)
    announcements.clear(0)
    assert announcements.take() == [
        Change((old[1], *new), 0, removed=True),
        Change(tuple(many[:3]), 0, removed=False),
        Change(tuple(many[:3]), 0, removed=True),
    ]


def test_nothing_is_noted_where_nobody_wants_to_know() -> None:
    announcements = Announcements(1, 3, enabled=False)
    announcements.stored(keys("a", 2), 0)
    assert announcements.take() == []
