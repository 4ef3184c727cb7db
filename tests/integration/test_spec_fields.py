"""Every field of a KV cache group's layout in vLLM separates caches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvtier import Identity
from kvtier.adapters.vllm._canonical import canonical_value

FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
SPECS: list[KVCacheSpec] = [
    FULL,
    MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16),
    SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, sliding_window=64),
    ChunkedLocalAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, attention_chunk_size=64
    ),
    MambaSpec(block_size=16, shapes=((3, 10), (2, 8)), dtypes=(torch.bfloat16, torch.float32)),
]


def digest(spec: KVCacheSpec) -> bytes:
    return Identity.make("model", {"spec": canonical_value(spec)}).digest


def _with_one_field_changed(spec: KVCacheSpec) -> Iterator[tuple[str, KVCacheSpec]]:
    for field in dataclasses.fields(spec):
        changed = dataclasses.replace(spec)
        object.__setattr__(changed, field.name, "another value")
        yield field.name, changed


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)
def test_spec_fields_separate_caches(spec: KVCacheSpec) -> None:
    known = {digest(spec)}
    for name, changed in _with_one_field_changed(spec):
        found = digest(changed)
        assert (found in known) is (name == "block_stride_alignment"), name
        known.add(found)


def test_unlike_layers_all_count() -> None:
    def group(last: KVCacheSpec) -> KVCacheSpec:
        return UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": FULL, "b": last})

    assert digest(group(FULL)) == digest(group(dataclasses.replace(FULL)))
    assert digest(group(FULL)) != digest(group(dataclasses.replace(FULL, head_size=16)))
