"""The identity of a page's bytes: everything they depend on, except the tokens, which the key names."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import msgspec
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from kvtier import ConfigError, Identity, OffloadKey, pack_key
from kvtier_sglang._environment import relevant_environment
from kvtier_sglang._pages import HostPages
from kvtier_sglang._settings import REVIEWED, engine_settings
from kvtier_sglang._weights import ADAPTERS, code_identity, weights_identity

_SHAPE = (
    "dtype", "layout", "page_size", "layer_num", "start_layer", "end_layer", "head_num", "head_dim",
    "v_head_dim", "head_group_num", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim", "storage_format_tag",
    "temporal_dtype", "conv_dtype", "num_mamba_layers", "indexer_dtype",
)  # fmt: skip


def key_of(page_hash: str) -> OffloadKey:
    """Return the offload key of a page. SGLang's hashes stay readable in it; other names are hashed."""
    try:
        raw = bytes.fromhex(page_hash)
    except ValueError:
        raw = b""
    if not 0 < len(raw) <= 64 or raw.hex() != page_hash:
        # SGLang's hashes have a different length.
        raw = b"name" + hashlib.sha256(page_hash.encode()).digest()
    return pack_key(raw)


def pool_identity(storage: Any, name: str, pool: Any, pages: HostPages, namespace: str) -> Identity:
    """Return the identity of the pages of one host pool of this rank.

    Args:
        storage: SGLang's ``HiCacheStorageConfig``.
        name: the pool's name.
        pool: the pool.
        pages: its pages.
        namespace: the user's own part, for differences that no engine can know.

    Raises:
        ConfigError: the weights or a setting cannot be distinguished from others of the same name.
    """
    every = engine_settings()
    settings = {field: value for field, value in every.items() if field not in REVIEWED}
    return Identity.make(
        storage.model_name or "model",
        {
            "namespace": namespace,
            "engine": {"name": "sglang", "version": version("sglang"), **code_identity(settings, namespace)},
            "device": _device(),
            "weights": weights_identity(settings, every.get("download_dir"), namespace),
            "settings": {
                field: _plain(field, value) for field, value in settings.items() if field != ADAPTERS
            },
            "environment": relevant_environment(),
            "pool": {
                "name": name,
                "class": type(pool).__name__,
                "bytes": list(pages.piece_bytes),
                **{field: getattr(pool, field, None) for field in _SHAPE},
            },
            "parallel": _parallel(storage, name, pool),
        },
    )


def has_one_writer(storage: Any, name: str) -> bool:
    """Return whether one rank writes the pages of a pool for all ranks."""
    return bool(storage.is_mla_model) and name != PoolName.MAMBA.value


def is_same_on_all_ranks(pool: Any) -> bool:
    """Return whether all ranks of an engine are known to have the same bytes in this pool."""
    return isinstance(pool, MLATokenToKVPoolHost | DSAIndexerPoolHost)


def _device() -> str:
    """Return the name of the processor.

    AMD's GPUs are named by architecture, because their FP8 formats differ.
    """
    if torch.version.hip is not None:
        return f"rocm {torch.cuda.get_device_properties(0).gcnArchName}"
    return str(getattr(torch.accelerator.current_accelerator(), "type", "cpu"))


def _parallel(storage: Any, name: str, pool: Any) -> Mapping[str, object]:
    """Return this rank's position, as far as its pages depend on it."""
    is_shared = has_one_writer(storage, name) and is_same_on_all_ranks(pool)
    fields = ("tp_size", "pp_size", "pp_rank", "attn_cp_size", "attn_cp_rank", "dcp_size", "dcp_rank")
    place = {field: getattr(storage, field) for field in fields}
    return {**place, "tp_rank": None if is_shared else storage.tp_rank, "split": storage.should_split_heads}


def _plain(field: str, value: object) -> object:
    """Return a setting in the canonical form of identities. Equal values are equal in every process."""
    try:
        return msgspec.to_builtins(value, str_keys=True, order="sorted", enc_hook=_named)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"SGLang's setting {field} has no representation that is the same in every process ({error}), so "
            "pages could not be told apart: leave it away, or set it as text"
        ) from error


def _named(value: object) -> object:
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    raise TypeError(f"a {type(value).__name__} in it")
