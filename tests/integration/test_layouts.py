"""vLLM's KV cache layouts of all platforms: stored chunks load back byte for byte.

vLLM's own code places the layers in one allocation, makes the connector's tensors and registers them
with the worker. Here they are CPU tensors, regardless of the layout's platform.
"""

from __future__ import annotations

import inspect
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.config import ModelConfig, ParallelConfig
from vllm.config.aux_output import AuxOutputConfig
from vllm.distributed.aux_output_connector import connector as aux_outputs
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    create_kv_cache_views,
    iter_layer_specs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadingWorker,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    ScheduleEndContext,
)

from kvtier.adapters.vllm._compat import CAPS_HITS_BY_EXPERTS, EngineContext, providing_engine
from kvtier.adapters.vllm._manager import Slots
from kvtier.adapters.vllm._parallel import with_chunk_size
from kvtier.adapters.vllm.spec import KVTierOffloadingSpec
from kvtier.errors import ConfigError, RegionError
from kvtier.keys import pack_key
from tests.common import PATIENCE_S
from tests.integration.conftest import from_vllm

try:
    from vllm.v1.core import kv_cache_planning
except ImportError:  # before vLLM 0.33
    kv_cache_planning = kv_cache_utils

NUM_BLOCKS = 24
BLOCK_TOKENS = 16
FULL = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
WINDOW = SlidingWindowSpec(
    block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, sliding_window=64
)
LATENT = MLAAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=72, dtype=torch.bfloat16)
STATE = MambaSpec(
    block_size=BLOCK_TOKENS,
    shapes=((3, 10), (2, 8, 4)),
    dtypes=(torch.bfloat16, torch.float32),
    mamba_cache_mode="align",
)
WIDE = replace(FULL, num_kv_heads=6)
RING = CircularBufferSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """A KV cache: its groups, each a spec and a number of layers, and the layout of the allocation."""

    groups: Sequence[tuple[KVCacheSpec, int]]
    layout: KVCacheLayout = KVCacheLayout.LBNHC
    kernel_block_tokens: int | None = None


def each(*specs: KVCacheSpec) -> UniformTypeKVCacheSpecs:
    """Make the spec of a group whose layers differ."""
    named = {f"uneven.{number}": spec for number, spec in enumerate(specs)}
    return UniformTypeKVCacheSpecs(block_size=BLOCK_TOKENS, kv_cache_specs=named)


CASES = {
    "full attention": Case([(FULL, 3)]),
    "heads outside of tokens": Case([(FULL, 3)], KVCacheLayout.LBHNC),
    "latent attention": Case([(LATENT, 3)]),
    "kernels with smaller blocks": Case([(FULL, 2)], kernel_block_tokens=4),
    "groups over the same tensors": Case([(FULL, 2), (WINDOW, 2), (WINDOW, 2)]),
    "groups of unlike size": Case([(FULL, 3), (WINDOW, 2)]),
    "padded attention": Case(
        [
            (replace(FULL, page_size_padded=2560), 2),
            (replace(WINDOW, num_kv_heads=1, page_size_padded=2560), 2),
        ]
    ),
    "states beside attention": Case([(FULL, 2), (replace(STATE, page_size_padded=FULL.page_size_bytes), 4)]),
    "states alone": Case([(STATE, 3)]),
    "layers of unlike width": Case([(each(FULL, WIDE, FULL), 3)]),
    "latent attention and an index": Case([(each(LATENT, replace(LATENT, head_size=40)), 2)]),
    "one packed block of all layers": Case([(FULL, 3)], KVCacheLayout.BLHNC),
    "packed, groups of unlike pages": Case(
        [(FULL, 3), (replace(WINDOW, num_kv_heads=6), 2)], KVCacheLayout.BLHNC
    ),
    "packed, with states": Case([(LATENT, 2), (STATE, 3)], KVCacheLayout.BLHNC),
}


class Cache:
    """A KV cache made and registered as vLLM does it."""

    def __init__(self, case: Case, blocks_per_chunk: int, *, sees_blocks: bool = True) -> None:
        groups = [
            KVCacheGroupSpec([*_names(spec, number, layers)], spec)
            for number, (spec, layers) in enumerate(case.groups)
        ]
        self.vllm_config = _vllm_config(case, blocks_per_chunk)
        self.config: KVCacheConfig = kv_cache_planning.get_kv_cache_config_from_groups(
            self.vllm_config, groups, 1 << 20
        )
        self.nbytes = self.config.kv_cache_tensors[0].size
        self.memory = torch.randint(-128, 128, (self.nbytes,), dtype=torch.int8)
        self.caches = self._views(self.memory, case)
        self._case = case
        with providing_engine(EngineContext(self.vllm_config, self.config, sees_blocks=sees_blocks)):
            self.spec = KVTierOffloadingSpec(build_offloading_config(self.vllm_config, self.config))
        self.connector = OffloadingConnectorWorker(self.spec, self.vllm_config, self.config)

    def register(self) -> OffloadingWorker:
        self.connector.register_kv_caches(self.caches)
        assert self.connector.worker is not None
        return self.connector.worker

    def pages_of(self, group: int, blocks: Sequence[int]) -> torch.Tensor:
        """Return a mask of the memory that the pages of these blocks occupy."""
        mask = torch.zeros(self.nbytes, dtype=torch.int8)
        views = self._views(mask, self._case)
        for name in self.config.kv_cache_groups[group].layer_names:
            view = views[name].view(torch.int8)
            per_block = view.shape[0] // NUM_BLOCKS
            for block in blocks:
                view[block * per_block : (block + 1) * per_block] = 1
        return mask.bool()

    def read(self, group: int, block: int) -> list[torch.Tensor]:
        """Return the bytes of a block, layer after layer, as the engine sees them."""
        pages = []
        for name in self.config.kv_cache_groups[group].layer_names:
            view = self.caches[name].view(torch.int8)
            per_block = view.shape[0] // NUM_BLOCKS
            pages.append(view[block * per_block : (block + 1) * per_block].clone())
        return pages

    def _views(self, memory: torch.Tensor, case: Case) -> dict[str, torch.Tensor]:
        specs = {
            name: spec
            for group in self.config.kv_cache_groups
            for name, spec in zip(group.layer_names, _each_layer(group), strict=True)
        }
        views: dict[str, torch.Tensor] = {}
        for tensor in self.config.kv_cache_tensors:
            spec = specs[tensor.layers[0]]
            made = create_kv_cache_views(
                memory, spec, NUM_BLOCKS, case.layout, tensor, case.kernel_block_tokens
            )
            views.update(zip(tensor.layers, made, strict=True))
        return views


def _names(spec: KVCacheSpec, group: int, layers: int) -> Iterator[str]:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        yield from spec.kv_cache_specs
    else:
        yield from (f"layers.{group}.{number}" for number in range(layers))


def _each_layer(group: KVCacheGroupSpec) -> list[KVCacheSpec]:
    specs = list(iter_layer_specs(group.kv_cache_spec))
    return specs if len(specs) == len(group.layer_names) else specs * len(group.layer_names)


def _vllm_config(case: Case, blocks_per_chunk: int) -> Any:
    """Make the part of vLLM's configuration that vLLM's code reads here."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            engine_id=f"layouts-{uuid.uuid4()}",
            kv_connector_extra_config={"cpu_bytes_to_use": "4MiB", "blocks_per_chunk": blocks_per_chunk},
        ),
        parallel_config=SimpleNamespace(
            rank=0,
            world_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            distributed_executor_backend="uni",
            nnodes_within_dp=1,
            enable_fault_tolerance=False,
        ),
        model_config=SimpleNamespace(
            is_mm_prefix_lm=False,
            is_diffusion=False,
            model="layouts",
            dtype="bfloat16",
            use_mla=False,
            get_total_num_kv_heads=lambda: 2,
            max_model_len=8192,
            pooler_config=None,
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto",
            kv_cache_layout=case.layout.name,
            get_resolved_kv_cache_layout=lambda: case.layout,
            enable_prefix_caching=True,
            prefix_match_unit=None,
            block_size=BLOCK_TOKENS,
            num_gpu_blocks_override=NUM_BLOCKS,
            prefix_cache_retention_interval=None,
        ),
        instance_id="layouts",
        attention_config=SimpleNamespace(hisparse_config=None),
        lora_config=None,
        scheduler_config=SimpleNamespace(policy="fcfs"),
        compilation_config=SimpleNamespace(static_forward_context={}),
        kv_events_config=None,
        use_v2_model_runner=False,
        max_concurrent_batches=2,
    )


def job(groups: int, group: int, blocks: Sequence[int], first: int) -> GPULoadStoreSpec:
    sizes, firsts = [0] * groups, [0] * groups
    sizes[group], firsts[group] = len(blocks), first
    return GPULoadStoreSpec(list(blocks), group_sizes=sizes, block_indices=firsts)


def finish(worker: OffloadingWorker, number: int) -> None:
    worker.wait({number})
    assert [result.job_id for result in worker.get_finished()] == [number]


@pytest.mark.parametrize("blocks_per_chunk", [1, 3])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_only_loaded_blocks_change(case: Case, blocks_per_chunk: int) -> None:
    cache = Cache(case, blocks_per_chunk)
    worker = cache.register()
    groups = len(cache.config.kv_cache_groups)
    stored, loaded = [5, 6, 7, 2, 11, 10][: 2 * blocks_per_chunk], [20, 3, 4][: 1 + blocks_per_chunk]
    first = blocks_per_chunk - 1  # the load enters the first chunk at its last block
    slots = [9, 4]
    try:
        for group in range(groups):
            cache.memory.random_(-128, 128)
            before = [cache.read(group, block) for block in stored[first:][: len(loaded)]]
            chunks = [0] * group + [2]
            worker.submit_store(group, job(groups, group, stored, 0), Slots(slots, chunks=chunks))
            finish(worker, group)
            cache.memory.random_(-128, 128)
            others = cache.memory.clone()
            worker.submit_load(groups + group, Slots(slots), job(groups, group, loaded, first))
            finish(worker, groups + group)
            after = [cache.read(group, block) for block in loaded]
            assert all(_same(*pair) for pair in zip(before, after, strict=True))
            untouched = ~_owned(cache, group, loaded, case)
            assert torch.equal(cache.memory[untouched], others[untouched])
    finally:
        cache.connector.shutdown()


def _same(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> bool:
    return all(map(torch.equal, before, after))


def _owned(cache: Cache, group: int, blocks: Sequence[int], case: Case) -> torch.Tensor:
    """Return the mask of bytes that may change: pages, or whole blocks of a packed allocation."""
    if not case.layout.is_block_outermost:
        return cache.pages_of(group, blocks)
    mask = torch.zeros((NUM_BLOCKS, cache.nbytes // NUM_BLOCKS), dtype=torch.bool)
    mask[list(blocks)] = True
    return mask.flatten()


def test_first_step_keeps_loaded_scales() -> None:
    """vLLM's Triton backend sets all scales of a layer to 1 the first time it computes with the layer."""
    impl = object.__new__(TritonAttentionImpl)
    impl._is_per_token_head_quant = True
    pages = torch.zeros((NUM_BLOCKS, 2, BLOCK_TOKENS, 2 * (8 + 4)), dtype=torch.int8)
    cache = Cache(CASES["full attention"], 1)
    layers = {"quantized": SimpleNamespace(impl=impl, kv_cache=pages), "state": SimpleNamespace()}
    cache.vllm_config.compilation_config.static_forward_context = layers
    cache.register()
    try:
        loaded = pages.random_(-128, 128).clone()
        impl._ensure_scale_caches(pages)
        assert torch.equal(pages, loaded)
    finally:
        cache.connector.shutdown()


@from_vllm((0, 32), "pads no blocks in such a cache")
def test_partial_layout_is_refused() -> None:
    # vLLM's worker (0.32, 0.33) mistakes pages padded to an alignment for a packed block, and reports only
    # the first layer. The sizes do not add up then, and kvtier must offload nothing.
    case = Case([(replace(FULL, block_stride_alignment=768), 3)])
    cache = Cache(case, 1)
    with pytest.raises(RegionError, match="this KV cache layout is not supported"):
        cache.register()


def test_steps_that_fail_are_refused() -> None:
    """vLLM's worker ends a failed step like any other: its stores start with the next step."""
    cache = Cache(CASES["latent attention"], 1)
    cache.vllm_config.parallel_config.enable_fault_tolerance = True
    with (
        providing_engine(EngineContext(cache.vllm_config, cache.config)),
        pytest.raises(ConfigError, match="enable_fault_tolerance is not supported"),
    ):
        KVTierOffloadingSpec(cache.spec.config)


@pytest.mark.parametrize("answers", [False, True])
def test_answers_of_diffusion_are_refused(answers: bool) -> None:
    """The last forward pass of a read-only answer uses noise."""
    cache = Cache(CASES["full attention"], 1)
    cache.vllm_config.model_config.is_diffusion = True
    cache.spec.config.extra_config["offload_prompt_only"] = not answers
    refused = pytest.raises(ConfigError, match="not supported with diffusion models")
    with (
        providing_engine(EngineContext(cache.vllm_config, cache.config)),
        refused if answers else nullcontext(),
    ):
        KVTierOffloadingSpec(cache.spec.config)


@pytest.mark.parametrize("limits_hits", [False, True])
def test_routed_experts_are_refused_unless_they_limit_hits(
    limits_hits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's worker raises if it has no routed experts for a loaded chunk, for example after a restart."""
    monkeypatch.setattr("kvtier.adapters.vllm.spec.CAPS_HITS_BY_EXPERTS", limits_hits)
    cache = Cache(CASES["full attention"], 1)
    cache.vllm_config.aux_output_config = AuxOutputConfig(enable_return_routed_experts=True)
    refused = pytest.raises(ConfigError, match="enable_return_routed_experts is not supported before")
    with (
        providing_engine(EngineContext(cache.vllm_config, cache.config)),
        nullcontext() if limits_hits else refused,
    ):
        KVTierOffloadingSpec(cache.spec.config)


def test_vllm_limits_hits_by_routed_experts() -> None:
    source = inspect.getsource(aux_outputs)
    assert ("def cap_external_hit" in source) == CAPS_HITS_BY_EXPERTS


@pytest.mark.parametrize(
    "spec",
    [
        replace(FULL, non_causal=True),
        RSWASpec(**vars(FULL), rswa_window=64),
        each(FULL, replace(FULL, non_causal=True)),
    ],
    ids=["prefix LM", "window of generated tokens", "some layers"],
)
def test_unclean_prefixes_are_refused(spec: KVCacheSpec) -> None:
    with pytest.raises(ConfigError, match="does not depend on the tokens before them alone"):
        Cache(Case([(spec, 2)]), 1)


@pytest.mark.parametrize(("pooling", "is_refused"), [("LAST", False), ("MEAN", True), ("CLS", True)])
def test_pooling_of_all_tokens_is_refused(pooling: str, is_refused: bool) -> None:
    """Such a pooler fails in the engine's step if part of the prompt was loaded."""
    cache = Cache(CASES["full attention"], 1)
    model = cache.vllm_config.model_config
    model.attn_type = "decoder"
    model.pooler_config = SimpleNamespace(seq_pooling_type=pooling, tok_pooling_type="ALL")
    is_supported: Any = ModelConfig.is_prefix_caching_supported
    model.is_prefix_caching_supported = is_supported.fget(model)
    engine = EngineContext(cache.vllm_config, cache.config)
    assert (engine.prevents_reuse() is not None) is is_refused


def test_processes_that_schedule_alone_are_refused() -> None:
    """Each process would wait for reports of workers that only another process receives."""
    cache = Cache(CASES["full attention"], 1)
    parallel = cache.vllm_config.parallel_config
    parallel.distributed_executor_backend, parallel.world_size = "external_launcher", 2
    with (
        providing_engine(EngineContext(cache.vllm_config, cache.config)),
        pytest.raises(ConfigError, match="external_launcher is supported for one process only"),
    ):
        KVTierOffloadingSpec(cache.spec.config)


def test_ids_of_clients_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's connector fails in a step if a request reuses the id of one that has just ended."""
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    with pytest.raises(ConfigError, match="VLLM_DISABLE_REQUEST_ID_RANDOMIZATION is not supported"):
        Cache(CASES["full attention"], 1)


def test_snapshots_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are restored from one snapshot map the same file in ``/dev/shm``."""
    server, runtime = (Path(vllm.__file__).parent / "snapshot" / it for it in ("server.py", "runtime.py"))
    assert '"vllm.snapshot.server"' in runtime.read_text(encoding="utf-8")
    assert server.exists()
    monkeypatch.setattr(sys, "argv", [str(server), "--ready-file", "ready"])
    with pytest.raises(ConfigError, match="vllm snapshot is not supported"):
        Cache(CASES["full attention"], 1)


def test_workers_with_other_memory_are_refused() -> None:
    """Those workers' parts of a chunk would be zeros in every tier."""
    cache = Cache(CASES["full attention"], 1)
    with pytest.raises(ConfigError, match=r"workers \[0\] of the engine do not share its memory"):
        cache.spec.get_manager()
    cache.connector.shutdown()


def test_replicas_keep_memory_of_their_own() -> None:
    """With shared memory, each replica would remove the memory kept for the other one."""
    cache = Cache(CASES["full attention"], 1)
    parallel = cache.vllm_config.parallel_config
    parallel.node_rank_within_dp = 0
    make_independent: Any = ParallelConfig.reconfigure_for_independent_dp_rank
    owners = []
    for parallel.data_parallel_index in range(2):
        make_independent(parallel)  # vLLM does this with replicas of a dense model
        with providing_engine(EngineContext(cache.vllm_config, cache.config)):
            spec = KVTierOffloadingSpec(build_offloading_config(cache.vllm_config, cache.config))
        owners.append(spec._owner())
    assert owners[0] != owners[1]


def test_late_loads_are_refused() -> None:
    cache = Cache(CASES["latent attention"], 1)
    sparse = replace(cache.config, hisparse_host_num_blocks=8)
    with (
        providing_engine(EngineContext(cache.vllm_config, sparse)),
        pytest.raises(ConfigError, match="HiSparse is not supported"),
    ):
        KVTierOffloadingSpec(cache.spec.config)


@pytest.mark.parametrize(
    ("size", "first", "kept"),
    [
        (6, 0, [True, True]),
        (4, 2, [False, True]),  # the window begins inside its first chunk
        (5, 0, [False, False]),  # an unknown block is missing
        (3, 0, [False, False]),  # a block of each chunk is missing
    ],
)
def test_incomplete_chunk_never_returned(size: int, first: int, kept: list[bool]) -> None:
    cache = Cache(Case([(WINDOW, 2)]), blocks_per_chunk=3)
    worker, manager = cache.register(), cache.spec.get_manager()
    request = ReqContext(req_id="a")
    manager.on_new_request(request)
    keys = [OffloadKey(pack_key(bytes([number]) * 32)) for number in range(2)]
    try:
        output = _when_there_are_slots(manager, keys, request)
        worker.submit_store(1, job(1, 0, range(1, 1 + size), first), output.store_spec)
        finish(worker, 1)
        manager.complete_store(keys, request)
        found = [manager.lookup(key, request) is LookupResult.HIT for key in keys]
    finally:
        cache.connector.shutdown()
        manager.shutdown()
    assert found == kept


@pytest.mark.parametrize("ring", [0, 1, 2])
def test_groups_beside_one_without_prefixes(ring: int) -> None:
    """vLLM does not offload the group of such a ring buffer, and omits it from its jobs."""
    groups = [(FULL, 2), (WINDOW, 2)]
    groups.insert(ring, (RING, 2))
    offloaded = [group for group in range(3) if group != ring]
    cache = Cache(Case(groups), blocks_per_chunk=1)
    worker, manager = cache.register(), cache.spec.get_manager()
    request = ReqContext(req_id="a")
    manager.on_new_request(request)
    keys = [OffloadKey(pack_key(bytes([number]) * 32, group)) for group in offloaded for number in range(2)]
    try:
        output = _when_there_are_slots(manager, keys, request)
        before = [cache.read(group, block) for group in offloaded for block in (5, 6)]
        worker.submit_store(1, GPULoadStoreSpec([5, 6] * 2, [2, 2], [0, 0]), output.store_spec)
        finish(worker, 1)
        manager.complete_store(keys, request)
        hits = [manager.lookup(key, request) for key in keys]
        cache.memory.random_(-128, 128)
        source = manager.prepare_load(keys, request)
        worker.submit_load(2, source, GPULoadStoreSpec([20, 3] * 2, [2, 2], [0, 0]))
        finish(worker, 2)
        after = [cache.read(group, block) for group in offloaded for block in (20, 3)]
    finally:
        cache.connector.shutdown()
        manager.shutdown()
    assert hits == [LookupResult.HIT] * len(keys)
    assert all(_same(*pair) for pair in zip(before, after, strict=True))


def test_plain_connector_is_refused_beside_such_a_group() -> None:
    """A load could end inside a block, whose keys the ring lacks."""
    with pytest.raises(ConfigError, match="use KVTierConnector"):
        Cache(Case([(FULL, 2), (RING, 2)]), blocks_per_chunk=1, sees_blocks=False)


def _when_there_are_slots(
    manager: OffloadingManager, keys: Sequence[OffloadKey], request: ReqContext
) -> PrepareStoreOutput:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        manager.on_schedule_end(ScheduleEndContext([], ()))
        output = manager.prepare_store(keys, request)
        if output is not None and output.keys_to_store:
            return output
        time.sleep(0.001)
    raise AssertionError("the primary tier has no slots")


def chunk_size(case: Case, extra_config: dict[str, Any], retention: int | None = None) -> int:
    """Return the chunk size, in blocks, that kvtier chooses for a KV cache."""
    cache = Cache(case, blocks_per_chunk=1)
    cache.vllm_config.kv_transfer_config.kv_connector_extra_config = extra_config
    cache.vllm_config.cache_config.prefix_cache_retention_interval = retention
    given = build_offloading_config(cache.vllm_config, cache.config)
    engine = EngineContext(cache.vllm_config, cache.config)
    return with_chunk_size(given, engine).cache.blocks_per_chunk


def blocks_of(pages: int, block_tokens: int = BLOCK_TOKENS) -> Case:
    """Make a cache whose block takes ``pages`` times 16 KiB."""
    wide = replace(FULL, block_size=block_tokens, num_kv_heads=16 * pages * BLOCK_TOKENS // block_tokens)
    return Case([(wide, 2)])


@pytest.mark.parametrize(
    ("case", "chosen"),
    [
        (blocks_of(1), 16),  # 256 tokens, though half a mebibyte would need 32 blocks
        (blocks_of(3), 11),
        (blocks_of(8), 4),
        (blocks_of(32), 1),
        (blocks_of(4, 32), 8),
        (CASES["groups over the same tensors"], 16),
        (CASES["states beside attention"], 1),
        (CASES["states alone"], 1),
    ],
)
def test_default_chunk_size(case: Case, chosen: int) -> None:
    assert chunk_size(case, {"cpu_bytes_to_use": "4MiB"}) == chosen


def test_set_chunk_size_is_kept() -> None:
    assert chunk_size(blocks_of(1), {"blocks_per_chunk": 3}) == 3
    assert chunk_size(blocks_of(1), {"blocks_per_chunk": 1}) == 1
    assert chunk_size(blocks_of(1), {"block_size": 32}) == 2


def test_checkpoint_interval_is_kept() -> None:
    assert chunk_size(CASES["groups over the same tensors"], {}, retention=32) == 1
