"""The KV cache of a model, from its ``config.json``: groups, pages and blocks as vLLM makes them.

No torch and no vLLM. A test compares the results with vLLM's own ``KVCacheSpec`` for each kind of layer.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from kvtier.errors import ConfigError

FULL, WINDOW, LOCAL, LATENT, STATE = "full", "sliding window", "local chunks", "latent", "state"
ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}

_KINDS: Final = {
    "full_attention": FULL,
    "attention": FULL,
    "sliding_attention": WINDOW,
    "chunked_attention": LOCAL,
    "linear_attention": STATE,
    "mamba": STATE,
    "conv": STATE,
}
_UNKNOWN: Final = (
    "index_topk",
    "attn_type_list",
    "layers_block_type",
    "hybrid_override_pattern",
    "compress_ratios",
)
_ALIGNMENT_TOKENS: Final = 16
_SIMILAR: Final = 1.5

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share blocks.

    Attributes:
        kind: kind of attention, or "state".
        layers: number of layers with a page in each block.
        page_bytes: bytes of a block in one layer of one worker.
        block_tokens: tokens per block.
        window: number of tokens that a prefix needs from this group; None for all.
    """

    kind: str
    layers: int
    page_bytes: int
    block_tokens: int
    window: int | None = None

    def tokens_of(self, prompt_tokens: int) -> int:
        """Return the number of tokens whose blocks are needed to load a prompt."""
        return prompt_tokens if self.window is None else min(prompt_tokens, self.window)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The KV cache of a model on ``workers`` tensor-parallel workers."""

    groups: tuple[LayerGroup, ...]
    workers: int
    copies: int  # number of workers that hold the same bytes
    pages_per_block: int  # per worker: as many as the largest group has layers

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in one worker. They are equal for all groups, because groups share tensors."""
        return max(group.page_bytes for group in self.groups) * self.pages_per_block

    @property
    def has_states(self) -> bool:
        return any(group.kind == STATE for group in self.groups)


def read_config(model: str) -> Config:
    """Return the configuration of a model, given as a file, a folder, or a name in the hub's local cache."""
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    elif not path.exists():
        path = _cached(model)
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a model's config.json: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is not a model's config.json")
    return {**found, **(found.get("text_config") or {})}


def _cached(name: str) -> Path:
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    found = sorted(
        (hub / f"models--{name.replace('/', '--')}").glob("snapshots/*/config.json"),
        key=lambda path: path.stat().st_mtime,
    )
    if not found:
        raise ConfigError(
            f"there is no file {name}, and no model of this name in {hub}: name the model's config.json"
        )
    return found[-1]


def shape_of(config: Config, tp: int, dtype: str, block_tokens: int) -> ModelShape:
    """Return the KV cache of a model. Raise ConfigError if its kind of cache is unknown."""
    if unknown := [name for name in _UNKNOWN if config.get(name)]:
        raise ConfigError(
            f"the cache of {config.get('model_type')} is not known here ({unknown[0]}): see the engine's log"
        )
    try:
        layers = list(_layers(config, tp, ITEM_BYTES[_dtype(config) if dtype == "auto" else dtype]))
    except (KeyError, TypeError) as error:
        raise ConfigError(f"the configuration lacks {error}, or has another value than expected") from None
    buckets = Counter(layers)
    groups, pages = _grouped(buckets, block_tokens)
    heads = 1 if layers[0].kind == LATENT else _heads(config)
    return ModelShape(groups, tp, max(1, tp // heads), pages)


@dataclass(frozen=True, slots=True)
class _Layer:
    kind: str
    nbytes: int  # bytes per token, or per state
    window: int | None = None


def _dtype(config: Config) -> str:
    return str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")


def _heads(config: Config) -> int:
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def _layers(config: Config, tp: int, item_bytes: int) -> Iterator[_Layer]:
    """Yield each cache of each layer. Falcon-H1 has two caches per layer."""
    number = int(config["num_hidden_layers"]) - int(config.get("num_kv_shared_layers") or 0)
    exceptions = config.get("per_layer_config") or {}
    for index, kind in enumerate(_kinds(config)[:number]):
        if kind == STATE or "mamba_d_ssm" in config:
            yield _Layer(STATE, _state_bytes(config, tp, ITEM_BYTES[_dtype(config)]), 1)
        if kind == LATENT:
            yield _Layer(LATENT, (config["kv_lora_rank"] + config["qk_rope_head_dim"]) * item_bytes)
        elif kind != STATE:
            own = {**config, **exceptions.get(str(index), {})}
            elements = 2 * max(1, _heads(own) // tp) * _head_size(own, kind)
            window = {WINDOW: "sliding_window", LOCAL: "attention_chunk_size"}.get(kind)
            yield _Layer(kind, elements * item_bytes, config.get(window) if window else None)


def _head_size(config: Config, kind: str) -> int:
    if kind == FULL and config.get("global_head_dim"):
        return int(config["global_head_dim"])
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _kinds(config: Config) -> list[str]:
    """Return the kind of each layer."""
    number = int(config["num_hidden_layers"])
    if config.get("kv_lora_rank"):
        return [LATENT] * number
    if named := config.get("layer_types"):
        return [_KINDS[name] for name in named]
    if config.get("attention_chunk_size"):  # Llama 4
        every = config.get("no_rope_layer_interval") or 4
        rotary = config.get("no_rope_layers") or [int((layer + 1) % every != 0) for layer in range(number)]
        return [LOCAL if is_local else FULL for is_local in rotary]
    if config.get("linear_num_value_heads"):  # Qwen3-Next
        every = config.get("full_attention_interval") or 4
        return [STATE if (layer + 1) % every else FULL for layer in range(number)]
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return [FULL] * number
    every = config.get("sliding_window_pattern") or {"gemma2": 2, "gpt_oss": 2}.get(config["model_type"])
    if every is None and config["model_type"].startswith("gemma3"):
        every = 6
    return [FULL if every and (layer + 1) % every == 0 else WINDOW for layer in range(number)]


def _state_bytes(config: Config, tp: int, item_bytes: int) -> int:
    """Return the bytes of a layer's recurrent state in one worker."""
    if "conv_L_cache" in config:
        wide = int(config.get("conv_dim") or config["hidden_size"])
        return wide * int(config["conv_L_cache"] - 1) * item_bytes // tp
    if "linear_num_value_heads" in config:
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        values, kernel = config["linear_num_value_heads"], config["linear_conv_kernel_dim"]
        wide = values * config["linear_value_head_dim"]
        memory, conv = wide * config["linear_key_head_dim"], (2 * keys + wide) * (kernel - 1)
    else:
        wide = config["mamba_n_heads"] * config["mamba_d_head"]
        groups = config["mamba_n_groups"]
        groups += tp - groups if groups % tp else 0
        memory = wide * config["mamba_d_state"]
        conv = (wide + 2 * groups * config["mamba_d_state"]) * (config["mamba_d_conv"] - 1)
    precise = ITEM_BYTES.get(config.get("mamba_ssm_dtype", ""), item_bytes)
    return int((memory * precise + conv * item_bytes) // tp)


def _grouped(buckets: Mapping[_Layer, int], block_tokens: int) -> tuple[tuple[LayerGroup, ...], int]:
    """Return the groups into which vLLM divides the layers, and the pages per block in one worker."""
    attention = [layer for layer in buckets if layer.kind != STATE]
    states = [layer for layer in buckets if layer.kind == STATE]
    if not attention:
        raise ConfigError("models without attention are not known here")
    if states:  # A block has as many tokens as make its page as large as a state.
        (token_bytes,) = {layer.nbytes for layer in attention}
        step = max(_ALIGNMENT_TOKENS, block_tokens)
        block_tokens = step * -(-states[0].nbytes // (step * token_bytes))
    page = max(layer.nbytes for layer in attention) * block_tokens
    made = [
        LayerGroup(layer.kind, number, page, _block(layer, page, block_tokens), layer.window)
        for layer, number in buckets.items()
    ]
    if len(made) == 1:
        return tuple(made), made[0].layers
    least, most = min(buckets.values()), max(buckets.values())
    size = most if most < least * _SIMILAR else least
    parts = [
        replace(group, layers=(group.layers + place) // number)
        for group in made
        for number in (-(-group.layers // size),)
        for place in range(number)
    ]
    return tuple(parts), size


def _block(layer: _Layer, page: int, block_tokens: int) -> int:
    """Return the number of tokens per block. A block of smaller pages has more tokens."""
    smaller, rest = divmod(page, layer.nbytes * block_tokens)
    return block_tokens if layer.kind == STATE or rest else block_tokens * smaller
