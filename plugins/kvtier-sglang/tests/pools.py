"""SGLang's own host pools on the CPU, with known bytes in their pages."""

from __future__ import annotations

import warnings
from typing import Any

import shims
import torch

shims.install()

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # warnings of SGLang's modules
    from sglang.srt.mem_cache.device_pool_info import (
        KVBufferLayout,
        KVBuffers,
        MambaStateBufferInfo,
        MHABufferInfo,
        MLABufferInfo,
    )
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

PAGE = 16  # tokens
PAGES = 32
LAYERS = 2
_CPU = torch.device("cpu")


def _pointers(layers: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64)


def mha(layout: str = "page_first", heads: int = 2, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Make a pool with different keys and values."""
    layers = tuple(torch.zeros((PAGE, heads, 64), dtype=dtype) for _ in range(LAYERS))
    pointers = _pointers(layers)
    buffers = KVBuffers(
        k=layers, v=layers, k_data_ptrs=pointers, v_data_ptrs=pointers, layout=KVBufferLayout.NHD
    )
    info = MHABufferInfo(
        buffers=buffers, page_size=PAGE, head_num=heads, head_dim=64, v_head_dim=64, dtype=dtype, device=_CPU
    )
    with host_memory_budget_scope(2**30):
        return MHATokenToKVPoolHost(
            info, 2.0, 0, PAGE, layout, pin_memory=False, device_capacity_tokens=PAGE,
            start_layer=0, end_layer=LAYERS, host_token_capacity=PAGE * PAGES,
        )  # fmt: skip


def mla(layout: str = "page_first") -> Any:
    """Make a latent pool, whose bytes are equal on every rank."""
    layers = tuple(torch.zeros((PAGE, 1, 128), dtype=torch.bfloat16) for _ in range(LAYERS))
    info = MLABufferInfo(
        buffers=layers, data_ptrs=_pointers(layers), layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS, page_size=PAGE, kv_lora_rank=96, qk_rope_head_dim=32, kv_cache_dim=128,
        dtype=torch.bfloat16, device=_CPU,
    )  # fmt: skip
    with host_memory_budget_scope(2**30):
        return MLATokenToKVPoolHost(
            info, 2.0, 0, PAGE, layout, pin_memory=False, device_capacity_tokens=PAGE,
            start_layer=0, end_layer=LAYERS, target_layer_num=LAYERS, host_token_capacity=PAGE * PAGES,
        )  # fmt: skip


def mamba() -> Any:
    """Make a pool of Mamba states, one for each prompt's end."""
    states = MambaStateBufferInfo(
        temporal=torch.zeros((LAYERS, 4, 32, 16)), conv=(torch.zeros((LAYERS, 4, 8, 4)),)
    )
    with host_memory_budget_scope(2**30):
        return MambaPoolHost(
            states, 4.0, 0, device_capacity=4, pin_memory=False, layout="page_first"
        )  # fmt: skip


def indices(pool: Any, pages: range) -> torch.Tensor:
    """Return the host indices of some pages."""
    return torch.arange(pages.start * pool.page_size, pages.stop * pool.page_size)


def content(pool: Any, number: int) -> torch.Tensor:
    """Return the bytes of page ``number``, flat and with the pool's own dtype."""
    blank = pool.get_dummy_flat_data_page()
    noise = torch.randint(0, 120, (blank.nbytes,), generator=torch.Generator().manual_seed(number))
    return noise.to(torch.uint8).view(blank.dtype)  # Small enough that no byte pattern is a NaN.


def fill(pool: Any, pages: range, first: int = 0) -> None:
    """Write page ``first`` and the following pages, with SGLang's own method."""
    for number, page in enumerate(pages, first):
        pool.set_from_flat_data_page(page * pool.page_size, content(pool, number))


def wipe(pool: Any, pages: range) -> None:
    """Write zeros."""
    for page in pages:
        pool.set_from_flat_data_page(page * pool.page_size, pool.get_dummy_flat_data_page())


def holds(pool: Any, page: int, number: int) -> bool:
    """Return whether a page has the bytes of page ``number``."""
    return bool(torch.equal(pool.get_data_page(page * pool.page_size), content(pool, number)))


def is_blank(pool: Any, page: int) -> bool:
    """Return whether a page contains only zeros."""
    return not pool.get_data_page(page * pool.page_size).any()
