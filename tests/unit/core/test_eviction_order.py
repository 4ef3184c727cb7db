"""The order of eviction: a prompt loses its tail first, however it came to be stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import hypothesis
import pytest
from hypothesis import strategies as st

from kvtier._core.messages import Put
from kvtier._core.requests import Request
from kvtier._core.tiering import Tiering
from kvtier.keys import OffloadKey
from kvtier.policies import ARC, LHD, LRU, Auto, EvictionPolicy
from kvtier_testing import invariants
from tests.unit.core.world import HIT, keys, make, put_ends, puts, reserve, taken

POLICIES = [LRU, ARC, LHD, Auto]
every_policy = pytest.mark.parametrize("policy", POLICIES)


def request_for(*groups: Sequence[OffloadKey]) -> Request:
    """Return a request whose chunks have places in its prompt, as vLLM tells them."""
    return Request(places={key: place for group in groups for place, key in enumerate(group, 1)})


def run(core: Tiering, prompt: Sequence[OffloadKey], batch: int) -> Request:
    """Store a prompt in steps of ``batch`` chunks; the puts of each end at once."""
    request = request_for(prompt)
    for first in range(0, len(prompt), batch):
        reservation = core.reserve(prompt[first : first + batch], request)
        if reservation is not None:
            core.commit(reservation, 0.0)
            end_puts(core)
        core.settle(0.0)
    core.close(request)
    return request


def end_puts(core: Tiering, shuffle: Callable[[list[Put]], object] = lambda puts: None) -> None:
    """End the puts of all tiers."""
    commands = [command for command in taken(core) if isinstance(command, Put)]
    shuffle(commands)
    for command in commands:
        put_ends(core, command)


def left(core: Tiering, prompt: Sequence[OffloadKey]) -> list[int]:
    """Return which chunks of a prompt are there."""
    return [index for index, key in enumerate(prompt) if key in core.table.visible]


@every_policy
@pytest.mark.parametrize("batch", [1, 4, 16])
def test_stepwise_prompt_loses_tail(policy: type[EvictionPolicy], batch: int) -> None:
    core, first = make(24, 1, policy()), keys("first", 16)
    run(core, first, batch)
    run(core, keys("second", 16), batch)
    assert left(core, first) == list(range(8))


@every_policy
def test_reserve_leaves_prompts_no_holes(policy: type[EvictionPolicy]) -> None:
    core, old, prompt = make(32, 1, policy(), reserve=0.125), keys("old", 28), keys("new", 48)
    for _ in range(4):
        run(core, old, 4)
    request, earlier = request_for(prompt), list[Put]()
    for first in range(0, 48, 2):
        if (reservation := core.reserve(prompt[first : first + 2], request)) is not None:
            core.commit(reservation, 0.0)
        core.settle(0.0)
        for put in earlier:  # a step later: until then the new chunks are pinned
            put_ends(core, put)
        earlier = [command for command in taken(core) if isinstance(command, Put)]
    assert left(core, prompt) == list(range(28))


@every_policy
def test_long_prompt_keeps_front(policy: type[EvictionPolicy]) -> None:
    core, prompt = make(8, 1, policy()), keys("prompt", 16)
    run(core, prompt, 2)
    assert left(core, prompt) == list(range(8))


@every_policy
def test_put_order_is_irrelevant(policy: type[EvictionPolicy]) -> None:
    core, prompt = make(12, 1, policy(), put_backlog=1.0), keys("prompt", 12)
    request = request_for(prompt)
    commands: list[Put] = []
    for first in range(0, 12, 3):
        core.commit(reserve(core, prompt[first : first + 3], request), 0.0)
        commands += [command for command in taken(core) if isinstance(command, Put)]
    for index in (2, 0, 3, 1):
        put_ends(core, commands[index])
    core.close(request)
    assert reserve(core, keys("new", 5)).evicted == prompt[:6:-1]


@every_policy
def test_late_put_is_no_use(policy: type[EvictionPolicy]) -> None:
    core, old, new = make(8, 1, policy()), keys("old", 4), keys("new", 4)
    request = request_for(old)
    core.commit(reserve(core, old, request), 0.0)
    (late,) = (command for command in taken(core) if isinstance(command, Put))
    core.close(request)
    run(core, new, 4)
    put_ends(core, late)
    assert reserve(core, keys("other", 2)).evicted == old[:1:-1]


@every_policy
def test_groups_leave_together(policy: type[EvictionPolicy]) -> None:
    core, groups = make(8, 0, policy()), [keys("prompt", 4, group) for group in (0, 1)]
    request = request_for(*groups)
    core.commit(reserve(core, groups[0] + groups[1], request), 0.0)
    core.close(request)
    evicted = reserve(core, keys("new", 4)).evicted
    assert set(evicted) == {*groups[0][2:], *groups[1][2:]}


def test_groups_keep_their_fronts() -> None:
    core, groups = make(4, 0), [keys("prompt", 4, group) for group in (0, 1)]
    stored = reserve(core, groups[0] + groups[1], request_for(*groups)).keys
    assert stored == groups[0][:2] + groups[1][:2]


@every_policy
@pytest.mark.parametrize("is_on_device", [False, True])
def test_reused_prefix_outlives_tail(policy: type[EvictionPolicy], is_on_device: bool) -> None:
    core, prompt, other = make(12, 1, policy()), keys("chat", 8), keys("other", 4)
    run(core, prompt[:4], 4)
    run(core, other, 4)
    request = request_for(prompt)
    if not is_on_device:
        assert all(core.lookup(key, request) is HIT for key in prompt[:4])
        core.release(core.acquire(prompt[:4], request))
    core.commit(reserve(core, prompt[4:], request), 0.0)
    end_puts(core)
    core.close(request)
    reserve(core, keys("new", 6))
    there = left(core, prompt)
    assert there == list(range(len(there)))


@every_policy
@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**32))
def test_front_outlives_tail(policy: type[EvictionPolicy], seed: int) -> None:
    """Requests run concurrently, share prefixes, and their puts end in any order."""
    random = Random(seed)
    core = make(random.randint(6, 24), 2, policy())
    invariants.watch_evictions(core)  # which fails if a front goes before its tail
    chats = [keys(f"chat{number}", 12) for number in range(4)]
    running: list[tuple[Request, list[OffloadKey], int]] = []
    waiting: list[Put] = []
    for _ in range(60):
        waiting += [command for command in taken(core) if isinstance(command, Put)]
        act = random.random()
        if act < 0.25 or not running:
            prompt = random.choice(chats)[: random.randint(1, 12)]
            request, hits = request_for(prompt), 0
            while hits < len(prompt) and core.lookup(prompt[hits], request) is HIT:
                hits += 1
            if hits:
                core.release(core.acquire(prompt[:hits], request))
            core.settle(0.0)
            running.append((request, prompt, hits))
        elif act < 0.6:
            index = random.randrange(len(running))
            request, prompt, done = running[index]
            batch = prompt[done : done + random.randint(1, 4)]
            reservation = core.reserve(batch, request) if batch else None
            if reservation is not None:
                core.commit(reservation, 0.0)
                running[index] = (request, prompt, done + len(batch))
        elif act < 0.8 and waiting:
            put_ends(core, waiting.pop(random.randrange(len(waiting))))
        else:
            core.close(running.pop(random.randrange(len(running)))[0])


def test_manager_stores_keep_order() -> None:
    core, prompt = make(8, 1), keys("prompt", 6)
    for command in puts(core, prompt[3:]):
        put_ends(core, command)
    core.commit(reserve(core, prompt), 0.0)  # the front comes later than the tail
    end_puts(core)
    reserve(core, keys("new", 5))
    assert left(core, prompt) == [0, 1, 2]
