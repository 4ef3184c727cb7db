"""Concurrent calls: a clear, a close or a late tier while pages are read or written."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pools
import pytest
from conftest import Attach, settings
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from test_storage import files, hashes, load, store

from kvtier import Acquired, OffloadKey, StateError, Statistics, TieringManager
from kvtier.tiers import SecondaryTier, until_done
from kvtier.tiers.fs import FsTier
from kvtier_sglang._loop import LoopThread
from kvtier_sglang._pages import HostPages
from kvtier_sglang._store import PageStore
from kvtier_testing.dummy import DummyTier

WAIT_S = 60.0


class Copies:
    """Copies that block until the test releases them, and report when one has started."""

    def __init__(self) -> None:
        self.begun, self.let_through = threading.Event(), threading.Event()

    def around(self, copy: Callable[..., None]) -> Callable[..., None]:
        def waiting(*given: Any) -> None:
            self.begun.set()
            assert self.let_through.wait(WAIT_S)
            copy(*given)

        return waiting


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    copies = Copies()
    copies.let_through.set()
    for name in ("copy_in", "copy_out"):
        monkeypatch.setattr(HostPages, name, copies.around(getattr(HostPages, name)))
    yield copies
    copies.let_through.set()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def begun(copies: Copies, threads: ThreadPoolExecutor, act: Any, *given: Any) -> Future[Any]:
    """Start a call in a thread; return when its copy has started."""
    copies.begun.clear()
    copies.let_through.clear()
    future = threads.submit(act, *given)
    assert copies.begun.wait(WAIT_S)
    return future


@pytest.mark.parametrize("verb", ["batch_get_v1", "batch_set_v1"])
def test_close_during_page_copy(
    attach: Attach,
    copies: Copies,
    threads: ThreadPoolExecutor,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    verb: str,
) -> None:
    pool = pools.mha()
    storage = attach(pool, settings(tmp_path / "root", drain_on_shutdown_s=0.0))
    if verb == "batch_get_v1":
        store(storage, pool)
    indices = pools.indices(pool, range(16, 24))
    copying = begun(copies, threads, getattr(storage, verb), hashes(), indices)
    threads.submit(storage.close).result(WAIT_S)
    copies.let_through.set()
    assert copying.result(WAIT_S) == [False] * 8
    assert "a miss: StateError: the storage was closed meanwhile" in caplog.text


def test_clear_during_read_misses(attach: Attach, copies: Copies, threads: ThreadPoolExecutor) -> None:
    pool = pools.mha()
    storage = attach(pool)
    store(storage, pool)
    indices = pools.indices(pool, range(16, 24))
    reading = begun(copies, threads, storage.batch_get_v1, hashes(), indices)
    storage.clear()
    copies.let_through.set()
    assert reading.result(WAIT_S) == [False] * 8


def test_read_begun_within_clear_misses(
    attach: Attach, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pools.mha()
    storage = attach(pool)
    store(storage, pool)
    indices = pools.indices(pool, range(16, 24))
    reading: list[Future[list[bool]]] = []
    reset_tiers = PageStore._reset_tiers

    def reset_after_read_has_begun(pages: PageStore) -> Coroutine[Any, Any, list[str]]:
        reading.append(threads.submit(storage.batch_get_v1, hashes(), indices))
        return reset_tiers(pages)

    monkeypatch.setattr(PageStore, "_reset_tiers", reset_after_read_has_begun)
    storage.clear()
    assert reading[0].result(WAIT_S) == [False] * 8


def test_write_begun_within_clear_stores_nothing(attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pools.mha()
    storage = attach(pool)
    start = LoopThread.start
    written: list[list[bool]] = []

    def start_and_write(loop: LoopThread, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        future = start(loop, work)
        if "_reset_tiers" in repr(work):
            future.result(WAIT_S)
            written.append(store(storage, pool))  # pages of the old weights
        return future

    monkeypatch.setattr(LoopThread, "start", start_and_write)
    storage.clear()
    assert written == [[False] * 8]
    assert not any(map(storage.exists, hashes()))


def test_clear_during_write_stores_nothing(
    attach: Attach, copies: Copies, threads: ThreadPoolExecutor, tmp_path: Path
) -> None:
    pool = pools.mha()
    storage = attach(pool, settings(tmp_path / "root", cpu_bytes_to_use="64KiB"))  # in several parts
    writing = begun(copies, threads, store, storage, pool)
    storage.clear()
    copies.let_through.set()
    assert writing.result(WAIT_S)[-1] is False
    assert not any(map(storage.exists, hashes()))
    assert store(storage, pool) == [True] * 8
    storage.close()
    assert len(files(tmp_path / "root")) == 8


def test_unconfirmed_clear_serves_nothing(attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = asyncio.Event()
    reset = TieringManager.reset

    async def late(manager: TieringManager) -> None:
        await answered.wait()
        await reset(manager)

    monkeypatch.setattr(TieringManager, "reset", late)
    monkeypatch.setattr("kvtier_sglang._store._CLOSE_S", 0.1)
    pool = pools.mha()
    storage = attach(pool, settings(isolation="thread", secondary_tiers=[], drain_on_shutdown_s=0.0))
    store(storage, pool)
    with pytest.raises(StateError, match="host pool kv: its tiers have not answered in time"):
        storage.clear()
    assert storage.batch_exists(hashes()) == 0
    assert load(storage, pool) == store(storage, pool) == [False] * 8
    storage._loop.post(answered.set)
    monkeypatch.setattr(TieringManager, "reset", reset)
    monkeypatch.setattr("kvtier_sglang._store._CLOSE_S", WAIT_S)
    storage.clear()
    assert storage.batch_exists(hashes()) == 0
    assert store(storage, pool) == load(storage, pool) == [True] * 8


def test_clear_unseen_by_tier_fails(attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pools.mha()
    storage = attach(pool)
    statistics = TieringManager.statistics

    def down(manager: TieringManager) -> Statistics:
        told = statistics(manager)
        return replace(told, tiers=tuple(replace(tier, down="refused") for tier in told.tiers))

    monkeypatch.setattr(TieringManager, "statistics", down)
    with pytest.raises(StateError, match=r"host pool kv: tier fs \(refused\) is down and has not been reset"):
        storage.clear()


def test_late_part_ends_its_own_read(attach: Attach, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pool = pools.mha()
    storage = attach(pool, settings(tmp_path / "root", cpu_bytes_to_use="64KiB"))
    store(storage, pool)
    acquire = TieringManager.acquire
    asked: list[Sequence[OffloadKey]] = []

    def late(manager: TieringManager, keys: Sequence[OffloadKey]) -> AbstractAsyncContextManager[Acquired]:
        asked.append(keys)
        if len(asked) > 1:
            raise TimeoutError
        return acquire(manager, keys)

    monkeypatch.setattr(TieringManager, "acquire", late)
    given = load(storage, pool)
    assert len(asked) == 2
    assert given == [index < len(asked[0]) for index in range(8)]
    assert any(given)
    assert not all(given)


class Deaf:
    """Calls of a tier that hang until the test releases them, and cannot be cancelled."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.begun, self.let_go = threading.Event(), threading.Event()

    def make(self, tier: type[SecondaryTier[Any]], verb: str) -> None:
        act = getattr(tier, verb)

        async def late(*given: Any) -> Any:
            self.begun.set()
            await until_done(asyncio.ensure_future(asyncio.to_thread(self.let_go.wait, WAIT_S)))
            return await act(*given)

        self._patch.setattr(tier, verb, late)


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> Iterator[Deaf]:
    deaf = Deaf(monkeypatch)
    yield deaf
    deaf.let_go.set()


def test_late_put_keeps_given_pages(attach: Attach, deaf: Deaf) -> None:
    deaf.make(FsTier, "put")
    pool = pools.mha()
    storage = attach(pool)
    assert store(storage, pool) == [True] * 8
    assert deaf.begun.wait(WAIT_S)
    pools.fill(pool, range(8), first=100)  # SGLang has reused the pages for other tokens.
    deaf.let_go.set()
    storage.close()
    assert load(attach(pool), pool) == [True] * 8


@pytest.mark.parametrize("verb", ["put", "get", "contains", "reset"])
def test_silent_tier_stops_no_call(
    attach: Attach, threads: ThreadPoolExecutor, deaf: Deaf, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setattr("kvtier_sglang._store._CLOSE_S", 1.0)
    tier = {"type": "dummy", "complete_index": False, "deadline_s": 0.5}
    pool = pools.mha()
    extra = settings(
        cpu_bytes_to_use="64KiB", request_deadline_s=0.5, drain_on_shutdown_s=0.0, secondary_tiers=[tier]
    )
    storage = attach(pool, extra)
    deaf.make(DummyTier, verb)

    def use() -> None:
        for prompt in ("a", "b"):
            store(storage, pool, prompt=prompt)
            storage.batch_exists(hashes(prompt=prompt))
            load(storage, pool, prompt=prompt)
        with suppress(StateError):
            storage.clear()
        assert storage.batch_exists(hashes()) == 0
        storage.close()

    threads.submit(use).result(WAIT_S)
    assert deaf.begun.is_set()


POOLS = (PoolName.KV, PoolName.SWA, PoolName.DRAFT, PoolName.INDEXER)
ONE_S = 2.0
TOO_LONG_S = 3 * ONE_S  # Four waits in a row would take longer.


@pytest.fixture
def slow(attach: Attach) -> Any:
    """Return a storage of four pools with hanging puts. Only the KV pool has pages of prompt "b"."""
    hanging = {"type": "dummy", "hang_rate": 1.0, "complete_index": False, "deadline_s": WAIT_S}
    pool = pools.mha()
    extra = settings(request_deadline_s=ONE_S, drain_on_shutdown_s=ONE_S, secondary_tiers=[hanging])
    storage = attach(pool, extra, beside={name: pool for name in POOLS[1:]})
    sent = [*transfers(pool, "b")[:1], *transfers(pool, "other")[1:]]
    assert storage.batch_set_v2(sent) == dict.fromkeys(POOLS, [True] * 8)
    assert storage.batch_exists(hashes(prompt="b")) == 8
    return storage


def transfers(pool: Any, prompt: str) -> list[PoolTransfer]:
    return [PoolTransfer(name, pools.indices(pool, range(8)), keys=hashes(prompt=prompt)) for name in POOLS]


CALLS: dict[str, Callable[[Any], Any]] = {
    "exists": lambda it: it.batch_exists_v2(hashes(prompt="b"), transfers(it.mem_pool_host, "b")[1:]),
    "get": lambda it: it.batch_get_v2(transfers(it.mem_pool_host, "a")),
    "set": lambda it: it.batch_set_v2(transfers(it.mem_pool_host, "c")),
    "close": lambda it: it.close(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_pools_share_call_deadline(slow: Any, call: Callable[[Any], Any]) -> None:
    begun_s = time.monotonic()
    call(slow)
    assert time.monotonic() < begun_s + TOO_LONG_S


def test_pools_share_clear_deadline(slow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def late(_: TieringManager) -> None:
        await asyncio.sleep(WAIT_S)

    monkeypatch.setattr(TieringManager, "reset", late)
    for each in slow._stores.values():
        each.close_s = ONE_S
    begun_s = time.monotonic()
    with pytest.raises(StateError, match=r"host pool kv: .*; host pool indexer: its tiers have not answered"):
        slow.clear()
    assert time.monotonic() < begun_s + TOO_LONG_S
