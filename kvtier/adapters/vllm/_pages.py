"""The arrangement of a page's bytes, as far as vLLM's settings and KV cache configuration omit it.

Attention backends split a block into smaller ones, and the CPU backend arranges keys and values for the
processor's instructions. vLLM chooses both by device, installed packages and model, in each worker.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.platforms import current_platform
from vllm.v1.kv_offload.config import OffloadingConfig

from kvtier.adapters.vllm._compat import EngineContext
from kvtier.adapters.vllm._excluded_settings import SAME_BACKENDS

_CPU_FLAGS = frozenset({"amx_bf16", "amx_tile", "avx512_bf16", "bf16", "i8mm", "sve"})


def device_kind(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the kind of device, with all facts that decide how it arranges and reads the bytes of a page.

    Some AMD GPUs read the bits of FP8 differently.
    """
    parts = [str(current_platform.device_type)]
    if parts == ["cpu"]:
        lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
        flags = next((line.split() for line in lines if line.startswith(("flags", "Features"))), [])
        parts += [platform.machine(), torch.backends.cpu.get_cpu_capability()]
        parts += sorted(_CPU_FLAGS.intersection(flags))
    if current_platform.is_fp8_fnuz():
        parts.append("fp8fnuz")
    return "-".join(parts)


def page_format(config: OffloadingConfig, engine: EngineContext) -> int:
    """Return a number that is the same for workers whose attention backends arrange pages alike.

    It covers each group's backends, and into how many blocks a backend splits one of vLLM's. 0 if none of
    the layers is known.
    """
    layers = engine.vllm_config.compilation_config.static_forward_context
    blocks = engine.kv_cache_config.num_blocks
    formats = {
        (group.group_id, _arrangement(layer.get_attn_backend()), _pieces(layer, blocks))
        for group in config.groups
        for name in group.layer_names
        if (layer := layers.get(name)) is not None  # otherwise of another pipeline stage
    }
    digest = blake2b(json.dumps(sorted(formats)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) if formats else 0


def _arrangement(backend: type) -> str:
    """Return a backend's class, since several have one name; with vLLM's release if that may matter.

    ROCm's backends, for example, interleave values in some configurations since 0.33.
    """
    name = f"{backend.__module__}.{backend.__qualname__}"
    return name if name in SAME_BACKENDS else f"{name} {vllm.__version__.partition('+')[0]}"


def prepare_scales(engine: EngineContext) -> None:
    """Let layers begin to keep a scale per token and head now, before any load.

    vLLM's Triton backend sets all scales of a layer to 1 in the first step that computes it (0.31 to 0.33),
    which may come behind a load.
    """
    for layer in engine.vllm_config.compilation_config.static_forward_context.values():
        impl: Any = getattr(layer, "impl", None)
        if getattr(impl, "_is_per_token_head_quant", False):
            impl._ensure_scale_caches(layer.kv_cache)


def _pieces(layer: Any, blocks: int) -> int:
    """Return the number of backend blocks in one of vLLM's; 0 if the layer has no tensor of blocks."""
    cache = getattr(layer, "kv_cache", None)
    while isinstance(cache, Sequence) and cache:
        cache = cache[0]
    shape = cache.shape if isinstance(cache, torch.Tensor) else ()
    return next((length // blocks for length in shape if length >= blocks and not length % blocks), 0)
