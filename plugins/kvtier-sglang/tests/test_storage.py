"""SGLang's own classes use the storage, which returns only bytes that were stored."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pools
import pytest
import torch
from conftest import Attach, settings, storage_config
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageFailureInjector
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

from kvtier import ConfigError, StateError
from kvtier_sglang import KVTierStorage, _updates
from kvtier_sglang._identity import key_of
from kvtier_sglang._updates import UPDATES

STORED = range(8)
ELSEWHERE = range(16, 24)
LAYOUTS = {
    "mha-page_first": pools.mha,
    "mha-layer_first": lambda: pools.mha("layer_first"),
    "mha-page_first_direct": lambda: pools.mha("page_first_direct"),
    "mha-page_head": lambda: pools.mha("page_head"),
    "mla-page_first": pools.mla,
    "mla-layer_first": lambda: pools.mla("layer_first"),
}


def hashes(count: int = len(STORED), prompt: str = "a") -> list[str]:
    return [sha256(f"{prompt}{index}".encode()).hexdigest() for index in range(count)]


def store(storage: Any, pool: Any, pages: range = STORED, prompt: str = "a") -> list[bool]:
    pools.fill(pool, pages)
    done: list[bool] = storage.batch_set_v1(hashes(len(pages), prompt), pools.indices(pool, pages))
    return done


def load(storage: Any, pool: Any, pages: range = ELSEWHERE, prompt: str = "a") -> list[bool]:
    """Get pages into other places. Returned pages must hold the bytes; the others must be unchanged."""
    pools.wipe(pool, pages)
    given: list[bool] = storage.batch_get_v1(hashes(len(pages), prompt), pools.indices(pool, pages))
    for number, (page, is_given) in enumerate(zip(pages, given, strict=True)):
        assert pools.holds(pool, page, number) if is_given else pools.is_blank(pool, page), (number, given)
    return given


def files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.bin"))


def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(600):
        if holds():
            return
        time.sleep(0.05)
    raise AssertionError("it did not come to that")


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_pages_survive_restart(attach: Attach, make: Callable[[], Any]) -> None:
    pool = make()
    first = attach(pool)
    assert isinstance(first, KVTierStorage)
    assert first.batch_exists(hashes()) == 0
    assert store(first, pool) == [True] * 8
    assert (first.batch_exists(hashes()), first.exists(hashes()[0])) == (8, True)
    assert load(first, pool) == [True] * 8
    first.close()
    second = attach(make_again := make())
    assert second.batch_exists(hashes(10)) == 8
    assert load(second, make_again, range(16, 26)) == [True] * 8 + [False] * 2


def test_more_pages_than_memory(attach: Attach, tmp_path: Path) -> None:
    pool = pools.mha()
    storage = attach(pool, settings(tmp_path, cpu_bytes_to_use="64KiB"))
    assert store(storage, pool, range(16)) == [True] * 16
    assert load(storage, pool, range(16, 32)) == [True] * 16


def test_stored_pages_are_refreshed(attach: Attach) -> None:
    pool = pools.mha()
    storage = attach(pool)
    assert store(storage, pool) == store(storage, pool) == [True] * 8


@pytest.mark.parametrize(
    "change",
    [
        {"model_name": "org/other"},
        {"tp_size": 2},
        {"tp_size": 2, "tp_rank": 1},
        {"pp_size": 2, "pp_rank": 1},
        {"attn_cp_size": 2, "attn_cp_rank": 1},
        {"pool": lambda: pools.mha("page_head")},
        {"pool": lambda: pools.mha(dtype=torch.float16)},
        {"pool": lambda: pools.mha(heads=4)},
        {"namespace": "other"},
    ],
    ids=str,
)
def test_other_cache_gets_nothing(attach: Attach, tmp_path: Path, change: dict[str, Any]) -> None:
    pool = pools.mha()
    first = attach(pool)
    store(first, pool)
    first.close()
    rank = {name: value for name, value in change.items() if name not in ("pool", "namespace")}
    other = change.get("pool", pools.mha)()
    extra = settings(tmp_path / "root", namespace=change.get("namespace", "tests"))
    second = attach(other, extra, **rank)
    assert second.batch_exists(hashes()) == 0
    assert load(second, other) == [False] * 8


def test_ranks_share_common_pages(attach: Attach) -> None:
    for make, is_mla in ((pools.mla, True), (pools.mha, False)):
        pool = make()
        writer = attach(pool, is_mla_model=is_mla, tp_size=2, tp_rank=0)
        store(writer, pool)
        writer.close()
        other = make()
        reader = attach(other, is_mla_model=is_mla, tp_size=2, tp_rank=1)
        assert load(reader, other) == [is_mla] * 8


def test_damaged_file_misses(attach: Attach, tmp_path: Path) -> None:
    pool = pools.mha()
    first = attach(pool)
    store(first, pool)
    first.close()
    damaged = files(tmp_path / "root")
    assert len(damaged) == 8
    (third,) = [path for path in damaged if hashes()[3] in path.name]
    with third.open("r+b") as file:
        file.seek(100)
        file.write(b"damaged")
    second = attach(pool)
    assert load(second, pool) == [True] * 3 + [False] * 5
    assert load(second, pool, range(16, 19)) == [True] * 3


@pytest.mark.parametrize("chance", [1.0, 0.5])
def test_sglang_fault_injector(attach: Attach, chance: float) -> None:
    pool, prompts = pools.mha(), range(50)  # At even odds, some of them are certainly stored and loaded.
    with envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.override(chance):
        storage = attach(pool)
    assert isinstance(storage, HiCacheStorageFailureInjector)
    stored = [all(store(storage, pool, prompt=f"p{n}")) for n in prompts]
    found = [storage.batch_exists(hashes(prompt=f"p{n}")) for n in prompts]
    loaded = [all(load(storage, pool, prompt=f"p{n}")) for n in prompts]
    assert set(found) <= {0, 8}
    assert all(was_stored or not there for was_stored, there in zip(stored, loaded, strict=True))
    assert (any(stored), any(found), any(loaded)) == ((False,) * 3 if chance == 1 else (True,) * 3)


def test_threads_at_once(attach: Attach) -> None:
    pool = pools.mha()
    storage = attach(pool)
    lock = threading.Lock()  # Protects the pages' places. Each thread uses separate places.

    def work(thread: int) -> bool:
        pages = range(thread * 4, thread * 4 + 4)
        for turn in range(5):
            with lock:
                pools.fill(pool, pages)
            assert all(storage.batch_set_v1(hashes(4, f"{thread}/{turn}"), pools.indices(pool, pages)))
            assert storage.batch_exists(hashes(4, f"{thread}/{turn}")) == 4
            pools.wipe(pool, pages)
            assert load(storage, pool, pages, f"{thread}/{turn}") == [True] * 4
        return True

    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(work, range(6))) == [True] * 6


def test_hanging_tier_misses_in_time(attach: Attach) -> None:
    pool = pools.mha()
    hanging = {"type": "dummy", "hang_rate": 1.0, "complete_index": False, "deadline_s": 3.0}
    storage = attach(
        pool, settings(request_deadline_s=3.0, drain_on_shutdown_s=0.0, secondary_tiers=[hanging])
    )
    begun_s = time.monotonic()
    assert load(storage, pool) == [False] * 8
    assert store(storage, pool) == [True] * 8  # Goes into the primary tier, which does not hang.
    assert load(storage, pool) == [True] * 8
    assert time.monotonic() < begun_s + 60


def test_clear_hides_for_ever(attach: Attach) -> None:
    pool = pools.mha()
    storage = attach(pool)
    store(storage, pool)
    storage.clear()
    assert storage.batch_exists(hashes()) == 0
    assert load(storage, pool) == [False] * 8
    assert store(storage, pool) == [True] * 8
    assert load(storage, pool) == [True] * 8
    storage.close()
    assert load(attach(pool), pool) == [False] * 8


@pytest.mark.parametrize("update", UPDATES)
def test_new_weights_get_no_old_pages(attach: Attach, monkeypatch: pytest.MonkeyPatch, update: str) -> None:
    monkeypatch.setattr(_updates, "_count", 0)
    pool = pools.mha()
    storage = attach(pool)
    store(storage, pool)
    replace_weights(update)
    for each in (storage, attach(pool)):  # also if the storage is attached after the update
        assert each.batch_exists(hashes()) == 0
        assert load(each, pool) == store(each, pool) == [False] * 8
        each.clear()
        assert load(each, pool) == [False] * 8
        assert store(each, pool) == load(each, pool) == [True] * 8
    replace_weights(update)
    assert load(storage, pool) == [False] * 8


def replace_weights(update: str) -> None:
    given = {"begin_weight_update": 0, "update_weights_from_disk": 2}.get(update, 1)
    with pytest.raises(AttributeError):  # Method of the updater's double: the update fails midway.
        getattr(WeightUpdater, update)(SimpleNamespace(), *[None] * given)


def test_experts_that_move_are_no_new_weights(attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_updates, "_count", 0)
    pool = pools.mha()
    storage = attach(pool)
    store(storage, pool)
    with pytest.raises(AttributeError):
        WeightUpdater.update_weights_from_disk(SimpleNamespace(), None, None, weight_name_filter=bool)
    assert load(storage, pool) == [True] * 8


def test_all_updates_are_counted() -> None:
    named = {it for it in vars(WeightUpdater) if not it.startswith("_") and callable(vars(WeightUpdater)[it])}
    harmless = {
        "init_weights_update_group", "destroy_weights_update_group", "receive_weights_from_distributed",
        "end_weight_update",
    }  # fmt: skip
    assert named == harmless | set(UPDATES)


def test_closed_storage_misses(attach: Attach) -> None:
    pool = pools.mha()
    storage = attach(pool)
    store(storage, pool)
    storage.close()
    storage.close()
    assert storage.batch_exists(hashes()) == 0
    assert load(storage, pool) == store(storage, pool) == [False] * 8
    with pytest.raises(StateError, match="nothing was hidden"):
        storage.clear()
    assert not [it for it in threading.enumerate() if it.name.startswith("kvtier-sglang")]


def test_tier_process(attach: Attach, tmp_path: Path) -> None:
    pool = pools.mha()
    extra = settings(tmp_path / "root", isolation="process")
    first = attach(pool, extra)
    assert store(first, pool) == [True] * 8
    first.close()
    assert len(files(tmp_path / "root")) == 8
    assert load(attach(pool, extra), pool) == [True] * 8


def test_sglang_metrics(attach: Attach) -> None:
    pool = pools.mha()
    storage = attach(pool)
    store(storage, pool)
    load(storage, pool, range(16, 26))
    stats = storage.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([8], [8])
    assert stats.backup_bandwidth[0] > 0
    assert storage.get_stats().backup_pgs == []


def test_kvtier_counters(attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    from prometheus_client import REGISTRY

    def stored() -> float:
        return REGISTRY.get_sample_value("kvtier_stored_chunks_total", {"pool": "kv"}) or 0.0

    monkeypatch.setattr("kvtier_sglang.storage._PUBLISH_EVERY_S", -1.0)
    before = stored()
    pool = pools.mha()
    storage = attach(pool)
    store(storage, pool)
    storage.get_stats()
    wait_until(lambda: stored() == before + 8)
    storage.get_stats()
    storage.close()
    assert stored() == before + 8


def test_wrong_indices_miss(attach: Attach) -> None:
    pool = pools.mha()
    storage = attach(pool)
    assert storage.batch_set_v1(hashes(), torch.arange(pools.PAGE)) == [False] * 8
    assert storage.batch_get_v1(hashes(), torch.arange(pools.PAGE)) == [False] * 8
    assert storage.batch_set_v1([], torch.arange(0)) == []


def test_old_interface_misses(attach: Attach) -> None:
    storage: HiCacheStorage = attach()
    page = torch.zeros(8)
    assert storage.set("aa", page) is storage.batch_set(["aa"], [page]) is False
    assert storage.get("aa", page) is None
    assert storage.batch_get(["aa"], [page]) == [None]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"interface_v1": 0}, '"interface_v1": 1'),
        ({"kvtier": None}, 'no "kvtier"'),
        ({"kvtier": {"secondary_tiers": []}}, "cpu_bytes_to_use"),
        ({"kvtier": {"cpu_bytes_to_use": "1GiB", "tiers": []}}, "tiers"),
        ({"kvtier": {"cpu_bytes_to_use": "1GiB", "block_size": 64}}, "remove block_size"),
        ({"kvtier": {"cpu_bytes_to_use": "1GiB", "load_gate": "latency"}}, "remove load_gate"),
        ({"kvtier": {"cpu_bytes_to_use": "1GiB", "store_threshold": 2}}, "remove store_threshold"),
    ],
)
def test_wrong_settings_are_named(change: dict[str, object], words: str) -> None:
    config = storage_config({**settings(), **change})
    with pytest.raises(ConfigError, match=words):
        StorageBackendFactory.create_backend("dynamic", config, None)


def test_unknown_sglang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = storage_config(settings())
    monkeypatch.setattr("kvtier_sglang.storage.version", lambda _: "0.5.24")
    with pytest.raises(ConfigError, match=r"is for SGLang 0\.5\.23, and this is SGLang 0\.5\.24"):
        StorageBackendFactory.create_backend("dynamic", config, None)


def test_refused_pages_stay_on_host(attach: Attach, tmp_path: Path) -> None:
    pool = pools.mha()
    extra = settings(tmp_path / "root")
    extra["kvtier"]["secondary_tiers"][0]["write_policy"] = "reused"  # type: ignore[index]
    first = attach(pool, extra)
    assert store(first, pool) == [True] * 8
    first.close()
    assert not files(tmp_path / "root")
    second = attach(pool, extra)
    assert store(second, pool) == load(second, pool) == [True] * 8
    second.close()
    assert len(files(tmp_path / "root")) == 8  # the pages were requested again


def test_unnamed_weights_need_namespace(attach: Attach, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="namespace"):
        attach(extra=settings(tmp_path, namespace=""))


def test_page_names_stay_apart() -> None:
    names = ["ab", "AB", "ab_suffix", "", "ab" * 40, hashes(1)[0], hashes(1)[0].upper(), "a b", "ab "]
    assert len({key_of(name) for name in names}) == len(names)
    assert key_of(hashes(1)[0]).hex().startswith(hashes(1)[0])
