"""The installed engine has the hooks, parameters and records that the adapter expects.

Importing the adapter shows that imports resolve; the engine tests show that attributes exist.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Mapping, Set
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload import base, config

import kvtier.adapters.vllm
from kvtier.adapters.vllm._manager import KVTierManager
from kvtier.adapters.vllm._worker import KVTierWorker
from kvtier.adapters.vllm.connector import KVTierConnector
from kvtier.adapters.vllm.spec import KVTierOffloadingSpec
from kvtier.errors import ConfigError
from tests.integration.harness import vllm_release

pytestmark = pytest.mark.releases

HOOKS = {
    base.OffloadingManager: KVTierManager,
    base.OffloadingSpec: KVTierOffloadingSpec,
    base.OffloadingWorker: KVTierWorker,
}
SINCE = {
    "OffloadingManager.config_info": (0, 33),
    "OffloadingManager.get_load_source": (0, 32),
    "OffloadingManager.on_reset_flushed": (0, 33),
    "OffloadingSpec.config_info_keys": (0, 33),
    "OffloadingWorker.submit_load.expedited": (0, 33),
}
"""Hooks and parameters that the adapter defines for later releases, with the first release that has them."""

NOT_DEFINED = {
    "OffloadingManager.lock": "the manager is entered by one thread",
    "OffloadingManager.touch": "a lookup touches",
}
OWN = {
    *(
        "fail_loads",
        "fail_stores",
        "is_audited",
        "on_new_weights",
        "report_failed_loads",
        "response_params",
        "restart",
        "resume",
    ),
    *("suspend", "take_failed_requests"),
}
"""Methods for ``KVTierConnector``."""

USED: Mapping[type, str] = {
    base.CanonicalKVCacheRef: "tensor_idx page_size_bytes mapping",
    base.CanonicalKVCacheTensor: "tensor page_size_bytes",
    base.CanonicalKVCaches: "tensors group_data_refs",
    base.OffloadingEvent: "keys medium removed locality ownership removal_expected",
    base.OffloadingKVEventsConfig: "enable_kv_cache_events self_describing_kv_events",
    base.PrepareStoreOutput: "keys_to_store store_spec evicted_keys",
    base.ReqContext: "req_id kv_transfer_params kv_hints load_tier_filter",
    base.RequestOffloadingContext: "policy",
    base.ScheduleEndContext: "new_req_ids preempted_req_ids",
    base.TransferResult: "job_id success transfer_size transfer_time",
    config.OffloadingCacheConfig: "tokens_per_hash blocks_per_chunk",
    config.OffloadingConfig: "groups worker_kv_bytes_per_block extra_config engine_id model cache parallel "
    "canonical_layout kv_cache_layout enable_kv_cache_events",
    config.OffloadingGroupConfig: "tokens_per_block layer_names group_id",
    config.OffloadingModelConfig: "name dtype",
    config.OffloadingParallelConfig: "rank world_size tp_size pp_size pcp_size dcp_size "
    "data_parallel_index is_parallelism_agnostic",
}
"""The fields of vLLM's records that the adapter uses."""

UNUSED = {
    "OffloadingEvent.metadata_only": "vLLM's own manager announces before it has allocated",
    "OffloadingConfig.replicated_layout": "each worker keeps its own bytes, equal or not",
    "OffloadingGroupConfig.sliding_window_size_in_chunks": "computed as vLLM does, for the chosen chunks",
    "OffloadingModelConfig.max_model_len": "the bytes do not depend on it",
    "OffloadingParallelConfig.data_parallel_rank_local": "replicas have the same bytes",
    "OffloadingParallelConfig.data_parallel_size": "replicas have the same bytes",
}
"""Fields of some releases that the adapter omits on purpose."""


def test_adapter_modules_import() -> None:
    for _, name, _ in pkgutil.iter_modules(kvtier.adapters.vllm.__path__):
        importlib.import_module(f"kvtier.adapters.vllm.{name}")


@pytest.mark.parametrize("theirs", HOOKS, ids=lambda kind: kind.__name__)
def test_hooks_are_defined_or_excluded(theirs: type) -> None:
    ours, hooks = _methods(HOOKS[theirs]), _methods(theirs)
    assert {
        name for name in hooks.keys() - ours.keys() if f"{theirs.__name__}.{name}" not in NOT_DEFINED
    } == set()
    assert {name for name in ours.keys() - hooks.keys() - OWN if not _comes_later(theirs, name)} == set()
    for name in hooks.keys() & ours.keys():
        expected, found = _parameters(hooks[name]), _parameters(ours[name])
        added = [one for one in found if one not in expected]
        assert [one for one in found if one in expected] == expected, f"{theirs.__name__}.{name}"
        assert [one for one in added if not _comes_later(theirs, f"{name}.{one}")] == []


def _methods(kind: type) -> dict[str, object]:
    return {
        name: member
        for name, member in vars(kind).items()
        if isinstance(member, staticmethod | classmethod | property) or inspect.isfunction(member)
        if not name.startswith("_")
    }


def _parameters(member: Any) -> list[str]:
    function = getattr(member, "__func__", getattr(member, "fget", member))
    return [*inspect.signature(function).parameters]


def _comes_later(kind: type, name: str) -> bool:
    return vllm_release() < SINCE.get(f"{kind.__name__}.{name}", (0, 0))


@pytest.mark.parametrize("record", USED, ids=lambda record: record.__name__)
def test_record_fields_are_known(record: type) -> None:
    there, used = _fields(record), set(USED[record].split())
    assert used <= there
    assert {name for name in there - used if f"{record.__name__}.{name}" not in UNUSED} == set()


def _fields(record: Any) -> Set[str]:
    if dataclasses.is_dataclass(record):
        return {field.name for field in dataclasses.fields(record) if field.init}
    return set(record._fields)


def test_connector_takes_named_arguments() -> None:
    """The adapter looks for them in its callers' frames."""
    assert {"vllm_config", "kv_cache_config"} <= {*_parameters(OffloadingConnector.__init__)}


def test_wrong_settings_end_an_engine_before_it_loads_the_model() -> None:
    """vLLM asks a connector for this while it builds the configuration of an engine with CUDA graphs."""
    assert "connector_cls.requires_piecewise_for_cudagraph(" in inspect.getsource(VllmConfig)
    ask = KVTierConnector.requires_piecewise_for_cudagraph
    assert not ask({"spec_name": "KVTierOffloadingSpec", "cpu_bytes_to_use": "1GiB"})
    with pytest.raises(ConfigError, match="cpu_byte_to_use"):
        ask({"spec_name": "KVTierOffloadingSpec", "cpu_byte_to_use": "1GiB"})
