"""The identity of an engine's KV cache: all that the bytes of a block depend on besides its tokens."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import vllm
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec
from vllm.v1.kv_offload.config import OffloadingConfig

from kvtier.adapters.vllm.compat import EngineContext, hash_seed
from kvtier.adapters.vllm.parallel import SlotShape, pipeline_stages, total_kv_heads
from kvtier.errors import IdentityError
from kvtier.identity import Identity, canonical, canonical_dtype

logger = logging.getLogger("kvtier.vllm")

_NOT_THE_MODEL = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype"})
_NOT_THE_BYTES = frozenset({"block_stride_alignment"})  # of a spec: how far apart blocks are on the device
_OF_ONE_WORKER = frozenset({"num_kv_heads", "num_head_slots", "max_tp_shards", "page_size_padded"})
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.tensors")
_SAMPLES = 1024
_SAMPLE_BYTES = 4096


def engine_identity(
    config: OffloadingConfig, engine: EngineContext, shape: SlotShape, namespace: str
) -> Identity:
    """Spell out the identity of the KV cache of this engine.

    Where slots hold canonical pages, all is spelled as a single worker would have it. Else the parallel
    layout is a part: nothing is shared that is not proven to have the same bytes.

    Args:
        config: what vLLM gives an offloading spec.
        engine: the engine's own configuration, for what ``config`` lacks.
        shape: what a slot holds.
        namespace: the user's own part, for what no engine knows, such as adapters that were replaced.
    """
    vllm_config = engine.vllm_config
    return Identity.make(
        config.model.name,
        {
            "namespace": namespace,
            "engine": {"name": "vllm", "version": vllm.__version__.split("+")[0]},
            "device": current_platform.device_type,
            "weights": _weights(vllm_config),
            "kv_cache": _kv_cache(config, engine, shape),
            "parallel": _parallel(config, engine, shape),
            "hash": _hash(vllm_config),
            "lora": vllm_config.lora_config is not None,
            "speculative": _speculative(vllm_config),
        },
    )


def _weights(vllm_config: VllmConfig) -> Mapping[str, object]:
    model = vllm_config.model_config
    return {
        # A hub's revision is a name that moves, such as "main"; vLLM notes beside it what it stands for.
        "revision": getattr(model.revision, "resolved", model.revision),
        "files": weights_fingerprint(Path(model.model)),
        "config": _digest(model.hf_config.to_dict()),
        "dtype": canonical_dtype(str(model.dtype)),
        "quantization": model.quantization,
        "load_format": str(vllm_config.load_config.load_format),
        "seed": model.seed if str(vllm_config.load_config.load_format) == "dummy" else None,
    }


def weights_fingerprint(model: Path) -> str | None:
    """Return a digest of a model's weight files: their names, sizes and samples of their bytes.

    A model that was replaced at the same path must not be given the old one's chunks. Up to 1,024
    evenly spread samples of 4 KiB are read from each file, some milliseconds of work; a change that
    touches less than about half a percent of a file can go unseen, which is what the setting
    ``namespace`` is for.

    Args:
        model: the directory that holds them, or the one file that is all of the model.

    Returns:
        The digest; None where there is neither: then the revision names the weights.
    """
    digest = hashlib.sha256()
    if model.is_file():
        _add_samples(digest, model)
    elif model.is_dir():
        for pattern in _WEIGHT_FILES:
            for path in sorted(model.glob(pattern)):
                _add_samples(digest, path)
    else:
        return None
    return digest.hexdigest()[:32]


def _add_samples(digest: hashlib._Hash, path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"{path.name}\0{size}\0".encode())
    step = max(_SAMPLE_BYTES, size // _SAMPLES)
    with path.open("rb", buffering=0) as file:
        for offset in range(0, size, step):
            digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, offset))


def _kv_cache(config: OffloadingConfig, engine: EngineContext, shape: SlotShape) -> Mapping[str, object]:
    spell = partial(_canonical_spec, engine) if shape.is_canonical else spec_fields
    per_block = "bytes_per_block" if shape.is_canonical else "bytes_per_block_and_worker"
    return {
        "dtype": canonical_dtype(config.model.dtype),
        # Of layers that differ in a group the scheduler sees the first one's spec.
        "layers_not_quantized": list(engine.vllm_config.cache_config.kv_cache_dtype_skip_layers),
        "layout": config.kv_cache_layout,
        per_block: shape.bytes_per_block,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "tokens_per_hash": config.cache.tokens_per_hash,
        "groups": [
            {
                "id": group.group_id,
                "tokens_per_block": group.tokens_per_block,
                "layers": list(group.layer_names),
                "spec": spell(engine.spec_of(group.group_id)),
            }
            for group in config.groups
        ],
    }


def spec_fields(spec: KVCacheSpec) -> Mapping[str, object]:
    """Spell out how the blocks of one KV cache group are laid out: the kind and all fields that are set.

    The fields are those that the spec has, and not a list of ours: one that a new version of vLLM adds
    tells caches apart from its first day.
    """
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    told = {name: value for name, value in fields.items() if name not in _NOT_THE_BYTES and value is not None}
    return {"kind": type(spec).__name__, **{name: _field(value) for name, value in told.items()}}


def _field(value: object) -> object:
    if isinstance(value, KVCacheSpec):
        return spec_fields(value)
    if isinstance(value, Mapping):  # a group of layers that differ
        return {name: _field(item) for name, item in value.items()}
    return _spelled(value)


def _canonical_spec(engine: EngineContext, spec: KVCacheSpec) -> Mapping[str, object]:
    """Spell the spec of pages that hold the heads of all workers, and no padding."""
    fields = {name: value for name, value in spec_fields(spec).items() if name not in _OF_ONE_WORKER}
    return {**fields, "kv_heads": 1 if isinstance(spec, MLAAttentionSpec) else total_kv_heads(engine)}


def _parallel(config: OffloadingConfig, engine: EngineContext, shape: SlotShape) -> Mapping[str, object]:
    if shape.is_canonical:
        return {"canonical": shape.canonical_format}
    parallel = config.parallel
    fields: dict[str, object] = {
        "workers": parallel.world_size,
        "tensor": parallel.tp_size,
        "pipeline": parallel.pp_size,
        "prefill_context": parallel.pcp_size,
        "decode_context": parallel.dcp_size,
    }
    if parallel.pp_size > 1:  # the layers can be divided in more than one way
        fields["layers_of_stages"] = [len(stage) for stage in pipeline_stages(engine)]
    return fields


def _hash(vllm_config: VllmConfig) -> Mapping[str, object]:
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    seed = hash_seed(algorithm)
    if seed is None:
        logger.warning(
            "the block hashes (%s) are seeded at random in each process, so nothing that is stored will be "
            "found after a restart or by another engine: set PYTHONHASHSEED, or use sha256",
            algorithm,
        )
        seed = f"random {uuid.uuid4()}"
    return {"algorithm": algorithm, "seed": seed}


def _speculative(vllm_config: VllmConfig) -> Mapping[str, object] | None:
    config = vllm_config.speculative_config
    if config is None:
        return None
    return {"method": config.method, "model": config.model, "revision": config.revision}


def _digest(fields: Mapping[str, object]) -> str:
    spelled = {name: _spelled(value) for name, value in fields.items() if name not in _NOT_THE_MODEL}
    return hashlib.sha256(json.dumps(spelled, sort_keys=True).encode()).hexdigest()[:32]


def _spelled(value: object) -> object:
    """Spell a value of the engine's canonically; what has no canonical spelling is spelled as its repr."""
    try:
        return canonical(value)
    except IdentityError:
        return repr(value)
