"""The identity of an engine's KV cache: everything that a block's bytes depend on besides its tokens."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.config import LoadConfig, ModelConfig, ParallelConfig, VllmConfig
from vllm.plugins import DEFAULT_PLUGINS_GROUP
from vllm.v1.kv_cache_interface import MLAAttentionSpec
from vllm.v1.kv_offload.config import OffloadingConfig

from kvtier._config import TieringConfig
from kvtier._identity import Identity, canonical_dtype
from kvtier._log import GuardedLogger
from kvtier._weights import (
    code_fingerprint,
    hub_commit,
    remote_code,
    tokenizer_fingerprint,
    transformers_release,
    weights_fingerprint,
)
from kvtier.adapters.vllm._canonical import (
    canonical_settings,
    canonical_value,
    foreign_module,
    generation_config,
    relevant_environment,
)
from kvtier.adapters.vllm._compat import EngineContext, hash_seed, is_reviewed, kv_format
from kvtier.adapters.vllm._pages import device_kind
from kvtier.adapters.vllm._parallel import SlotShape, pipeline_stages, total_kv_heads
from kvtier.errors import ConfigError

logger = GuardedLogger("kvtier.vllm")

_OF_ONE_WORKER = frozenset({"num_kv_heads", "num_head_slots", "max_tp_shards", "page_size_padded"})
_COMMIT = re.compile(r"[0-9a-f]{40}")
_READS_FILES = {
    "auto", "dummy", "fastsafetensors", "hf", "instanttensor", "mistral", "npcache", "pt", "runai_streamer",
    "runai_streamer_sharded", "safetensors", "sharded_state",
}  # fmt: skip
"""Load formats that read all weights from the model's files. Others take them from another engine, an archive
or a daemon, which may have older ones (``ipc_cache``)."""

_OTHER_MODELS = ("audio_model_id", "text_model_id")  # of Ultravox


def engine_identity(
    config: OffloadingConfig,
    engine: EngineContext,
    shape: SlotShape,
    settings: TieringConfig,
    page_formats: Iterable[int],
    *,
    received: Sequence[str] = (),
) -> Identity:
    """Return the identity of the KV cache of this engine.

    With canonical pages it equals a single worker's identity; otherwise it includes the parallel layout. If
    block hashes do not name all content, it is unique to this start. ``page_formats`` come from the workers.
    ``received`` are connectors that bring what other engines have computed, with their own settings.
    ConfigError if nothing distinguishes the weights or a setting from others of the same name.
    """
    vllm_config, namespace, reviewed = engine.vllm_config, settings.namespace, is_reviewed()
    return Identity.make(
        config.model.name,
        {
            "namespace": namespace,
            "engine": {"name": "vllm", **_code(vllm_config)},
            "device": device_kind(),
            "page_formats": _page_formats(page_formats),
            "weights": _weights(vllm_config, namespace),
            "kv_cache": _kv_cache(config, engine, shape),
            "parallel": _parallel(config, engine, shape),
            "hash": _hash(vllm_config, settings),
            "settings": canonical_settings(vllm_config, is_reviewed=reviewed),
            "environment": relevant_environment(),
            **({"received": list(received)} if received else {}),
            **_tokenizer(vllm_config.model_config),
            **generation_config(vllm_config.model_config, is_reviewed=reviewed),
        },
    )


def _of_this_start(cause: str, remedy: str) -> str:
    """Return a part of the identity that no other engine has, and warn why."""
    logger.warning(
        "%s, so nothing that is stored will be found after a restart or by another engine: %s", cause, remedy
    )
    return f"random {uuid.uuid4()}"


def _page_formats(told: Iterable[int]) -> Sequence[str]:
    """Return the workers' arrangements of pages, as in ``page_format``; unready workers report 0."""
    return sorted({f"{number:016x}" for number in told if number}) or [
        _of_this_start(
            "no worker has told how its attention backend arranges pages", "use a supported version of vLLM"
        )
    ]


def _weights(vllm_config: VllmConfig, namespace: str) -> Mapping[str, object]:
    """Return the names of the weights of the model and of a draft model."""
    weights: dict[str, object] = {
        "model": _weights_of(vllm_config.model_config, vllm_config.load_config, namespace)
    }
    speculative = vllm_config.speculative_config
    draft = None if speculative is None else speculative.draft_model_config
    if draft is not None and draft is not vllm_config.model_config:
        load = speculative.draft_load_config or vllm_config.load_config
        weights["draft"] = _weights_of(draft, load, namespace)
    if vllm_config.weight_transfer_config is not None:
        cause = "a trainer can replace the weights (weight_transfer_config)"
        weights["updates"] = _of_this_start(cause, "serve the trained weights from files")
    return weights


def _weights_of(model: ModelConfig, load: LoadConfig, namespace: str) -> Mapping[str, object]:
    name = model.model_weights or model.model  # the first is set if they are streamed from an object store
    # A hub's revision, such as "main", can move; vLLM adds the commit.
    revision = getattr(model.revision, "resolved", model.revision)
    files = None if model.model_weights else weights_fingerprint(Path(model.model))
    is_dummy = load.load_format == "dummy"
    seed = model.seed if is_dummy else None
    is_commit = revision is not None and _COMMIT.fullmatch(revision)
    others = {} if is_dummy else _other_models(model, load)
    unknown = [other for other, found in others.items() if found is None]
    if load.load_format not in _READS_FILES or (not is_commit and files is None and seed is None):
        unknown.append(name)
    if unknown and not namespace:
        raise ConfigError(
            f"the weights of {', '.join(unknown)} cannot be identified: they are not in a local directory, "
            f"no hub commit is known, or load_format {load.load_format} does not read the model's files. Set "
            "`namespace` in kv_connector_extra_config to a name that changes with the weights, or remove "
            "secondary_tiers"
        )
    return {"name": name, "revision": revision, "files": files, "seed": seed, **others}


def _code(vllm_config: VllmConfig) -> Mapping[str, Any]:
    """Return the versions of the code that computes models, or prepares media."""
    speculative = vllm_config.speculative_config
    drafts = () if speculative is None else (speculative.draft_model_config,)
    models = [model for model in (vllm_config.model_config, *drafts) if model is not None]
    others = {module for model in models if (module := foreign_module(model)) is not None}
    names = others.union(model.architecture for model in models)
    names.update(*(model.model_class_overrides.values() for model in models))
    if vllm_config.model_config.multimodal_config is not None:
        others.add("transformers")
    others.update(_foreign_workers(vllm_config.parallel_config), _plugins())
    versions: dict[str, str | None] = {module: _code_version(module) for module in sorted(others)}
    if "transformers" in others:
        versions.update(item for model in models for item in _remote_code(model).items())
    return {"kv_format": kv_format(names), **versions}


def _foreign_workers(parallel: ParallelConfig) -> Iterator[str]:
    """Yield the classes of workers that are not vLLM's own, such as those of a platform's plug-in."""
    for worker in (parallel.worker_cls, parallel.worker_extension_cls):
        name = f"{worker.__module__}.{worker.__qualname__}" if isinstance(worker, type) else str(worker)
        if name not in ("", "auto") and not name.startswith("vllm."):
            yield name


def _plugins() -> Iterator[str]:
    """Yield the modules of plug-ins that vLLM loads into every process, where they can change anything."""
    for plugin in entry_points(group=DEFAULT_PLUGINS_GROUP):
        is_loaded = envs.VLLM_PLUGINS is None or plugin.name in envs.VLLM_PLUGINS
        if is_loaded and plugin.module.partition(".")[0] not in ("kvtier", "vllm"):
            yield plugin.module


def _remote_code(model: ModelConfig) -> Mapping[str, str | None]:
    if not model.trust_remote_code:
        return {}
    revision = getattr(model.revision, "resolved", model.revision)
    return remote_code(model.model, model.hf_config.to_dict(), revision, model.code_revision)


def _code_version(module: str) -> str:
    if module == "transformers":
        return transformers_release()
    return code_fingerprint(module) or _of_this_start(
        f"the code of the model ({module}) cannot be found", "install it as a package, or as a module"
    )


def _tokenizer(model: ModelConfig) -> Mapping[str, object]:
    """Return the tokenizer of a model that may compute with it.

    Image processors are made from it (Pixtral), texts within videos are embedded in the worker (Qwen3-VL,
    Nemotron), and Engram hashes n-grams of normalized tokens.
    """
    fields = {**model.hf_config.to_dict(), **model.hf_text_config.to_dict()}
    if model.multimodal_config is None and not any("engram" in field for field in fields):
        return {}
    files = tokenizer_fingerprint(Path(model.tokenizer))
    revision = getattr(model.tokenizer_revision, "resolved", model.tokenizer_revision)
    named = {"files": files} if files else {"name": model.tokenizer, "revision": revision}
    return {"tokenizer": {**named, "mode": model.tokenizer_mode}}


def _other_models(model: ModelConfig, load: LoadConfig) -> dict[str, str | None]:
    """Return the weights of the models that this one is made of; vLLM loads their newest revision."""
    named = filter(None, (getattr(model.hf_config, field, None) for field in _OTHER_MODELS))
    return {it: weights_fingerprint(Path(it)) or hub_commit(it, None, load.download_dir) for it in named}


def _kv_cache(config: OffloadingConfig, engine: EngineContext, shape: SlotShape) -> Mapping[str, object]:
    per_block = "bytes_per_block" if shape.is_canonical else "bytes_per_block_and_worker"
    return {
        "dtype": canonical_dtype(config.model.dtype),
        # If layers of a group differ, the scheduler sees the first one's spec.
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
                "spec": _spec(engine, shape, group.group_id),
            }
            for group in config.groups
        ],
    }


def _spec(engine: EngineContext, shape: SlotShape, group: int) -> object:
    """Return the layout of the blocks of one KV cache group, as vLLM describes it.

    Canonical pages hold the heads of all workers, and no padding.
    """
    spec = engine.spec_of(group)
    fields = canonical_value(spec, "KVCacheSpec")
    if not shape.is_canonical or not isinstance(fields, dict):
        return fields
    of_all = {name: value for name, value in fields.items() if name not in _OF_ONE_WORKER}
    return {**of_all, "kv_heads": 1 if isinstance(spec, MLAAttentionSpec) else total_kv_heads(engine)}


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
    if parallel.pp_size > 1:  # there is more than one way to divide the layers
        fields["layers_of_stages"] = [len(stage) for stage in pipeline_stages(engine)]
    return fields


def _hash(vllm_config: VllmConfig, settings: TieringConfig) -> Mapping[str, object]:
    """Return algorithm and seed of block hashes; if they do not name content, also parts of this start."""
    cache, media = vllm_config.cache_config, vllm_config.model_config.multimodal_config
    algorithm = str(cache.prefix_caching_hash_algo)
    found = {"algorithm": algorithm, "seed": hash_seed(algorithm)}
    if found["seed"] is None:
        found["seed"] = _of_this_start(
            f"the block hashes ({algorithm}) are seeded at random in each process",
            "set PYTHONHASHSEED, or use sha256",
        )
    if media is not None and not media.mm_processor_cache_gb and not cache.enable_prefix_caching:
        found["media"] = _of_this_start(
            "the block hashes number images and other media instead of hashing them",
            "enable prefix caching, or set mm_processor_cache_gb above 0",
        )
    if vllm_config.lora_config is not None and not settings.immutable_adapters:
        found["adapters"] = _of_this_start(
            "the block hashes have the names and paths of LoRA adapters, not their weights",
            "set immutable_adapters if new weights always get a new path",
        )
    return found
