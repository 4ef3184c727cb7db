"""What the bytes of a page depend on, besides its tokens, which its key names."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import reduce
from importlib.metadata import version
from typing import Any

import msgspec
import torch

from kvtier import ConfigError, Identity, OffloadKey, pack_key
from kvtier_sglang._environment import relevant_environment
from kvtier_sglang._pages import HostPages
from kvtier_sglang._weights import ADAPTERS, weights_identity

_NAMESPACES = frozenset({"model", "exec", "spec", "lora", "mm"})
"""SGLang's groups of settings that count, each with all that it has. The other groups say where and how the
engine runs; what of them reaches the bytes of a page is in the pool's shape and the ranks."""

_DOWNLOADS = "download_dir"

# Of these groups, how weights come into memory, and what is watched, captured or written beside the model.
_NOT_BYTES = (
    "checkpoint_engine_",
    "cuda_graph_",
    "debug_",
    "delete_ckpt_",
    "disable_outlines_",
    "elastic_",
    "enable_return_",
    "engine_info_",
    "expert_balancedness_",
    "expert_distribution_",
    "model_checksum",
    "modelopt_checkpoint_save_path",
    "modelopt_export_path",
    "remote_instance_",
    "startup_weight_",
    "watermark_",
    "weight_cache_",
    "weight_loader_",
)
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
        raw = b"name" + hashlib.sha256(page_hash.encode()).digest()  # as long as no hash of SGLang's is
    return pack_key(raw)


def pool_identity(storage: Any, name: str, pool: Any, pages: HostPages, namespace: str) -> Identity:
    """Return the identity of the pages of one host pool of this rank.

    Args:
        storage: SGLang's ``HiCacheStorageConfig``.
        name: the pool's name.
        pool: the pool.
        pages: its pages.
        namespace: the user's own part, for what no engine knows.

    Raises:
        ConfigError: nothing tells the weights, or a setting, from others of the same name.
    """
    settings = _settings()
    download_dir = settings.pop(_DOWNLOADS, None)
    return Identity.make(
        storage.model_name or "model",
        {
            "namespace": namespace,
            "engine": {"name": "sglang", "version": version("sglang")},
            "device": getattr(torch.accelerator.current_accelerator(), "type", "cpu"),
            "weights": weights_identity(settings, download_dir, namespace),
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


def _parallel(storage: Any, name: str, pool: Any) -> Mapping[str, object]:
    """Return this rank's place, as far as its pages depend on it.

    Every rank has the same bytes of a latent (MLA) pool, which one rank writes for all. Pools beside it with
    heads of their own, and Mamba states, are split among ranks all the same.
    """
    is_shared = storage.is_mla_model and name != "mamba" and not hasattr(pool, "head_num")
    fields = ("tp_size", "pp_size", "pp_rank", "attn_cp_size", "attn_cp_rank", "dcp_size", "dcp_rank")
    place = {field: getattr(storage, field) for field in fields}
    return {**place, "tp_rank": None if is_shared else storage.tp_rank, "split": storage.should_split_heads}


def _settings() -> dict[str, Any]:
    """Return the settings that count, as the running engine has resolved them; none where no engine runs."""
    from sglang.srt.runtime_context import get_context, get_server_args

    try:
        given = get_server_args()
    except ValueError:  # none were published
        return {}
    from sglang.srt.arg_groups.arg_utils import namespace_of

    found: dict[str, Any] = {}
    for field, group in namespace_of(type(given)).items():
        first, *inner = group.split(".")
        if first in _NAMESPACES and (not field.startswith(_NOT_BYTES)):
            found[field] = getattr(reduce(getattr, inner, get_context().config_bag(first)), field)
    return found


def _plain(field: str, value: object) -> object:
    """Return a setting as identities have it: the same in every process, and for every equal value."""
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
