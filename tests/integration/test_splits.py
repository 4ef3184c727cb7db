"""vLLM's own mappings through kvtier's slots: each split reads chunks that any other split has written.

No engine runs. The caches are filled and read through views with named axes, as an attention backend
sees them, so the expected bytes of a rank do not come from the mappings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (
    derive_canonical_mappings,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from kvtier._device._engine import TransferEngine
from kvtier._device.backends.cpu import CpuRuntime
from kvtier._device.base import Blocks
from kvtier._memory.region import Region
from kvtier.adapters.vllm._compat import EngineContext
from kvtier.adapters.vllm._parallel import SlotShape, slot_layout, slot_shape
from kvtier.adapters.vllm._worker import as_kv_caches
from kvtier.errors import ConfigError, RegionError

BLOCKS, SLOTS, TOKENS, SIZE = 12, 8, 4, 2  # blocks of TOKENS tokens, heads of SIZE numbers
PER_CHUNK = 2
LAYERS = 4  # with sliding windows: two groups of two, which share two tensors
SPLITS = (1, 2, 4, 8)
SOURCES, TARGETS = (8, 3, 9, 2, 5, 7), (11, 0, 1, 6, 4)  # whole chunks; a load that enters the first one
INTO = (6, 1, 3)


@dataclass(frozen=True)
class Kind:
    """How a page is laid out.

    Attributes:
        axes: sizes of a page's axes in the backend's view; "H" stands for the heads.
        order: the axes in memory order.
    """

    axes: tuple[int | str, ...]
    order: tuple[int, ...]

    def sizes(self, heads: int) -> tuple[int, ...]:
        return tuple(heads if axis == "H" else int(axis) for axis in self.axes)

    def view(self, heads: int) -> torch.Tensor:
        """Make the tensor of one layer, in the backend's view."""
        sizes = self.sizes(heads)
        strides, step = [0] * len(sizes), 1
        for axis in reversed(self.order):
            strides[axis] = step
            step *= sizes[axis]
        whole = torch.zeros(BLOCKS * step, dtype=torch.float16)
        return whole.as_strided((BLOCKS, *sizes), (step, *strides))


KINDS = {
    "packed, heads inside": Kind(("H", TOKENS, 2 * SIZE), (1, 0, 2)),
    "packed, tokens inside": Kind(("H", TOKENS, 2 * SIZE), (0, 1, 2)),
    "apart, heads inside": Kind((2, TOKENS, "H", SIZE), (0, 1, 2, 3)),
    "apart, tokens inside": Kind((2, TOKENS, "H", SIZE), (0, 2, 1, 3)),
}
LATENT = Kind((TOKENS, 8), (0, 1))


class Model:
    """A model's KV cache as one worker would have it: numbers by layer, block and the axes of a page."""

    def __init__(self, kind: Kind, heads: int, windows: bool = False) -> None:
        self.kind, self.heads, self.windows = kind, heads, windows
        self.head_axis = kind.axes.index("H") if "H" in kind.axes else None
        noise = torch.Generator().manual_seed(1)
        sizes = (LAYERS, BLOCKS, *kind.sizes(heads))
        self.numbers = torch.rand(sizes, generator=noise).to(torch.float16)

    def part(self, tp: int, rank: int) -> torch.Tensor:
        """Return a rank's part of it."""
        if self.head_axis is None:
            return self.numbers
        each = max(1, self.heads // tp)
        return self.numbers.narrow(self.head_axis + 2, rank * self.heads // tp, each)

    def spec(self, tp: int, window: bool = False) -> FullAttentionSpec | SlidingWindowSpec:
        if self.head_axis is None:
            return MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float16)
        shape: dict[str, Any] = {
            "block_size": TOKENS,
            "num_kv_heads": max(1, self.heads // tp),
            "head_size": SIZE,
            "dtype": torch.float16,
        }
        return SlidingWindowSpec(**shape, sliding_window=8) if window else FullAttentionSpec(**shape)

    @property
    def groups(self) -> list[list[int]]:
        """The layers of each group."""
        return [[0, 2], [1, 3]] if self.windows else [list(range(LAYERS))]


class Rank:
    """One tensor-parallel rank: its caches, and the configurations that vLLM passes to kvtier."""

    def __init__(self, model: Model, tp: int, rank: int, pp: int = 1) -> None:
        self.model = model
        tensors = len(model.groups[0])
        self.views = [model.kind.view(max(1, model.heads // tp)) for _ in range(tensors)]
        groups = [
            KVCacheGroupSpec([f"layer{layer}" for layer in layers], model.spec(tp, window=number == 1))
            for number, layers in enumerate(model.groups)
        ]
        page = groups[0].kv_cache_spec.page_size_bytes
        size = page * BLOCKS * tensors
        self.kv_cache_config = KVCacheConfig(
            num_blocks=BLOCKS,
            kv_cache_tensors=[
                KVCacheTensor(size, group.layer_names, page * BLOCKS, page) for group in groups
            ],
            kv_cache_groups=groups,
        )
        parallel = SimpleNamespace(
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
            world_size=tp * pp,
            rank=rank,
        )
        counts = SimpleNamespace(
            get_total_num_kv_heads=lambda: model.heads,
            get_total_num_hidden_layers=lambda: LAYERS,
            hf_text_config=PretrainedConfig(num_key_value_heads=model.heads),
        )
        self.vllm_config: Any = SimpleNamespace(parallel_config=parallel, model_config=counts)
        self.engine = EngineContext(self.vllm_config, self.kv_cache_config)
        self.config = OffloadingConfig(
            groups=tuple(
                OffloadingGroupConfig(
                    tokens_per_block=TOKENS, layer_names=tuple(group.layer_names), group_id=number
                )
                for number, group in enumerate(groups)
            ),
            worker_kv_bytes_per_block=page * tensors,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id="engine",
            model=OffloadingModelConfig("model", "float16"),
            cache=OffloadingCacheConfig(tokens_per_hash=TOKENS, blocks_per_chunk=PER_CHUNK),
            parallel=OffloadingParallelConfig(
                rank=rank,
                world_size=tp * pp,
                tp_size=tp,
                pp_size=pp,
                pcp_size=1,
                dcp_size=1,
                data_parallel_index=0,
                data_parallel_size=1,
                data_parallel_rank_local=None,
                is_parallelism_agnostic=True,
            ),
            canonical_layout=True,
            kv_cache_layout="LBHNC",
        )

    @property
    def shape(self) -> SlotShape:
        return slot_shape(self.config, self.engine)

    def layers(self) -> Iterator[tuple[int, int]]:
        """Yield each layer with the number of its tensor."""
        for layers in self.model.groups:
            yield from ((layer, tensor) for tensor, layer in enumerate(layers))

    def caches(self) -> CanonicalKVCaches:
        """Return what vLLM's connector would pass to a worker."""
        views = {f"layer{layer}": self.views[tensor] for layer, tensor in self.layers()}
        mappings = derive_canonical_mappings(self.vllm_config, self.kv_cache_config, views)
        page = self.kv_cache_config.kv_cache_groups[0].kv_cache_spec.page_size_bytes
        return CanonicalKVCaches(
            [CanonicalKVCacheTensor(_bytes(view), page) for view in self.views],
            [
                [
                    CanonicalKVCacheRef(tensor, page, mappings.get(f"layer{layer}"))
                    for tensor, layer in enumerate(layers)
                ]
                for layers in self.model.groups
            ],
        )

    def transfer(self, region: Region, submit: Callable[[TransferEngine], None]) -> None:
        caches = as_kv_caches(self.caches(), canonical=True)
        layout = slot_layout(self.shape, caches.page_bytes, self.config.parallel.rank, stages=1)
        engine = TransferEngine(caches, layout, region, CpuRuntime())
        submit(engine)
        engine.close()
        assert [end.error for end in engine.finished()] == [None]


def _bytes(view: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.float16).set_(view.untyped_storage()).view(torch.int8).view(BLOCKS, -1)


def ranks(model: Model, tp: int) -> list[Rank]:
    return [Rank(model, tp, rank) for rank in range(tp)]


def _blocks(model: Model, group: int, ids: Sequence[int], first: int) -> Blocks:
    sizes = [len(ids) if number == group else 0 for number in range(len(model.groups))]
    return Blocks.make(ids, sizes, [first] * len(sizes))


def passes(model: Model, writing: int, reading: int) -> None:
    """Let one split's ranks store blocks of each group, and another split's ranks load them."""
    writers, readers = ranks(model, writing), ranks(model, reading)
    for group, layers in enumerate(model.groups):
        sources, targets = (_blocks(model, group, ids, first) for ids, first in ((SOURCES, 0), (TARGETS, 1)))
        with Region.anonymous(SLOTS, writers[0].shape.chunk_bytes) as region:
            for number, rank in enumerate(writers):
                for tensor, layer in enumerate(layers):
                    rank.views[tensor].copy_(model.part(writing, number)[layer])
                rank.transfer(region, lambda engine, own=sources: engine.submit_store(1, own, INTO))  # type: ignore[misc]
            for number, rank in enumerate(readers):
                rank.transfer(region, lambda engine, own=targets: engine.submit_load(1, INTO, own))  # type: ignore[misc]
                for tensor, layer in enumerate(layers):
                    found, part = rank.views[tensor], model.part(reading, number)[layer]
                    assert torch.equal(found[list(TARGETS)], part[list(SOURCES[1:])])


@pytest.mark.parametrize("windows", [False, True], ids=["one group", "windows too"])
@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_any_split_reads_any_other(kind: Kind, heads: int, windows: bool) -> None:
    model = Model(kind, heads, windows)
    for writing, reading in product(SPLITS, repeat=2):
        passes(model, writing, reading)


def test_latent_cache_ignores_split() -> None:
    model = Model(LATENT, 1)
    for writing, reading in product(SPLITS, repeat=2):
        passes(model, writing, reading)


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("windows", [False, True])
def test_processes_expect_equal_slots(heads: int, windows: bool) -> None:
    model = Model(KINDS["packed, tokens inside"], heads, windows)
    shapes = {rank.shape for tp in SPLITS for rank in ranks(model, tp)}
    assert shapes == {SlotShape(1, len(model.groups[0]) * TOKENS * 4 * SIZE * heads, PER_CHUNK, "v1-hnd")}


def test_padding_is_left_out() -> None:
    (rank,) = ranks(Model(KINDS["packed, tokens inside"], 2), 1)
    plain = rank.shape
    (group,) = rank.kv_cache_config.kv_cache_groups
    group.kv_cache_spec = replace(group.kv_cache_spec, page_size_padded=4096)
    for tensor in rank.kv_cache_config.kv_cache_tensors:
        tensor.block_stride, tensor.layer_stride = 4096, 4096 * BLOCKS
    assert rank.shape == plain


# --- what cannot be proven ----------------------------------------------------------------------------


def test_unmapped_pages_are_refused() -> None:
    (rank,) = ranks(Model(KINDS["packed, tokens inside"], 2), 1)
    caches = rank.caches()
    caches.group_data_refs[0][1].mapping = None
    with pytest.raises(ConfigError, match=r"canonical_layout.*remove canonical_layout"):
        as_kv_caches(caches, canonical=True)


def test_single_layout_is_refused() -> None:
    (rank,) = ranks(Model(KINDS["packed, tokens inside"], 2), 1)
    rank.views = [view.contiguous().flatten(1) for view in rank.views]  # of a shape that vLLM does not know
    with pytest.raises(ConfigError, match=r"canonical_layout.*remove canonical_layout"):
        as_kv_caches(rank.caches(), canonical=True)


def test_unexpected_tensors_are_refused() -> None:
    (rank,) = ranks(Model(KINDS["packed, tokens inside"], 2), 1)
    for shape in (rank.shape, replace(rank.shape, areas=2)):  # of two tensor-parallel workers
        with pytest.raises(RegionError, match="64 bytes of a slot, but the engine says 256"):
            slot_layout(shape, (64,), 0, stages=1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"world_size": 4}, "4 workers are not 2 tensor-parallel ranks"),
        ({"is_parallelism_agnostic": False}, r"this KV cache \(FullAttentionSpec\)"),
    ],
    ids=["stages", "kind of cache"],
)
def test_irreversible_engine_is_refused(change: dict[str, Any], words: str) -> None:
    rank = ranks(Model(KINDS["packed, tokens inside"], 2), 2)[1]
    config = replace(rank.config, parallel=replace(rank.config.parallel, **change))
    with pytest.raises(ConfigError, match=f"^canonical_layout .*{words}.*; remove canonical_layout"):
        slot_shape(config, rank.engine)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_key_value_heads": 2, "swa_num_key_value_heads": 4},
        {"num_attention_heads": 8, "block_configs": [{"attention": {"n_heads_in_group": n}} for n in (4, 2)]},
    ],
    ids=["windows", "some layers"],
)
def test_layers_with_more_heads_are_refused(fields: dict[str, Any]) -> None:
    """vLLM lets two of four ranks write one head, although each rank has its own head in these layers."""
    rank = ranks(Model(KINDS["packed, tokens inside"], 4), 4)[1]
    model = rank.vllm_config.model_config
    model.get_total_num_kv_heads, model.hf_text_config = lambda: 2, PretrainedConfig(**fields)
    mapping = rank.caches().group_data_refs[0][0].mapping
    assert mapping is not None
    assert mapping.num_writers == 2
    with pytest.raises(ConfigError, match=r"but the model's number of KV heads is 2\..*; remove canonical"):
        slot_shape(rank.config, rank.engine)
    parallel = replace(rank.config.parallel, tp_size=2, world_size=2)
    assert slot_shape(replace(rank.config, parallel=parallel), rank.engine).is_canonical


# --- stages -------------------------------------------------------------------------------------------


def test_area_fits_largest_stage() -> None:
    model = Model(KINDS["packed, tokens inside"], 2)
    page = TOKENS * 4 * SIZE * 2
    for held in (1, 2, 3):  # three stages of four layers: 1, 2, 1
        rank = Rank(model, 1, 0, pp=3)
        layers = tuple(f"layer{number}" for number in range(held))
        config = replace(
            rank.config,
            canonical_layout=False,
            groups=(replace(rank.config.groups[0], layer_names=layers),),
            worker_kv_bytes_per_block=held * page,
        )
        shape = slot_shape(config, rank.engine)
        assert shape == SlotShape(3, 2 * page, PER_CHUNK)
        if held <= 2:
            assert slot_layout(shape, [page] * held, 1, stages=3).tensor_offsets[0] == 2 * page * PER_CHUNK
        else:
            with pytest.raises(RegionError, match="192 bytes of a slot, but the engine says 128"):
                slot_layout(shape, [page] * held, 1, stages=3)
