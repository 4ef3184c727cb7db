"""Steps in which requests decode: their cost for the scheduler's thread, in calls, beside vLLM's tiering."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.kv_offload.base import ScheduleEndContext
from vllm.v1.outputs import KVConnectorOutput

from kvtier.adapters.vllm.connector import KVTierConnector
from kvtier_bench.managers import core as bench
from kvtier_bench.managers.vllm import open_vllm
from tests.integration.test_layouts import FULL, Cache, Case
from tests.integration.test_wrong_tables import a_request

pytestmark = pytest.mark.integration

NOTHING = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())
SLOTS = 9_000


def calls_in(act: Callable[[], object]) -> int:
    """Return how many functions ``act`` calls, those in C included."""
    count = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("tier", ["none", "memory"])
def test_idle_step_costs_half_of_vllm_tiering(tier: str, tmp_path: Path) -> None:
    def step(manager: Any) -> None:
        manager.on_schedule_end(NOTHING)
        manager.get_stats()
        list(manager.take_events())

    case = bench.Case("lhd", tier, SLOTS, 1)
    with ExitStack() as stack:
        ours = bench._open_kvtier(case, stack)._manager
        theirs = open_vllm("lru", "memory", SLOTS, bench.CHUNK_BYTES, tmp_path)
        stack.callback(theirs.close)
        for manager in (ours, theirs._manager):
            step(manager)  # the first one publishes all gauges
        assert 2 * calls_in(lambda: step(ours)) < calls_in(lambda: step(theirs._manager))
        assert ours.get_stats() is None


@pytest.fixture
def connector() -> Iterator[KVTierConnector]:
    cache = Cache(Case([(FULL, 2)]), 1)
    cache.register()
    init_none_hash(sha256)
    config, transfer = cache.vllm_config, cache.vllm_config.kv_transfer_config
    config.speculative_config, transfer.kv_load_failure_policy = None, "recompute"
    transfer.kv_connector_extra_config["spec_name"] = "KVTierOffloadingSpec"
    connector = KVTierConnector(config, KVConnectorRole.SCHEDULER, cache.config)
    yield connector
    connector.shutdown()
    cache.connector.shutdown()


def test_checks_of_connector_cost_nothing_for_each_request(connector: KVTierConnector) -> None:
    names: list[str] = []

    def output(new: tuple[str, ...] = ()) -> Any:
        return SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=name, block_ids=([1],)) for name in new],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=names, new_block_ids=[None] * len(names), resumed_req_ids=set()
            ),
            num_scheduled_tokens=dict.fromkeys([*names, *new], 1),
            finished_req_ids=set(),
            preempted_req_ids=set(),
            kv_cache_block_copies=None,
            kv_connector_block_state=SimpleNamespace(boundary_state_offloads={}),
        )

    def added_calls(running: int) -> int:
        """Return how many calls this connector adds to those of vLLM's when requests decode."""
        for number in range(len(names), running):
            request = a_request(f"r{number}")
            connector.on_new_request(request)
            connector.get_num_new_matched_tokens(request, 0)
            connector.build_connector_meta(output((request.request_id,)))
            names.append(request.request_id)
        theirs = calls_in(lambda: connector.scheduler.build_connector_meta(output()))
        return calls_in(lambda: connector.build_connector_meta(output())) - theirs

    assert added_calls(1) == added_calls(32) <= 6


def test_step_without_reports_calls_nothing_more(connector: KVTierConnector) -> None:
    assert calls_in(lambda: connector.update_connector_output(KVConnectorOutput())) <= 4
