"""A manager's metrics in prometheus_client's registry: the catalogue's names, from any thread."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest

from kvtier import (
    Identity,
    KVCaches,
    PageRef,
    TieringConfig,
    TieringManager,
    open_manager,
    pack_key,
    prometheus_collector,
)
from kvtier._telemetry.catalogue import BYTES, COUNTERS, GAUGES
from kvtier_tools import top
from tests.common import PATIENCE_S

KEYS = [pack_key(bytes([number]) * 32) for number in range(8)]
CONFIG = TieringConfig.from_mapping({"cpu_bytes_to_use": "1MiB", "secondary_tiers": [{"type": "dummy"}]})


@pytest.fixture
def manager() -> TieringManager:
    """A manager that is not open yet: its constructor looks for installed tiers."""
    pages = torch.zeros((32, 4096), dtype=torch.int8)
    return open_manager(CONFIG, Identity.make("model", {}), KVCaches((pages,), ((PageRef(0, 4096),),)))


async def test_top_reads_what_a_manager_exports(manager: TieringManager, tmp_path: Path) -> None:
    registry = CollectorRegistry()
    async with manager:
        registry.register(prometheus_collector(manager))
        await manager.store(KEYS, range(8))
        await manager.drain_puts()
        assert await manager.load([*KEYS, pack_key(b"x" * 32)], range(8, 17)) == 8
        text = await asyncio.to_thread(generate_latest, registry)  # as its server does
        exported = {metric.name for metric in registry.collect()}
    assert {"kvtier_stored_chunks", "kvtier_tier_up", "vllm:kv_offload_tiering_write_bytes"} <= exported
    known = {metric.name for table in (COUNTERS, BYTES, GAUGES) for metric in table.values()}
    assert exported <= known
    await asyncio.to_thread(_require_top_reads, tmp_path / "metrics", text)


def _require_top_reads(page: Path, text: bytes) -> None:
    page.write_bytes(text)
    (view,) = top._views([str(page)], {})
    assert (view.error, view.misses) == (None, {"absent": 1})
    assert [(tier.tier, tier.is_up) for tier in view.tiers] == [("cpu", None), ("dummy", True)]
    assert view.tiers[0].used_bytes == 8 * 4096


@pytest.mark.blocking(reason="the program blocks its event loop")
async def test_a_blocked_loop_leaves_the_last_values(manager: TieringManager) -> None:
    registry = CollectorRegistry()
    async with manager:
        registry.register(prometheus_collector(manager))
        await manager.store(KEYS, range(8))
        assert registry.get_sample_value("kvtier_stored_chunks_total") == 8
        with ThreadPoolExecutor() as pool:
            reading = pool.submit(registry.get_sample_value, "kvtier_stored_chunks_total")
            assert reading.result(PATIENCE_S) == 8  # this blocks the loop, so the loop cannot answer
