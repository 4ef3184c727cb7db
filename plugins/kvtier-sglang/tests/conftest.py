"""Fixtures: SGLang's factory creates the storage, as in an engine, over files in the test's folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pools  # Imported first, because it makes SGLang's modules importable.
import pytest
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.storage import StorageBackendFactory

Attach = Callable[..., Any]


def settings(root: Path | None = None, **kvtier: object) -> dict[str, object]:
    """Return an extra config as a user writes it."""
    tier = {"type": "fs", "root_dir": str(root), "max_bytes": "64MiB", "min_free_bytes": 0, "n_threads": 2}
    given = {
        "cpu_bytes_to_use": "1MiB",
        "isolation": "thread",
        "namespace": "tests",
        "request_deadline_s": 60.0,
        "drain_on_shutdown_s": 60.0,  # The next storage must find the pages that this one has put.
        "secondary_tiers": [{**tier, "deadline_s": 60.0}],
    }
    return {
        "backend_name": "kvtier",
        "module_path": "kvtier_sglang",
        "class_name": "KVTierStorage",
        "interface_v1": 1,
        "kvtier": {**given, **kvtier},
    }


def storage_config(extra: dict[str, object], **changes: Any) -> HiCacheStorageConfig:
    """Return the description of engine and rank that SGLang passes to a storage."""
    given = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "enable_storage_metrics": True, "is_page_first_layout": True,
        "model_name": "org/model",
    }  # fmt: skip
    return HiCacheStorageConfig(**{**given, **changes}, extra_config=extra)


@pytest.fixture
def attach(tmp_path: Path) -> Iterator[Attach]:
    """Create a storage and register its pools, as SGLang does; close it at the end."""
    made: list[Any] = []

    def start(
        pool: Any = None,
        extra: dict[str, object] | None = None,
        beside: dict[str, Any] | None = None,
        **rank: Any,
    ) -> Any:
        config = storage_config(extra or settings(tmp_path / "root"), **rank)
        storage = StorageBackendFactory.create_backend("dynamic", config, pool)
        made.append(storage)
        storage.register_mem_pool_host(pools.mha() if pool is None else pool)
        for name, other in (beside or {}).items():
            storage.register_mem_host_pool_v2(other, name)
        storage.on_host_pools_registered()
        return storage

    yield start
    for storage in made:
        storage.close()
