"""The spec that vLLM makes in the scheduler's process and in every worker."""

from __future__ import annotations

import logging
import mmap
from functools import partial
from importlib import metadata
from typing import Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.adapters.vllm import metrics
from kvtier.adapters.vllm.compat import EngineContext, engine_context
from kvtier.adapters.vllm.identity import engine_identity
from kvtier.adapters.vllm.manager import KVTierManager
from kvtier.adapters.vllm.worker import KVTierWorker, as_kv_caches
from kvtier.build import make_core, make_tiers, slots_for
from kvtier.config import TieringConfig
from kvtier.core.messages import SlotsReady
from kvtier.errors import ConfigError, RegionError
from kvtier.executor import Executor, ExecutorThread, NamedTier
from kvtier.identity import Identity
from kvtier.memory.region import Region

logger = logging.getLogger("kvtier.vllm")


class KVTierOffloadingSpec(OffloadingSpec):
    """Offloads through kvtier: ``"spec_name": "KVTierOffloadingSpec"``. See docs/vllm.md for the settings."""

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:  # noqa: ARG003
        """See vLLM."""
        return metrics.definitions()

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:  # noqa: ARG003
        """See vLLM 0.33."""
        return ("kvtier_version", "eviction_policy", "secondary_tiers")

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._settings = TieringConfig.from_extra_config(config.extra_config)
        if config.canonical_layout:
            raise ConfigError(
                "canonical_layout is not supported by this version: engines of different parallel layouts do "
                "not share chunks; remove it"
            )
        self._engine = engine_context()
        if self._engine is not None and self._engine.nodes > 1:
            raise ConfigError(
                f"the engine's workers are on {self._engine.nodes} nodes, which have no memory in common: "
                "kvtier needs all workers of an engine on one"
            )
        worker_bytes = config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk
        all_bytes = worker_bytes * config.parallel.world_size
        self._chunk_bytes = -(-all_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._manager: KVTierManager | None = None
        self._worker: KVTierWorker | None = None

    def get_manager(self) -> OffloadingManager:
        """See vLLM: called in the scheduler's process."""
        if self._manager is None:
            self._manager = self._make_manager()
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """See vLLM: called in each worker."""
        if self._worker is None:
            self._worker = self._make_worker(kv_caches)
        return self._worker

    def _make_manager(self) -> KVTierManager:
        region = self._open_region()
        region.claim()
        core = make_core(
            self._settings,
            windowed_groups=_windowed_groups(self.config, self._engine),
            track_changes=self.kv_events_config.enable_kv_cache_events,
        )
        tiers = make_tiers(self._settings)
        executor = ExecutorThread(partial(Executor, tiers, self._identity(tiers), region))
        executor.start()
        region.populate(lambda slots: executor.events.append(SlotsReady(slots)))
        return KVTierManager(
            core,
            executor,
            sources=[_source(tier) for tier in tiers],
            steps_ahead=self._engine.steps_ahead if self._engine is not None else 2,
            info=self._info(),
            on_shutdown=partial(_shut_down, executor, region, self._settings.drain_on_shutdown_s),
        )

    def _make_worker(self, kv_caches: CanonicalKVCaches) -> KVTierWorker:
        from kvtier.device.auto import open_transfer_engine
        from kvtier.memory.layout import SlotLayout

        caches = as_kv_caches(kv_caches)
        parallel = self.config.parallel
        layout = SlotLayout.make(
            caches.page_bytes, self.config.cache.blocks_per_chunk, parallel.rank, parallel.world_size
        )
        if layout.chunk_bytes != self._chunk_bytes:
            raise RegionError(
                f"the KV cache's tensors make chunks of {layout.chunk_bytes} bytes, but the engine says "
                f"{self._chunk_bytes}: this KV cache layout is not supported"
            )
        region = self._open_region()
        return KVTierWorker(open_transfer_engine(caches, layout, region), region)

    def _open_region(self) -> Region:
        slots = slots_for(self._settings, self._chunk_bytes)
        return Region.open(self.config.engine_id, slots, self._chunk_bytes)

    def _identity(self, tiers: list[NamedTier]) -> Identity:
        if self._engine is not None:
            return engine_identity(self.config, self._engine, self._settings.namespace)
        if tiers:
            raise ConfigError(
                "this version of vLLM does not let kvtier see the model's revision and quantisation, so what "
                "is kept in secondary tiers could not be told apart: remove secondary_tiers"
            )
        return Identity.make(self.config.model.name, {})

    def _info(self) -> dict[str, str]:
        return {
            "kvtier_version": metadata.version("kvtier"),
            "eviction_policy": self._settings.eviction_policy,
            "secondary_tiers": ",".join(self._settings.tier_names),
        }


def _windowed_groups(config: OffloadingConfig, engine: EngineContext | None) -> frozenset[int]:
    ids = [group.group_id for group in config.groups]
    return frozenset(group for group in ids if engine is None or engine.is_windowed(group))


def _source(tier: NamedTier) -> CacheHitSource:
    return CacheHitSource.DISK if tier.tier.medium == "disk" else CacheHitSource.EXTERNAL_UNSPECIFIED


def _shut_down(executor: ExecutorThread, region: Region, drain_s: float) -> None:
    if executor.close(drain_s):
        region.close()
    else:
        logger.error("a tier did not end within its time; its memory is left to the end of the process")
