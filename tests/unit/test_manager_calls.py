"""Calls of a manager from invalid places, with invalid arguments, and without a close."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from importlib_metadata import EntryPoints

from kvtier import ConfigError, RegionError, TieringConfig, TieringManager, open_manager
from kvtier import _plugins as plugins
from kvtier._memory.region import Region
from kvtier.errors import StateError
from tests.common import PATIENCE_S
from tests.unit.test_manager import IDENTITY, Device, World, dummy, opened, prompt

KEYS = prompt(1, 2)
Call = Callable[[TieringManager], Coroutine[Any, Any, object]]


async def _acquire(manager: TieringManager, keys: Any = KEYS) -> None:
    async with manager.acquire(keys):
        pass


async def _write(manager: TieringManager, keys: Any = KEYS) -> None:
    async with manager.write(keys):
        pass


async def _enter(manager: TieringManager) -> None:
    async with manager:
        pass


async def _report(manager: TieringManager) -> None:
    manager.report_computed(1, 1.0)


async def _statistics(manager: TieringManager) -> None:
    manager.statistics()


CALLS: dict[str, Call] = {
    "lookup": lambda manager: manager.lookup(KEYS),
    "locate": lambda manager: manager.locate(KEYS),
    "load": lambda manager: manager.load(KEYS, range(2)),
    "store": lambda manager: manager.store(prompt(2, 2), range(2)),
    "reset": lambda manager: manager.reset(),
    "drain": lambda manager: manager.drain(),
    "drain_puts": lambda manager: manager.drain_puts(),
    "aclose": lambda manager: manager.aclose(),
    "acquire": _acquire,
    "write": _write,
    "enter": _enter,
    "report_computed": _report,
    "statistics": _statistics,
}
"""Every public call; each is valid on the manager's own loop."""


def elsewhere(work: Callable[[], object]) -> BaseException | None:
    """Run ``work`` in a new thread; return its exception. A hang fails the test."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            work()
            raised.append(None)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert raised, "it hangs"
    return raised[0]


def test_call_list_is_complete() -> None:
    public = {name for name, value in vars(TieringManager).items() if not name.startswith("_") and value}
    assert public | {"enter"} == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
async def test_other_loop_is_refused(name: str) -> None:
    async with opened(dummy()) as it:
        await it.store(KEYS)
        error = await anyio.to_thread.run_sync(
            elsewhere, lambda: asyncio.run(asyncio.wait_for(CALLS[name](it.manager), 3))
        )
        assert isinstance(error, StateError), error
        assert re.search("event loop|entered already", str(error))
        assert await it.load(KEYS, 10) == 2
        await it.check_idle()


@pytest.mark.parametrize("name", ["report_computed", "statistics"])
async def test_other_thread_is_refused(name: str) -> None:
    async with opened(dummy()) as it:
        arguments = (1, 1.0) if name == "report_computed" else ()
        error = await anyio.to_thread.run_sync(elsewhere, lambda: getattr(it.manager, name)(*arguments))
        assert isinstance(error, StateError)


async def test_loads_stay_on_their_loop() -> None:
    async with opened(dummy()) as it:
        await it.store(KEYS)
        async with it.manager.acquire(KEYS) as acquired:
            error = await anyio.to_thread.run_sync(
                elsewhere, lambda: asyncio.run(asyncio.wait_for(acquired.load(range(10, 12)), 3))
            )
            assert isinstance(error, StateError)
            await acquired.load(range(10, 12))


async def test_second_entry_is_refused() -> None:
    async with opened(dummy()) as it:
        with pytest.raises(StateError, match="entered already"):
            await _enter(it.manager)
        assert await it.store(KEYS) == 2
        await it.check_idle()


def test_entry_needs_asyncio() -> None:
    it = World(dummy())
    with pytest.raises(StateError, match="asyncio"):
        it.manager.__aenter__().send(None)


@pytest.mark.parametrize(
    ("keys", "error", "words"),
    [
        (b"abc", TypeError, "keys is bytes, but a sequence of keys is needed"),
        ("abc", TypeError, "keys is str, but"),
        (None, TypeError, "keys is NoneType"),
        ([KEYS[0], "abc"], TypeError, r"keys\[1\] is of type str"),
        ([b""], ValueError, r"keys\[0\] has 0 bytes, but .*pack_key"),
        ([b"x" * 69], ValueError, r"keys\[0\] has 69 bytes"),
        ([b"a raw hash of text"], ValueError, r"keys\[0\] names KV cache group 1952807028; .*pack_key"),
    ],
)
async def test_wrong_keys_are_refused(keys: Any, error: type[Exception], words: str) -> None:
    async with opened(dummy(put_latency_s=0.05)) as it:
        await it.store(KEYS)
        manager = it.manager
        one_block = range(1)
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: manager.lookup(keys),
            lambda: manager.locate(keys),
            lambda: manager.load(keys, one_block),
            lambda: manager.store(keys, one_block),
            lambda: _acquire(manager, keys),
            lambda: _write(manager, keys),
        ]
        for call in calls:
            with pytest.raises(error, match=words):
                await call()
        await it.check_idle()
        assert it.manager.statistics().counts["put", "dummy0"] == 2


@pytest.mark.parametrize(
    ("blocks", "error"),
    [
        ([0], ValueError),
        ([0, -1], ValueError),
        ([0, 128], ValueError),
        ([0, 2**80], ValueError),
        ([0, 1.5], TypeError),
        ("01", TypeError),
        (None, TypeError),
    ],
)
@pytest.mark.parametrize("call", ["load", "store"])
async def test_wrong_blocks_are_refused(call: str, blocks: Any, error: type[Exception]) -> None:
    async with opened(dummy()) as it:
        with pytest.raises(error, match=r"block|integer"):  # although there is no hit to load
            await getattr(it.manager, call)(KEYS, blocks)
        await it.check_idle()


def test_unclosed_manager_warns() -> None:
    async def use() -> None:
        it = World(dummy(put_latency_s=PATIENCE_S))
        await it.manager.__aenter__()
        kept.append(it)
        await it.store(KEYS)

    kept: list[World] = []
    with pytest.warns(ResourceWarning, match="TieringManager was not closed"):
        asyncio.run(use())
    kept.clear()
    gc.collect()


def test_slots_after_loop_raise_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads that allocate slots may end after the loop of a manager that was not closed."""
    ready: list[Callable[[range], None]] = []

    def populate(_: Region, on_ready: Callable[[range], None]) -> None:
        ready.append(on_ready)
        on_ready(range(4))

    monkeypatch.setattr(Region, "populate", populate)
    it: list[World] = []

    async def use() -> None:
        it.append(World(dummy()))
        await it[0].manager.__aenter__()

    with pytest.warns(ResourceWarning, match="TieringManager was not closed"):
        asyncio.run(use())
    ready[0](range(0))
    it.clear()
    gc.collect()


async def test_closed_manager_answers() -> None:
    async with opened(dummy()) as it:
        await it.store(KEYS)
    closed = it.manager

    def look() -> Sequence[object]:
        asyncio.run(closed.aclose())
        return closed.statistics().tiers

    assert await anyio.to_thread.run_sync(look)


# --- opening ---------------------------------------------------------------------------------------


def _config(**settings: object) -> TieringConfig:
    return TieringConfig.from_mapping({"cpu_bytes_to_use": "1MiB", **settings})


def test_excess_memory_is_refused() -> None:
    config = _config(cpu_bytes_to_use=2**60)
    with pytest.raises(RegionError, match=r"needs \d+ bytes, but about \d+ are free"):
        open_manager(config, IDENTITY, Device().caches)


def test_roomless_tier_is_refused(tmp_path: Path) -> None:
    config = _config(secondary_tiers=[{"type": "fs", "root_dir": str(tmp_path), "max_bytes": "10KiB"}])
    with pytest.raises(ConfigError, match=r"tier fs: max_bytes \(10240\) .* at least 4 chunks"):
        open_manager(config, IDENTITY, Device().caches)


@pytest.mark.parametrize(("tier", "package"), [("s3", "kvtier-s3"), ("dummy", "kvtier-testing")])
def test_missing_tier_names_package(monkeypatch: pytest.MonkeyPatch, tier: str, package: str) -> None:
    monkeypatch.setattr(plugins, "_entries", lambda group: EntryPoints([]))
    with pytest.raises(ConfigError, match=rf"no such tier.*: pip install ./plugins/{package} in a checkout"):
        plugins.require(plugins.TIERS, tier, "type")
