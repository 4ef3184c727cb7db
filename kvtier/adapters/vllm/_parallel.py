"""How the workers of one engine share a slot: each with its own area, or one of canonical pages.

vLLM makes the spec in the scheduler's process and in every worker, and none has all facts: the scheduler has
the first worker's configuration and no tensors, a worker has only its own. Each derives the same shape here.
A worker then checks it against its tensors, and the region refuses a process with another shape.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import canonical_format_id
from vllm.distributed.utils import get_pp_indices
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec, MLAAttentionSpec, UniformTypeKVCacheSpecs
from vllm.v1.kv_offload.config import OffloadingConfig

from kvtier._memory.layout import SlotLayout, default_blocks_per_chunk, whole_pages
from kvtier.adapters.vllm._compat import EngineContext
from kvtier.errors import ConfigError, RegionError

_COUNTS_KV_HEADS = re.compile(
    r"(kv|key_value)_heads|heads?_kv|heads_in_group|attention_groups|query_group_num"
)
_REMEDY = "remove canonical_layout: the chunks are then kept for engines of this parallel layout alone"


@dataclass(frozen=True)
class SlotShape:
    """The contents of a slot."""

    areas: int  # one for each worker, or a single one of canonical pages
    bytes_per_block: int  # in an area
    blocks_per_chunk: int
    canonical_format: str | None = None  # its id; None if each worker has an area

    @property
    def is_canonical(self) -> bool:
        """Whether the bytes are the same for every number of workers."""
        return self.canonical_format is not None

    @property
    def area_bytes(self) -> int:
        return self.bytes_per_block * self.blocks_per_chunk

    @property
    def chunk_bytes(self) -> int:
        return whole_pages(self.areas * self.area_bytes)

    def __str__(self) -> str:
        """Return the text that processes of one engine compare."""
        kind = f"canonical pages {self.canonical_format}" if self.canonical_format else "areas of workers"
        return f"{self.areas} x {self.area_bytes} bytes, {self.blocks_per_chunk} blocks, {kind}"


def slot_shape(config: OffloadingConfig, engine: EngineContext) -> SlotShape:
    """Return the contents of this engine's slots; ConfigError if pages must be canonical and cannot be."""
    if config.canonical_layout:
        return _canonical_shape(config, engine)
    per_block = _largest_stage_bytes(config, engine)
    return SlotShape(config.parallel.world_size, per_block, config.cache.blocks_per_chunk)


def with_chunk_size(config: OffloadingConfig, engine: EngineContext) -> OffloadingConfig:
    """Return ``config`` with the default number of blocks per chunk, if the user set no chunk size.

    ``default_blocks_per_chunk`` gives the default. A chunk stays one block if vLLM requires it (state-space
    layers, a retention interval), or if the groups have blocks of different lengths.
    """
    is_set = any(config.extra_config.get(name) is not None for name in ("block_size", "blocks_per_chunk"))
    if is_set or not _allows_larger_chunks(config, engine):
        return config
    bytes_per_block = slot_shape(config, engine).chunk_bytes
    (tokens_per_block,) = {group.tokens_per_block for group in config.groups}
    blocks = default_blocks_per_chunk(bytes_per_block, tokens_per_block)
    groups = tuple(engine.with_chunks(group, blocks) for group in config.groups)
    return replace(config, cache=replace(config.cache, blocks_per_chunk=blocks), groups=groups)


def _allows_larger_chunks(config: OffloadingConfig, engine: EngineContext) -> bool:
    attention = AttentionSpec | UniformTypeKVCacheSpecs
    return (
        len({group.tokens_per_block for group in config.groups}) == 1
        and all(isinstance(engine.spec_of(group.group_id), attention) for group in config.groups)
        and not engine.vllm_config.cache_config.prefix_cache_retention_interval
    )


def slot_layout(shape: SlotShape, page_bytes: Sequence[int], rank: int, stages: int) -> SlotLayout:
    """Return the layout of worker ``rank`` in a slot, from ``KVCaches.page_bytes``.

    ``stages`` is the number of pipeline stages. RegionError if the tensors do not have the bytes that the
    engine reports.
    """
    has, says = sum(page_bytes), shape.bytes_per_block
    # Only the workers of a stage that holds fewer layers than others may have less.
    if has > says or (has < says and stages == 1):
        raise RegionError(
            f"a block of the KV cache's tensors takes {has} bytes of a slot, but the engine says {says}: "
            "this KV cache layout is not supported"
        )
    area = 0 if shape.is_canonical else rank
    return SlotLayout.make(page_bytes, shape.blocks_per_chunk, area, shape.areas, shape.area_bytes)


def head_shards(spec: KVCacheSpec, engine: EngineContext) -> int:
    """Return the number of different parts of a canonical page under tensor parallelism."""
    if isinstance(spec, MLAAttentionSpec):
        return 1
    parallel = engine.vllm_config.parallel_config
    return int(min(parallel.tensor_parallel_size, total_kv_heads(engine)))


def total_kv_heads(engine: EngineContext) -> int:
    """Return the model's KV heads, over all workers."""
    return int(engine.vllm_config.model_config.get_total_num_kv_heads())


def _canonical_shape(config: OffloadingConfig, engine: EngineContext) -> SlotShape:
    parallel = config.parallel
    if parallel.world_size != parallel.tp_size:
        raise ConfigError(
            f"canonical_layout supports tensor parallelism only, but {parallel.world_size} workers are "
            f"not {parallel.tp_size} tensor-parallel ranks (pipeline or context parallelism); {_REMEDY}"
        )
    if not parallel.is_parallelism_agnostic or config.kv_cache_layout is None:
        kinds = sorted({type(engine.spec_of(group.group_id)).__name__ for group in config.groups})
        raise ConfigError(
            f"canonical_layout does not support this KV cache ({', '.join(kinds)}): as far as vLLM says, its "
            f"blocks may depend on the tensor-parallel size; {_REMEDY}"
        )
    _require_alike_heads(parallel.tp_size, engine)
    per_block = _canonical_bytes_per_block(config, engine)
    return SlotShape(1, per_block, config.cache.blocks_per_chunk, canonical_format_id(config.kv_cache_layout))


def _require_alike_heads(workers: int, engine: EngineContext) -> None:
    """Raise ConfigError if workers that vLLM takes for holders of one KV head may hold different ones.

    With more workers than heads, each layer has one head per worker. vLLM maps them all by the model's number
    of heads (0.31 to 0.33), although some layers can have more (MiMo-V2, Nemotron-NAS), or a draft model.
    """
    heads, speculative = total_kv_heads(engine), getattr(engine.vllm_config, "speculative_config", None)
    if workers <= heads:
        return
    models = engine.vllm_config.model_config, getattr(speculative, "draft_model_config", None)
    for model in filter(None, models):
        for name, number in _numbers(model.hf_text_config.to_dict()):
            if _COUNTS_KV_HEADS.search(name) and number != heads:
                raise ConfigError(
                    f"canonical_layout: {name} is {number}, but the model's number of KV heads is {heads}. "
                    f"{workers} workers hold one head each, and vLLM may take different heads for copies of "
                    f"one; {_REMEDY}"
                )


def _numbers(value: object, name: str = "") -> Iterator[tuple[str, int]]:
    """Yield each number in a configuration with the name of its field."""
    if isinstance(value, Mapping):
        for field, inner in value.items():
            yield from _numbers(inner, str(field))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers(inner, name)
    elif isinstance(value, int):
        yield name, value


def _canonical_bytes_per_block(config: OffloadingConfig, engine: EngineContext) -> int:
    """Return a block's bytes of canonical pages in all tensors. Layers at one place share a tensor."""
    specs = {
        layer: _layer_spec(engine.spec_of(group.group_id), layer)
        for group in config.groups
        for layer in group.layer_names
    }
    pages: dict[int, int] = {}
    for tensor in engine.kv_cache_config.kv_cache_tensors:
        for number, layer in enumerate(tensor.layers):
            if (spec := specs.get(layer)) is None:
                continue
            padded = getattr(spec, "page_size_padded", None) is not None
            page = spec.unpadded_page_size_bytes if padded else tensor.block_stride
            place = tensor.offset + number * tensor.layer_stride
            pages[place] = max(pages.get(place, 0), page * head_shards(spec, engine))
    return sum(pages.values())


def _layer_spec(spec: KVCacheSpec, layer: str) -> KVCacheSpec:
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _largest_stage_bytes(config: OffloadingConfig, engine: EngineContext) -> int:
    """Return the bytes of a block in the worker that holds most layers.

    Each process knows the bytes of one pipeline stage only. If all layers are alike, the largest stage's
    bytes follow. Otherwise stages of different bytes are refused when the region is opened.
    """
    own = config.worker_kv_bytes_per_block
    if config.parallel.pp_size == 1 or len(config.groups) != 1:
        return own
    (group,) = config.groups
    if not group.layer_names or own % len(group.layer_names):
        return own
    return own // len(group.layer_names) * max(len(stage) for stage in pipeline_stages(engine))


def pipeline_stages(engine: EngineContext) -> list[range]:
    """Return the layers of each pipeline stage, by number."""
    stages = engine.vllm_config.parallel_config.pipeline_parallel_size
    layers = engine.vllm_config.model_config.get_total_num_hidden_layers()
    return [range(*get_pp_indices(layers, stage, stages)) for stage in range(stages)]
