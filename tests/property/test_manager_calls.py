"""A manager works, or raises a documented error at once, for any argument and any calling thread."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import anyio
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import StateError, TieringManager, pack_key
from tests.common import PATIENCE_S
from tests.effort import effort
from tests.unit.test_manager import World, dummy, prompt
from tests.unit.test_manager_calls import CALLS, elsewhere

DOCUMENTED = (TypeError, ValueError, StateError)

_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 140),
    st.integers(),
    st.sampled_from([2**63, -(2**63), 10**400]),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=4),
    st.binary(max_size=80),
    st.decimals(),
    st.builds(object),
    st.sampled_from([int, print, range(3), range(126, 130), bytearray(b"12345"), memoryview(b"12345")]),
    st.sampled_from(prompt(1, 4)),
    st.sampled_from(prompt(1, 4, group=1)),
)
_junk = st.one_of(
    _scalars,
    st.lists(_scalars, max_size=4),
    st.lists(st.sampled_from(prompt(1, 4)), max_size=4),
    st.lists(st.integers(-1, 129), max_size=4),
    st.lists(st.integers(0, 127), max_size=4).map(iter),
    st.dictionaries(st.sampled_from(prompt(1, 2)), _scalars, max_size=2),
    st.sets(st.sampled_from(prompt(1, 4))),
)
_NAMES = [*sorted(CALLS.keys() - {"enter", "aclose"}), "__aenter__", "views", "acquired.load"]
_calls = st.lists(
    st.tuples(
        st.sampled_from(_NAMES), st.lists(_junk, max_size=3), st.sampled_from(["here", "loop", "thread"])
    ),
    min_size=1,
    max_size=6,
)


async def _call(manager: TieringManager, name: str, arguments: list[Any]) -> None:
    if name in ("acquired.load", "views"):
        async with manager.acquire(prompt(1, 2)) as acquired:
            await acquired.load(*arguments) if name == "acquired.load" else acquired.views
        return
    result = getattr(manager, name)(*arguments)
    if hasattr(result, "__aenter__") and result is not manager:
        async with result:
            pass
    elif hasattr(result, "__await__"):
        await result


async def _from(place: str, manager: TieringManager, name: str, arguments: list[Any]) -> None:
    """Call from a task here, from another loop, or from a plain thread; only documented errors occur."""
    if place == "here":
        with suppress(*DOCUMENTED):
            await _call(manager, name, arguments)
        return

    def plain() -> None:
        if name in ("report_computed", "statistics"):  # all other calls are awaited
            getattr(manager, name)(*arguments)

    work = plain if place == "thread" else lambda: asyncio.run(_call(manager, name, arguments))
    error = await anyio.to_thread.run_sync(elsewhere, work)
    assert error is None or isinstance(error, DOCUMENTED), (name, arguments, error)


async def _use(it: World, calls: list[tuple[str, list[Any], str]]) -> None:
    async with it.manager:
        await it.store(prompt(1, 4))
        for name, arguments, place in calls:
            with anyio.fail_after(PATIENCE_S):
                await _from(place, it.manager, name, arguments)
        await it.store(prompt(3, 4), 40)
        assert await it.load(prompt(3, 4), 60) == 4, "the manager still works"
        await it.check_idle()


@settings(max_examples=effort(60, 600))
@given(_calls)
def test_calls_work_or_raise_documented(calls: list[tuple[str, list[Any], str]]) -> None:
    asyncio.run(_use(World(dummy(), slots=32), calls))


@given(_junk, _junk)
def test_key_is_packed_or_refused(content_hash: Any, group: Any) -> None:
    with suppress(TypeError, ValueError):
        key = pack_key(content_hash, group)
        assert type(key) is bytes
        assert len(key) == len(content_hash) + 4
