"""Random sequences of calls through SGLang's classes. A dictionary contains the expected bytes of each page.

``KVTIER_LIVES=500 pytest plugins/kvtier-sglang/tests/test_lives.py`` runs more of them than each commit.
"""

from __future__ import annotations

import itertools
import os
import random
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import pools
import pytest
import torch
from conftest import Attach, settings
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from test_storage import LAYOUTS, files, replace_weights

from kvtier._core.cascade import Cascades
from kvtier_sglang import _identity, _store, _updates
from kvtier_sglang._pages import HostPages
from kvtier_sglang._store import PageStore
from kvtier_sglang._updates import UPDATES

LIVES = range(int(os.environ.get("KVTIER_LIVES", "8")))
STEPS = 24
MOST_PAGES = 16  # upper bound for all calls of a step in one pool
KV, MAMBA, INDEXER, DRAFT = PoolName.KV, PoolName.MAMBA, PoolName.INDEXER, PoolName.DRAFT
BESIDE: dict[PoolName, Callable[[], Any]] = {MAMBA: pools.mamba, INDEXER: pools.mla, DRAFT: pools.mha}
CACHES: tuple[dict[str, Any], ...] = ({}, {"namespace": "other"}, {"tp_size": 2, "tp_rank": 1})
"""Differences from the first cache: no page of one is for another."""
LOSSES = ("put_dropped", "put_failed")
FAULTS: tuple[dict[str, float], ...] = ({}, {"failure_rate": 0.2}, {"corruption_rate": 0.2})

Page = tuple[int, int, PoolName, str, int]
"""Cache, number of its weights, pool, prompt, and place in the prompt."""


@dataclass
class Rank:
    """The storage of a rank and its host pools.

    Attributes:
        weights: number of its weights, which are unique after a clear.
        stored: pages that it has accepted.
        has_old: whether weights were replaced since the last clear, so that it must not serve any page.
    """

    cache: int
    weights: int
    storage: Any
    host: dict[PoolName, Any]
    stored: set[Page] = field(default_factory=set)
    has_old: bool = False


class Life:
    """Ranks that share a root, and calls from SGLang's threads, drawn from a seed."""

    def __init__(self, seed: int, attach: Attach, root: Path) -> None:
        self._chance = chance = random.Random(seed)
        self._attach, self._root = attach, root
        self._layout: Callable[[], Any] = chance.choice([pools.mha, chance.choice([*LAYOUTS.values()])])
        self._beside = [name for name in BESIDE if chance.random() < 0.4]
        self._settings = self._drawn_settings()
        self._odds = [6.0, *(chance.choice([0, 0.5, 1.5]) for _ in range(5))]
        self._ranks: list[Rank] = []
        self._numbers = itertools.count(len(CACHES))
        self._starts = [*range(len(CACHES))]  # numbers of the initial weights of ranks, by cache
        self._stored: set[Page] = set()  # Pages that the calls of a step must find.
        self._kept: set[Page] = set()  # Pages stored by closed ranks that lost none of their puts.
        self._is_damaged = False
        self._free: dict[int, list[int]] = {}  # Unused places for pages in the calls of a step, by pool.
        self._offered: set[Page] = set()

    def _drawn_settings(self) -> dict[str, object]:
        chance = self._chance
        memory = chance.choice(["64KiB", "256KiB", "1MiB"])
        # Whether all pages of a rank fit into memory. Tiers may lose or refuse pages.
        self._keeps_all = memory == "1MiB"
        more: dict[str, object] = {
            "cpu_bytes_to_use": memory,
            "eviction_policy": chance.choice(["auto", "lru", "arc", "lhd"]),
            "isolation": "process" if chance.random() < 0.1 else "thread",
        }
        drawn = settings(self._root, **more)
        if chance.random() < 0.5:
            faults = chance.choice(FAULTS)
            dummy = {"type": "dummy", "complete_index": chance.random() < 0.5, "deadline_s": 60.0, **faults}
            tiers: Any = drawn["kvtier"]
            tiers["secondary_tiers"].insert(chance.randrange(2), dummy)
        return drawn

    def run(self) -> None:
        """Do all steps."""
        self._begin(0)
        acts = [self._call, self._begin_another, self._restart, self._clear, self._update, self._damage]
        with ThreadPoolExecutor(3) as threads:
            for _ in range(STEPS):
                (act,) = self._chance.choices(acts, self._odds)
                act(threads)

    # --- engines ---------------------------------------------------------------------------------

    def _begin(self, cache: int) -> None:
        change = dict(CACHES[cache])
        kvtier: Any = self._settings["kvtier"]
        kvtier = {**kvtier, "namespace": change.pop("namespace", kvtier["namespace"])}
        host = {KV: self._layout(), **{name: BESIDE[name]() for name in self._beside}}
        is_mla = type(host[KV]) is type(pools.mla())
        beside = {name: pool for name, pool in host.items() if name is not KV}
        made = self._attach(
            host[KV], {**self._settings, "kvtier": kvtier}, beside, is_mla_model=is_mla, **change
        )
        has_old = _updates.updates() > 0
        self._ranks.append(Rank(cache, self._starts[cache], made, host, has_old=has_old))

    def _begin_another(self, _threads: ThreadPoolExecutor) -> None:
        if len(self._ranks) < 3:
            self._begin(self._chance.randrange(len(CACHES)))

    def _restart(self, _threads: ThreadPoolExecutor) -> None:
        rank = self._ranks.pop(self._chance.randrange(len(self._ranks)))
        stores = [*rank.storage._stores.values()]
        rank.storage.close()
        if not any(map(lost_puts, stores)):
            self._kept |= rank.stored
        self._begin(rank.cache)

    def _damage(self, _threads: ThreadPoolExecutor) -> None:
        self._is_damaged = True
        # The directory was removed meanwhile, or there is none.
        with suppress(FileNotFoundError, IndexError):
            path = self._chance.choice(files(self._root))
            with path.open("r+b") as file:
                file.seek(self._chance.randrange(1000))
                file.write(self._chance.randbytes(8))

    def _update(self, _threads: ThreadPoolExecutor) -> None:
        replace_weights(self._chance.choice(UPDATES))
        for rank in self._ranks:
            rank.has_old = True

    def _clear(self, _threads: ThreadPoolExecutor) -> None:
        cache = self._chance.choice(self._ranks).cache
        for rank in self._ranks:
            if rank.cache == cache:
                rank.storage.clear()
        self._cleared(cache)

    def _cleared(self, cache: int) -> None:
        self._starts[cache] = next(self._numbers)
        for rank in self._ranks:
            if rank.cache == cache:
                rank.has_old, rank.weights = False, next(self._numbers)

    # --- calls -----------------------------------------------------------------------------------

    def _call(self, threads: ThreadPoolExecutor) -> None:
        """Make concurrent calls; sometimes clear the only rank of a cache meanwhile."""
        rank = self._chance.choice(self._ranks)
        is_alone = [one.cache for one in self._ranks].count(rank.cache) == 1
        clears = is_alone and not rank.has_old and self._chance.random() < 0.1
        count = self._chance.choice([1, 1, 2, 3])
        self._stored = {*rank.stored} if self._keeps_all else set()
        if count == 1 and not self._is_damaged:  # Concurrent calls share the slots for promotions.
            self._stored |= self._kept
        self._free = {
            id(pool): self._chance.sample(range(pool.size // pool.page_size), MOST_PAGES)
            for pool in rank.host.values()
        }
        calls = [self._drawn_call(rank, is_cleared=clears) for _ in range(count)]
        under_way = [threads.submit(call) for call in calls]
        if clears:
            rank.storage.clear()
        for one in under_way:
            one.result()
        if clears:
            self._cleared(rank.cache)

    def _drawn_call(self, rank: Rank, *, is_cleared: bool) -> Callable[[], None]:
        name = self._chance.choice([*rank.host])
        free = self._free[id(rank.host[name])]
        prompt, count = self._chance.choice("abcd"), self._chance.randint(1, len(free) // 2)
        places = [free.pop() for _ in range(count)]
        pages = [(rank.cache, rank.weights, name, prompt, place) for place in range(count)]
        # A write may start after the clear, so a page of the old weights could legitimately be stored.
        verbs = [self._read, self._look_up, *([] if is_cleared else [self._write])]
        verb = self._chance.choice(verbs)
        if verb == self._write:
            self._offered |= set(pages)
        return lambda: verb(rank, name, pages, places, is_cleared)

    def _write(
        self, rank: Rank, name: PoolName, pages: list[Page], places: list[int], _is_cleared: bool
    ) -> None:
        pool = rank.host[name]
        for page, place in zip(pages, places, strict=True):
            pools.fill(pool, range(place, place + 1), number(page))
        done = transferred("set", rank, name, pages, places)
        assert not (rank.has_old and any(done)), "a page is stored before a clear"
        rank.stored |= {page for page, is_done in zip(pages, done, strict=True) if is_done}

    def _read(
        self, rank: Rank, name: PoolName, pages: list[Page], places: list[int], is_cleared: bool
    ) -> None:
        pool = rank.host[name]
        for place in places:
            pools.wipe(pool, range(place, place + 1))
        given = transferred("get", rank, name, pages, places)
        for page, place, is_given in zip(pages, places, given, strict=True):
            if is_given:
                assert pools.holds(pool, place, number(page)), f"{page} has other bytes"
            elif not is_cleared:
                assert pools.is_blank(pool, place), f"{page} is overwritten"
        assert given == sorted(given, reverse=True), "the pages that are given are no prefix"
        self._judge(rank, pages, given.count(True), is_cleared)

    def _look_up(
        self, rank: Rank, name: PoolName, pages: list[Page], _places: list[int], is_cleared: bool
    ) -> None:
        keys = [hash_of(page) for page in pages]
        if name is KV:
            self._judge(rank, pages, rank.storage.batch_exists(keys), is_cleared)
            return
        asked = PoolTransfer(name, hit_policy=PoolHitPolicy.ALL_PAGES)
        found = rank.storage.batch_exists_v2(keys, [asked]).kv_hit_pages
        of_kv = [(*page[:2], KV, *page[3:]) for page in pages]
        least = min(leading(pages, self._stored), leading(of_kv, self._stored))
        self._judge(rank, pages, found, is_cleared, least)
        self._judge(rank, of_kv, found, is_cleared, least)

    def _judge(
        self, rank: Rank, pages: list[Page], found: int, is_cleared: bool, least: int | None = None
    ) -> None:
        """Check the number of leading pages found: all required pages, and no impossible one."""
        assert found <= leading(pages, self._offered), "a page is found that was never offered"
        assert not (rank.has_old and found), "a page is found before a clear"
        if not rank.has_old and not is_cleared:
            assert found >= (leading(pages, self._stored) if least is None else least), "a page is lost"


def leading(pages: Sequence[Page], among: set[Page]) -> int:
    return next((index for index, page in enumerate(pages) if page not in among), len(pages))


def lost_puts(store: PageStore) -> int:
    """Return kvtier's count of puts that did not reach the files."""
    counts = store._manager._counts.items()
    return sum(int(count) for (what, *where), count in counts if what in LOSSES and where[0] == "fs")


def number(page: Page) -> int:
    """Return the number of a page's bytes, which differs for each cache, pool and weights."""
    return zlib.crc32(repr(page).encode())


def hash_of(page: Page) -> str:
    return sha256(repr(page[3:]).encode()).hexdigest()


def transferred(verb: str, rank: Rank, name: PoolName, pages: list[Page], places: list[int]) -> list[bool]:
    """Store or load pages of one pool as SGLang does; return which pages succeeded."""
    size = rank.host[name].page_size
    indices = torch.cat([torch.arange(place * size, (place + 1) * size) for place in places])
    keys = [hash_of(page) for page in pages]
    if name is KV:
        done: list[bool] = getattr(rank.storage, f"batch_{verb}_v1")(keys, indices)
    else:
        done = getattr(rank.storage, f"batch_{verb}_v2")([PoolTransfer(name, indices, keys=keys)])[name]
    return done


@pytest.fixture
def lives(attach: Attach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Life]:
    def make(seed: int) -> Life:
        monkeypatch.setattr(_updates, "_count", 0)
        return Life(seed, attach, tmp_path / "root" / str(seed))

    return make


@pytest.mark.parametrize("seed", LIVES)
def test_lives_read_their_own_pages(lives: Callable[[int], Life], seed: int) -> None:
    lives(seed).run()


def plant_wrong_order(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = HostPages.pages
    monkeypatch.setattr(HostPages, "pages", lambda self, *given: pages(self, *given)[::-1])


def plant_clear_that_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageStore, "begin_reset", lambda self: None)


def plant_updates_that_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_store, "updates", lambda: 0)


def plant_identity_without_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_identity, "_parallel", lambda *_: {})


def plant_identity_without_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _identity.pool_identity
    monkeypatch.setattr(
        "kvtier_sglang.storage.pool_identity", lambda rank, _name, *given: made(rank, "kv", *given)
    )


def plant_drops_that_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = Cascades._admit

    def all_but_one(self: Cascades, *given: Any, **how: Any) -> list[tuple[int, Any]]:
        return [(tier, chunks[1:]) for tier, chunks in admit(self, *given, **how)]

    monkeypatch.setattr(Cascades, "_admit", all_but_one)


@pytest.mark.full
@pytest.mark.parametrize(
    "plant",
    [
        plant_wrong_order,
        plant_clear_that_hides_nothing,
        plant_updates_that_are_not_counted,
        plant_identity_without_rank,
        plant_identity_without_pool,
        plant_drops_that_are_not_counted,
    ],
)
def test_planted_bugs_are_found(
    lives: Callable[[int], Life], monkeypatch: pytest.MonkeyPatch, plant: Callable[..., None]
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        deque(map(Life.run, map(lives, range(100, 160))), maxlen=0)
