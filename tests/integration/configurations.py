"""Real engine configurations, built as an engine builds them, without starting one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

from kvtier import Identity, TieringConfig
from kvtier.adapters.vllm._compat import EngineContext
from kvtier.adapters.vllm._identity import engine_identity
from kvtier.adapters.vllm._parallel import slot_shape

LAYERS = 2
_SIZES = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0] * 16,
    "long_factor": [4.0] * 16,
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "longrope": {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "rope_scaling": _LONGROPE,
        "original_max_position_embeddings": 1024,
        "max_position_embeddings": 4096,
    },
    "dynamic": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
    },
    "yarn": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
    },
    "llama4": {
        "model_type": "llama4_text",
        "architectures": ["Llama4ForCausalLM"],
        "head_dim": 32,
        "num_local_experts": 2,
        "intermediate_size_mlp": 128,
        "max_position_embeddings": 131072,
    },
    "mixtral": {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    },
}


def make_model(directory: Path, name: str = "llama", **fields: object) -> Path:
    """Write the files of a configuration: ``config.json`` and a weights file that is never loaded."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({**_SIZES, **MODELS[name], **fields}))
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    return directory


def configure(model: Path, extra: Mapping[str, Any] | None = None, **arguments: Any) -> VllmConfig:
    """Return the configuration that an engine would have."""
    settings = {"spec_name": "KVTierOffloadingSpec", **(extra or {})}
    defaults: dict[str, Any] = {"dtype": "float32", "block_size": 32, "skip_tokenizer_init": True}
    arguments = {"model": str(model), "max_model_len": 1024, **defaults, **arguments}
    config = EngineArgs(**arguments).create_engine_config()
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=settings
    )
    return config


def engine_of(config: VllmConfig) -> EngineContext:
    """Return what a spec sees of an engine with this configuration, whose layers all have the same layout."""
    spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32)
    layers = [f"layers.{number}" for number in range(LAYERS)]
    page = spec.page_size_bytes
    tensors = [
        KVCacheTensor(size=page * 8, layers=[layer], layer_stride=0, block_stride=page) for layer in layers
    ]
    return EngineContext(config, KVCacheConfig(8, tensors, [KVCacheGroupSpec(layers, spec)]))


def identity_of(config: VllmConfig, namespace: str = "", page_format: int = 1, **settings: Any) -> Identity:
    """Return the identity of the cache of an engine with this configuration, page layout and settings."""
    engine = engine_of(config)
    offloading = build_offloading_config(config, engine.kv_cache_config)
    ours = TieringConfig(cpu_bytes_to_use=1, namespace=namespace, **settings)
    return engine_identity(offloading, engine, slot_shape(offloading, engine), ours, [page_format] * 2)
