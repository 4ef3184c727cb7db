"""The installed engine is what the adapter takes it to be: each name, parameter, field and hook."""

from __future__ import annotations

import pkgutil

import pytest

pytest.importorskip("vllm")

import kvtier.adapters.vllm
from tests.integration.contract import Terms, misses
from tests.integration.harness import vllm_release

pytestmark = pytest.mark.releases

TOOLS = frozenset({"bench", "demo", "engines", "native", "startup"})
"""Modules beside the adapter, which measure or show it."""

_BASE = "vllm.v1.kv_offload.base"
_CONFIG = "vllm.v1.kv_offload.config"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector.OffloadingConnector"
_RECORDS = (
    *("CanonicalKVCacheRef", "CanonicalKVCacheTensor", "CanonicalKVCaches"),
    *("OffloadingEvent", "OffloadingKVEventsConfig", "PrepareStoreOutput", "ReqContext"),
    *("RequestOffloadingContext", "ScheduleEndContext", "TransferResult"),
)

TERMS = Terms(
    since={
        f"{_BASE}.OffloadingManager.config_info": (0, 33),
        f"{_BASE}.OffloadingManager.get_load_source": (0, 32),
        f"{_BASE}.OffloadingManager.on_reset_flushed": (0, 33),
        f"{_BASE}.OffloadingSpec.config_info_keys": (0, 33),
        f"{_BASE}.OffloadingWorker.submit_load.expedited": (0, 33),
        "vllm.v1.metrics.cache_hit_source.CacheHitSource": (0, 32),
    },
    also=[f"{_CONNECTOR}.__init__(vllm_config, kv_cache_config)"],  # looked for in the callers' frames
    hooks=[f"{_BASE}.OffloadingManager", f"{_BASE}.OffloadingSpec", f"{_BASE}.OffloadingWorker"],
    complete=[
        *(f"{_BASE}.{name}" for name in _RECORDS),
        *(f"{_CONFIG}.Offloading{name}Config" for name in ("", "Cache", "Group", "Model", "Parallel")),
    ],
    left={
        f"{_BASE}.OffloadingEvent.metadata_only": "vLLM's own manager announces before it has allocated",
        f"{_BASE}.OffloadingManager.lock": "the manager is entered by one thread",
        f"{_BASE}.OffloadingManager.touch": "a lookup touches",
        f"{_BASE}.ReqContext.kv_hints": "what they say is not used yet",
        f"{_BASE}.ReqContext.kv_transfer_params": "vLLM itself reads what concerns kvtier",
        f"{_BASE}.RequestOffloadingContext.policy": "each request has the default one",
        f"{_CONFIG}.OffloadingConfig.enable_kv_cache_events": "the spec has it as kv_events_config",
        f"{_CONFIG}.OffloadingConfig.replicated_layout": "each worker keeps its own bytes, equal or not",
        f"{_CONFIG}.OffloadingGroupConfig.sliding_window_size_in_chunks": "the group's spec tells it",
        f"{_CONFIG}.OffloadingModelConfig.max_model_len": "the bytes do not depend on it",
        f"{_CONFIG}.OffloadingParallelConfig.data_parallel_index": "replicas have the same bytes",
        f"{_CONFIG}.OffloadingParallelConfig.data_parallel_rank_local": "replicas have the same bytes",
        f"{_CONFIG}.OffloadingParallelConfig.data_parallel_size": "replicas have the same bytes",
    },
    own=["fail_loads", "report_failed_loads", "take_failed_requests"],  # the connector's
)


def test_nothing_that_the_adapter_relies_on_has_moved() -> None:
    found = misses(_modules(tools=False), "vllm", vllm_release(), TERMS)
    assert not found, "\n".join(found)


def test_nothing_that_the_tools_rely_on_has_moved() -> None:
    found = misses(_modules(tools=True), "vllm", vllm_release(), Terms(since=TERMS.since))
    assert not found, "\n".join(found)


def _modules(*, tools: bool) -> list[str]:
    package = kvtier.adapters.vllm
    return [
        f"{package.__name__}.{name}"
        for _, name, _ in pkgutil.iter_modules(package.__path__)
        if (name in TOOLS) is tools
    ]
