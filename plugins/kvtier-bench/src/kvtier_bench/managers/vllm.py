"""vLLM's own managers, and kvtier's bridge, as ``kvtier bench core`` drives them."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.example.manager import ExampleSecondaryTierManager
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

from kvtier._core.tiering import Tiering
from kvtier.adapters.vllm._manager import KVTierManager

_NOTHING = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


def open_kvtier(core: Tiering, executor: Any) -> ManagerDriver:
    """Return a driver of kvtier's bridge over ``core``. ``executor`` runs the core's commands."""
    manager = KVTierManager(core, executor)
    return ManagerDriver(manager, lambda: core.is_idle)


def open_vllm(policy: str, tier: str, slots: int, chunk_bytes: int, folder: Path) -> ManagerDriver:
    """Make one of vLLM's managers, as its specs do.

    Args:
        tier: ``none``; ``memory``, vLLM's example tier; or ``fs``.
        folder: root directory of ``fs``.
    """
    if tier == "none":
        return ManagerDriver(CPUOffloadingManager(slots, policy), lambda: True)
    region = SharedOffloadRegion(f"kvtier-bench-{uuid.uuid4().hex}", slots, None, chunk_bytes, chunk_bytes)
    primary = CPUPrimaryTierOffloadingManager(slots, region, policy)
    secondary = _secondary_tier(tier, primary.get_kv_memoryview(), chunk_bytes, folder)
    manager = TieringOffloadingManager(primary, [secondary])
    return ManagerDriver(manager, lambda: not manager.has_pending_work())


class ManagerDriver:
    """Calls a manager as vLLM's scheduler does.

    ``begin`` starts a request, ``load`` pins chunks that were hits, ``reserve`` returns whether each chunk
    got a slot, and ``collect`` takes the statistics, as an engine does periodically.
    """

    hit: object = LookupResult.HIT
    miss: object = LookupResult.MISS

    def __init__(self, manager: OffloadingManager, is_quiet: Callable[[], bool]) -> None:
        self.lookup: Callable[[OffloadKey, Any], object] = manager.lookup
        self.is_quiet = is_quiet
        self._manager = manager
        self._names = itertools.count()

    def new_request(self) -> ReqContext:
        request = ReqContext(req_id=f"r{next(self._names)}")
        self._manager.on_new_request(request)
        return request

    def finish(self, request: ReqContext) -> None:
        self._manager.on_request_finished(request)

    def load(self, keys: Sequence[OffloadKey], request: ReqContext) -> object:
        return self._manager.prepare_load(keys, request)

    def loaded(self, keys: Sequence[OffloadKey], request: ReqContext) -> None:
        self._manager.complete_load(keys, request)

    def reserve(self, keys: Sequence[OffloadKey], request: ReqContext) -> bool:
        output = self._manager.prepare_store(keys, request)
        return output is not None and len(output.keys_to_store) == len(keys)

    def commit(self, keys: Sequence[OffloadKey], request: ReqContext) -> None:
        self._manager.complete_store(keys, request)

    def end_step(self) -> None:
        self._manager.on_schedule_end(_NOTHING)

    def collect(self) -> None:
        self._manager.get_stats()

    def close(self) -> None:
        self._manager.shutdown()


def _secondary_tier(tier: str, view: memoryview, chunk_bytes: int, folder: Path) -> SecondaryTierManager:
    spec = SimpleNamespace(
        config=_config(chunk_bytes),
        blocks_per_chunk=1,
        kv_events_config=SimpleNamespace(enable_kv_cache_events=False),
    )
    if tier == "memory":
        return ExampleSecondaryTierManager(spec, view, "example")
    return SecondaryTierFactory.create_secondary_tier({"type": "fs", "root_dir": str(folder)}, view, spec)


def _config(chunk_bytes: int) -> OffloadingConfig:
    return OffloadingConfig(
        groups=(),
        worker_kv_bytes_per_block=chunk_bytes,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="kvtier-bench",
        model=OffloadingModelConfig(name="bench", dtype="float16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
    )
