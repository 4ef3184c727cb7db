"""``kvtier size`` computes a model's KV cache as vLLM does: groups, blocks and bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, UniformTypeKVCacheSpecs
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

from kvtier_tools.size.model_shape import read_config, shape_of
from tests.integration.test_models import (
    FALCON_H1_MODEL,
    GEMMA4_MODEL,
    GEMMA_MODEL,
    GPT_OSS_MODEL,
    LFM2_MODEL,
    LLAMA4_MODEL,
    LLAMA_MODEL,
    MLA_MODEL,
    QWEN3_NEXT_MODEL,
)

BLOCK_TOKENS = 32


@pytest.fixture(scope="module", autouse=True)
def _one_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    meeting = tmp_path_factory.mktemp("workers") / "meeting"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    with set_current_vllm_config(
        EngineArgs(model=str(_made(meeting.parent, LLAMA4_MODEL))).create_engine_config()
    ):
        init_distributed_environment(1, 0, f"file://{meeting}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    yield
    destroy_model_parallel()
    destroy_distributed_environment()


def _made(folder: Path, model: tuple[str, str, Mapping[str, Any]]) -> Path:
    """Write a model's config.json and return its folder."""
    kind, architecture, fields = model
    config = getattr(transformers, kind)(**fields, architectures=[architecture], dtype="bfloat16")
    config.save_pretrained(folder / kind)
    return folder / kind


def groups_of_vllm(folder: Path, dtype: str) -> list[KVCacheGroupSpec]:
    """Return a model's groups in an engine; the weights take no memory."""
    arguments: dict[str, Any] = {"kv_cache_dtype": dtype, "block_size": BLOCK_TOKENS, "max_model_len": 1024}
    if "DeepseekV2" in folder.name:
        arguments["block_size"] = 16
    config = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, enable_prefix_caching=True, **arguments
    ).create_engine_config()
    config.cache_config.kv_cache_layout = "LBNHC"  # the value that an engine resolves on the CPU
    config.cache_config.mamba_ssm_cache_dtype = "auto"  # CPUs with instructions for bfloat16 have float32
    with set_current_vllm_config(config):
        initialize_model(config)
        current_platform.update_block_size_for_backend(config)
        return get_kv_cache_groups(config, get_kv_cache_spec(config))


def page_bytes(group: KVCacheGroupSpec) -> int:
    """Return the bytes of a group's block over all of its layers."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return spec.page_size_bytes
    return spec.page_size_bytes * len(group.layer_names)


@pytest.mark.parametrize(
    "model",
    [
        LLAMA_MODEL,
        GEMMA_MODEL,
        GEMMA4_MODEL,
        GPT_OSS_MODEL,
        LLAMA4_MODEL,
        MLA_MODEL,
        FALCON_H1_MODEL,
        QWEN3_NEXT_MODEL,
        LFM2_MODEL,
    ],
    ids=lambda model: model[0],
)
def test_the_cache_is_as_vllm_makes_it(tmp_path: Path, model: tuple[str, str, Mapping[str, Any]]) -> None:
    folder = _made(tmp_path, model)
    theirs = groups_of_vllm(folder, "auto")
    tokens = 16 if model is MLA_MODEL else BLOCK_TOKENS
    ours = shape_of(read_config(str(folder)), 1, "auto", tokens)
    assert sorted((group.layers * group.page_bytes, group.block_tokens) for group in ours.groups) == sorted(
        (page_bytes(group), group.kv_cache_spec.block_size) for group in theirs
    )
