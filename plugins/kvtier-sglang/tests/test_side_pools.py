"""Pools beside the KV pool: a missing page in one of them shortens the hit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pools
import pytest
import torch
from conftest import Attach, settings
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from test_storage import ELSEWHERE, STORED, files, hashes, load, store

from kvtier import ConfigError, OffloadKey, TieringManager

ALL, TRAILING, GROUPS = PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES, PoolHitPolicy.BLOCK_GROUPS


def transfer(
    name: PoolName, pool: Any, keys: list[str], pages: range, policy: PoolHitPolicy = ALL
) -> PoolTransfer:
    return PoolTransfer(name, pools.indices(pool, pages), keys=keys, hit_policy=policy)


def stored_states(attach: Attach, *at: int) -> tuple[Any, Any, Any]:
    """Store eight pages of KV, and Mamba's state after some of them."""
    kv, states = pools.mha(), pools.mamba()
    storage = attach(kv, beside={PoolName.KV: kv, PoolName.MAMBA: states})
    assert store(storage, kv) == [True] * 8
    for page in at:
        pools.fill(states, range(1), first=page)
        sent = transfer(PoolName.MAMBA, states, [hashes()[page]], range(1))
        assert storage.batch_set_v2([sent]) == {PoolName.MAMBA: [True]}
    return storage, kv, states


def test_state_comes_back(attach: Attach) -> None:
    storage, kv, states = stored_states(attach, 7)
    asked = PoolTransfer(PoolName.MAMBA, keys=["__any__"], hit_policy=TRAILING)
    result = storage.batch_exists_v2(hashes(), [asked])
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (8, [8])
    assert result.extra_pool_hit_pages == {PoolName.KV: 8, PoolName.MAMBA: 8}
    wanted = transfer(PoolName.MAMBA, states, [hashes()[7]], range(2, 3))
    assert storage.batch_get_v2([wanted]) == {PoolName.MAMBA: [True]}
    assert pools.holds(states, 2, 7)
    assert load(storage, kv) == [True] * 8


@pytest.mark.parametrize(("at", "restorable"), [((), []), ((2,), [3]), ((2, 4), [3, 5])])
def test_missing_state_shortens_hit(attach: Attach, at: tuple[int, ...], restorable: list[int]) -> None:
    storage, _, states = stored_states(attach, *at)
    asked = PoolTransfer(PoolName.MAMBA, keys=["__any__"], hit_policy=TRAILING)
    result = storage.batch_exists_v2(hashes(), [asked])
    assert result.kv_hit_pages == max(restorable, default=0)
    assert result.restorable_prefix_pages == restorable
    assert result.extra_pool_hit_pages[PoolName.KV] == 8
    pools.wipe(states, range(3))
    wanted = transfer(PoolName.MAMBA, states, [hashes()[7]], range(2, 3))
    assert storage.batch_get_v2([wanted]) == {PoolName.MAMBA: [False]}
    assert pools.is_blank(states, 2)


def test_all_or_nothing_pool(attach: Attach) -> None:
    kv, indexer = pools.mha(), pools.mla()
    storage = attach(kv, beside={PoolName.INDEXER: indexer})
    store(storage, kv)
    pools.fill(indexer, range(5))
    stored = storage.batch_set_v2([transfer(PoolName.INDEXER, indexer, hashes()[:5], range(5))])
    assert stored == {PoolName.INDEXER: [True] * 5}
    asked = PoolTransfer(PoolName.INDEXER, indices_from_pool=PoolName.KV)
    result = storage.batch_exists_v2(hashes(), [asked])
    assert (result.kv_hit_pages, result.extra_pool_hit_pages[PoolName.INDEXER]) == (5, 5)
    given = storage.batch_get_v2([transfer(PoolName.INDEXER, indexer, hashes(), ELSEWHERE)])
    assert given == {PoolName.INDEXER: [True] * 5 + [False] * 3}
    assert all(pools.holds(indexer, page, number) for number, page in enumerate(ELSEWHERE[:5]))


def test_windows_need_trailing_pages(attach: Attach) -> None:
    kv, window = pools.mha(), pools.mha(heads=1)
    storage = attach(kv, beside={PoolName.SWA: window})
    store(storage, kv)
    pools.fill(window, range(3), first=3)
    storage.batch_set_v2([transfer(PoolName.SWA, window, hashes()[3:6], range(3))])
    asked = PoolTransfer(PoolName.SWA, keys=["__a__", "__b__"], hit_policy=TRAILING)
    result = storage.batch_exists_v2(hashes(), [asked])
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (6, [5, 6])


def test_pools_do_not_share_pages(attach: Attach) -> None:
    kv, draft = pools.mha(), pools.mha()
    storage = attach(kv, beside={PoolName.DRAFT: draft})
    store(storage, kv)
    pools.wipe(draft, STORED)
    given = storage.batch_get_v2([transfer(PoolName.DRAFT, draft, hashes(), STORED)])
    assert given == {PoolName.DRAFT: [False] * 8}
    assert all(pools.is_blank(draft, page) for page in STORED)


def test_block_groups_gate_no_hit(attach: Attach) -> None:
    storage, _, _ = stored_states(attach)
    asked = PoolTransfer(PoolName.MAMBA, keys=["__a__"], hit_policy=GROUPS)
    result = storage.batch_exists_v2(hashes(), [asked])
    assert (result.kv_hit_pages, result.extra_pool_hit_pages) == (8, {PoolName.KV: 8})


def test_damaged_state_misses(attach: Attach, tmp_path: Path) -> None:
    storage, _, states = stored_states(attach, 7)
    storage.close()
    only = min(files(tmp_path / "root"), key=lambda path: path.stat().st_size)
    data = bytearray(only.read_bytes())
    data[50] ^= 1
    only.write_bytes(data)
    again = attach(pools.mha(), beside={PoolName.MAMBA: states})
    pools.wipe(states, range(3))
    wanted = transfer(PoolName.MAMBA, states, [hashes()[7]], range(2, 3))
    assert again.batch_get_v2([wanted]) == {PoolName.MAMBA: [False]}
    assert pools.is_blank(states, 2)


def test_states_belong_to_a_rank(attach: Attach) -> None:
    kv, states = pools.mla(), pools.mamba()
    writer = attach(kv, beside={PoolName.MAMBA: states}, is_mla_model=True, tp_size=2, tp_rank=0)
    store(writer, kv)
    pools.fill(states, range(1))
    writer.batch_set_v2([transfer(PoolName.MAMBA, states, hashes(1), range(1))])
    writer.close()
    reader = attach(kv, beside={PoolName.MAMBA: states}, is_mla_model=True, tp_size=2, tp_rank=1)
    assert load(reader, kv) == [True] * 8
    wanted = transfer(PoolName.MAMBA, states, hashes(1), range(2, 3))
    assert reader.batch_get_v2([wanted]) == {PoolName.MAMBA: [False]}


def test_unstorable_pool_misses(attach: Attach, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    class Unaddressable:
        page_size, layout = 1, "odd"

        def get_page_buffer_meta(self, indices: torch.Tensor) -> None:
            raise ValueError("Unsupported layout: odd")

    kv = pools.mha()
    storage = attach(kv, settings(tmp_path), beside={PoolName.SWA: Unaddressable()})
    assert "host pool swa" in caplog.text
    assert "Unsupported layout: odd" in caplog.text
    store(storage, kv)
    asked = PoolTransfer(PoolName.SWA, keys=["__a__"], hit_policy=TRAILING)
    assert storage.batch_exists_v2(hashes(), [asked]).kv_hit_pages == 0
    assert storage.batch_exists(hashes()) == 8


def test_pool_over_ranks_is_refused(attach: Attach, tmp_path: Path) -> None:
    pool = pools.mha()
    pool.shard_size = 2  # Like SGLang's PageInterleaveHostPool, whose indices reach beyond a rank's memory.
    with pytest.raises(ConfigError, match="remove --enable-kv-cache-sharding"):
        attach(pool, settings(tmp_path))


def test_draft_with_heads_is_named(attach: Attach, caplog: pytest.LogCaptureFixture) -> None:
    kv, draft = pools.mla(), pools.mha()
    storage = attach(kv, beside={PoolName.DRAFT: draft}, is_mla_model=True, tp_size=2, tp_rank=0)
    assert "nothing of host pool draft is stored" in caplog.text
    assert "--tp-size 1" in caplog.text
    assert storage.batch_set_v2([transfer(PoolName.DRAFT, draft, hashes(), STORED)]) == {
        PoolName.DRAFT: [False] * 8
    }
    caplog.clear()
    attach(kv, beside={PoolName.DRAFT: draft}, is_mla_model=True)
    assert "nothing of host pool" not in caplog.text


def test_any_pool_fault_misses(
    attach: Attach, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv, window = pools.mha(), pools.mha(heads=1)
    storage = attach(kv)

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("kvtier_sglang.storage.PageStore", fail)
    storage.register_mem_host_pool_v2(window, PoolName.SWA)
    assert "nothing of host pool swa is stored" in caplog.text
    assert "OSError: no space left" in caplog.text
    assert store(storage, kv) == [True] * 8
    asked = PoolTransfer(PoolName.SWA, keys=["__a__"], hit_policy=TRAILING)
    assert storage.batch_exists_v2(hashes(), [asked]).kv_hit_pages == 0


def test_ungating_pools_are_not_asked(attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, _, _ = stored_states(attach)
    asked: list[object] = []
    locate = TieringManager.locate

    async def noted(manager: TieringManager, keys: Sequence[OffloadKey]) -> list[bool]:
        asked.append(manager)
        return await locate(manager, keys)

    monkeypatch.setattr(TieringManager, "locate", noted)
    storage.batch_exists_v2(hashes(), [PoolTransfer(PoolName.MAMBA, keys=["__a__"], hit_policy=GROUPS)])
    assert len(asked) == 1
