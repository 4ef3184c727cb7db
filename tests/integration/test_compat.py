"""Versions: kvtier refuses old ones, warns about unknown ones and isolates them; a spec finds its engine."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.kv_offload.config import OffloadingGroupConfig

from kvtier.adapters.vllm._compat import (
    EngineContext,
    engine_context,
    is_reviewed,
    kv_format,
    providing_engine,
    refuse_too_old,
    release,
    warn_if_untested,
)
from kvtier.errors import ConfigError
from tests.integration.conftest import from_vllm

pytestmark = pytest.mark.releases


@pytest.mark.parametrize(
    ("version", "number", "is_tested", "is_known"),
    [
        ("0.31.0", (0, 31), True, True),
        ("0.32.0+cpu", (0, 32), True, True),
        ("0.33.0rc1", (0, 33), True, False),
        ("0.33.1", (0, 33), True, False),
        ("0.34.0.dev12+g1a2b3c4d5", (0, 34), False, False),
        ("1.0.0", (1, 0), False, False),
        ("dev", None, False, False),  # a build from sources without tags
        ("0.1.dev5+g1a2b3c4d5", None, False, False),
        ("0.1.0.dev5+g1a2b3c4d5", None, False, False),
    ],
)
def test_untested_version_is_separate(
    caplog: pytest.LogCaptureFixture,
    version: str,
    number: tuple[int, int] | None,
    is_tested: bool,
    is_known: bool,
) -> None:
    assert release(version) == number
    refuse_too_old(version)
    warn_if_untested(version)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [version in warning for warning in warnings] == [True] * (not is_tested)
    assert is_reviewed(version) is is_known
    llama = ["LlamaForCausalLM"]
    known = {kv_format(llama, "0.33.0"), kv_format(llama, "0.34.0.dev12+g000000000")}
    assert (kv_format(llama, version) in known) is is_known


@pytest.mark.parametrize(
    ("architectures", "is_shared"),
    [
        (["LlamaForCausalLM"], True),
        (["LlamaForCausalLM", "Eagle3LlamaForCausalLM"], True),
        (["K2HorizonForCausalLM"], False),  # its keys' channels have another order since 0.32
        (["LlamaForCausalLM", "ModelOfNobody"], False),
    ],
)
def test_releases_share_reviewed_models(architectures: list[str], is_shared: bool) -> None:
    first, second = kv_format(architectures, "0.31.0"), kv_format(architectures, "0.33.0+cpu")
    assert (first == second) is is_shared
    assert second == kv_format(architectures, "0.33.0+cu130")


@pytest.mark.parametrize("version", ["0.30.2", "0.9.2"])
def test_old_version_names_range(version: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        refuse_too_old(version)
    words = [version, "0.31", "0.33"]
    assert [word for word in words if word not in str(refusal.value)] == []


def test_connector_passes_engine() -> None:
    engine = EngineContext(object(), object())
    with providing_engine(engine):
        assert engine_context() is engine
    with pytest.raises(ConfigError, match="use KVTierConnector"):
        engine_context()


@pytest.mark.parametrize(
    ("second_runner", "zeroes", "lengths", "sparse", "late"),
    [
        (True, False, [16], None, False),
        (True, False, [16, 16], None, False),
        (True, True, [16], None, True),
        (True, False, [16, 64], None, True),
        (True, False, [16], object(), True),
        (False, True, [16, 64], object(), False),
    ],
)
def test_writes_before_stores_end(
    second_runner: bool, zeroes: bool, lengths: list[int], sparse: object, late: bool
) -> None:
    groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=length)) for length in lengths]
    vllm: Any = SimpleNamespace(
        use_v2_model_runner=second_runner, attention_config=SimpleNamespace(hisparse_config=sparse)
    )
    cache: Any = SimpleNamespace(needs_kv_cache_zeroing=zeroes, kv_cache_groups=groups)
    assert EngineContext(vllm, cache).flushes_late is late


def test_engine_is_found_among_callers() -> None:
    found: list[EngineContext] = []

    def connector(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        found.append(engine_context())

    its, cache = object.__new__(VllmConfig), KVCacheConfig(1, [], [])
    connector(its, cache)
    assert found == [EngineContext(its, cache)]
    assert found[0].has_blocks(), "unknown"


@from_vllm((0, 33), "does not state windows in chunks")
@pytest.mark.parametrize(("blocks", "window"), [(1, 8), (2, 4), (16, 1)])
def test_windows_follow_chunk_size(blocks: int, window: int) -> None:
    """vLLM counted them in chunks of one block, before kvtier chose the chunk size."""
    block: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    specs = [FullAttentionSpec(**block), SlidingWindowSpec(**block, sliding_window=128)]
    groups = [KVCacheGroupSpec([str(spec)], spec) for spec in specs]
    engine = EngineContext(object.__new__(VllmConfig), KVCacheConfig(1, [], groups))
    given = [OffloadingGroupConfig(16, ("layer",), group) for group in range(2)]
    chosen: list[Any] = [engine.with_chunks(group, blocks) for group in given]
    assert [group.sliding_window_size_in_chunks for group in chosen] == [None, window]
