"""``KVTierOffloadingSpec``, which vLLM creates in the scheduler's process and in every worker."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import metadata
from typing import Any

from kvtier._log import GuardedLogger

# First: it refuses a vLLM that is too old and may lack the next imports.
from kvtier.adapters.vllm._compat import (
    CAPS_HITS_BY_EXPERTS,
    SCHEDULE_ENDS_LAST,
    CacheHitSource,
    engine_context,
    is_for_snapshot,
    limit_refusals,
    outer_connector,
    warn_if_untested,
    watch_weights,
)

# isort: split
from vllm import envs
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingKVEventsConfig,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from kvtier._build import adopted_slots, make_core, make_tiers, slots_for, start_executor
from kvtier._config import TieringConfig
from kvtier._core.messages import Event, SlotsReady
from kvtier._core.slot_trailers import slot_trailers_bytes
from kvtier._core.tiering import Tiering
from kvtier._execution.executor import NamedTier, time_left
from kvtier._identity import Identity
from kvtier._isolation.process import AnyExecutor
from kvtier._memory import numa
from kvtier._memory.population import SlotPart
from kvtier._memory.region import Region
from kvtier._memory.slot_checksums import SlotChecksums, slot_checksums_bytes
from kvtier._memory.worker_status import StatusField, StatusTable, WorkerStatus, status_table_bytes
from kvtier.adapters.vllm._identity import engine_identity
from kvtier.adapters.vllm._manager import EngineFacts, KVTierManager
from kvtier.adapters.vllm._pages import page_format, prepare_scales
from kvtier.adapters.vllm._parallel import SlotShape, slot_layout, slot_shape, with_chunk_size
from kvtier.adapters.vllm._telemetry.events import location_of
from kvtier.adapters.vllm._telemetry.explain import Explainer
from kvtier.adapters.vllm._telemetry.metrics import Published, definitions
from kvtier.adapters.vllm._telemetry.steps import StepMeter
from kvtier.adapters.vllm._worker import KVTierWorker, as_kv_caches, end_copies
from kvtier.errors import ConfigError

logger = GuardedLogger("kvtier.vllm")

_FIRST_BYTES = 64 * 2**20  # allocated in some 30 ms, and faster from there than engines compute
_FIRST_SLOTS_S = 2.0


class KVTierOffloadingSpec(OffloadingSpec):
    """Offloads through kvtier: ``"spec_name": "KVTierOffloadingSpec"``. See docs/vllm.md for the settings."""

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:  # noqa: ARG003
        return definitions()

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:  # noqa: ARG003
        """See vLLM 0.33."""
        return ("kvtier_version", "eviction_policy", "secondary_tiers", "kv_hints")

    def __init__(self, config: OffloadingConfig) -> None:
        _log_like_vllm()
        self._engine = engine_context()
        neighbours = _neighbours()
        self._is_blind = bool(neighbours) and not self._engine.sees_blocks
        # Roles are no proof: NixlConnector receives in any of them, if a request says so.
        self._received = [] if self._is_blind else sorted(it["kv_connector"] for it in neighbours)
        config = with_chunk_size(config, self._engine)
        super().__init__(config)
        self._settings = TieringConfig.from_extra_config(config.extra_config)
        # vLLM's own connector announces parts of chunks, and no salts.
        self_describing = self._settings.self_describing_kv_events and self._engine.sees_blocks
        self.kv_events_config = OffloadingKVEventsConfig(config.enable_kv_cache_events, self_describing)
        self._refuse_unsupported()
        self._shape = slot_shape(config, self._engine)
        self._manager: KVTierManager | None = None
        self._worker: KVTierWorker | None = None

    def _refuse_unsupported(self) -> None:
        """Raise ConfigError for an engine that could give wrong tokens, hang or end."""
        if self._engine.nodes > 1:
            raise ConfigError(
                f"the engine's workers are on {self._engine.nodes} nodes, which do not share memory: "
                "kvtier needs all workers of an engine on one node"
            )
        if self._engine.schedules_alone:
            raise ConfigError(
                "external_launcher is supported for one process only: each process schedules for itself, and "
                'learns of its own worker\'s copies alone. Set distributed_executor_backend to "mp"'
            )
        if is_for_snapshot():
            raise ConfigError(
                "vllm snapshot is not supported: engines restored from one snapshot use the same memory, and "
                "overwrite one another's chunks. Remove kvtier, or start engines without a snapshot"
            )
        if self._engine.kv_cache_config.hisparse_host_num_blocks is not None:
            raise ConfigError(
                "HiSparse is not supported: vLLM loads chunks some steps after it has asked for them. They "
                "may have left by then. Remove hisparse_config, or kvtier"
            )
        if self._engine.vllm_config.parallel_config.enable_fault_tolerance:
            raise ConfigError(
                "enable_fault_tolerance is not supported: after a failed step vLLM continues with blocks "
                "that the step did not compute, and offers them to be stored. Remove it, or kvtier"
            )
        if self._engine.returns_experts and not CAPS_HITS_BY_EXPERTS:
            raise ConfigError(
                "enable_return_routed_experts is not supported before vLLM 0.33: the engine ends if it "
                "loads a chunk whose experts its workers do not remember. Remove it, or kvtier"
            )
        if getattr(envs, "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", False):  # a later vLLM may lack it
            raise ConfigError(
                "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION is not supported: vLLM's connector confuses requests "
                "of one id, so a client that uses an id again ends the engine. Unset it"
            )
        if not self._settings.offload_prompt_only and self._engine.vllm_config.model_config.is_diffusion:
            raise ConfigError(
                "offload_prompt_only: false is not supported with diffusion models: vLLM offers answers that "
                "end without a forward pass that computes their KV (diffusion_read_only). Remove the setting"
            )
        if (why := self._engine.prevents_reuse()) is not None:
            raise ConfigError(f"{why}, so vLLM turns off its prefix cache for it: remove kvtier, too")
        if not self._engine.sees_blocks:
            self._refuse_plain_connector()

    def _refuse_plain_connector(self) -> None:
        groups, tokens_per_hash = self.config.groups, self.config.cache.tokens_per_hash
        if len(groups) != len(self._engine.kv_cache_config.kv_cache_groups):
            raise ConfigError(
                "the model has KV cache groups that vLLM does not offload, such as ring buffers. "
                "OffloadingConnector loads without them, for wrong tokens: use KVTierConnector in its place"
            )
        has_states = any(self._engine.keeps_states(group.group_id) for group in groups)
        if has_states and {group.tokens_per_block > tokens_per_hash for group in groups} == {True}:
            raise ConfigError(
                "prefix_match_unit is smaller than a block. With OffloadingConnector, a client's "
                "max_offload_tokens can end the engine: use KVTierConnector in its place"
            )

    def get_manager(self) -> OffloadingManager:
        """See vLLM: called in the scheduler's process."""
        if self._manager is None:
            self._manager = self._make_manager()
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            self._worker = self._make_worker(kv_caches)
        return self._worker

    def _make_manager(self) -> KVTierManager:
        warn_if_untested()
        limit_refusals()
        self._warn_of_plain_connector()
        self._engine.forget_withdrawn_blocks()
        self._engine.watch_adapters()
        region = self._open_region(is_first=False)
        region.claim()
        region.start_guard()
        groups, width = self.config.groups, self.config.cache.blocks_per_chunk
        windowed = frozenset(it.group_id for it in groups if self._engine.is_windowed(it.group_id))
        chunk_tokens = {it.group_id: it.tokens_per_block * width for it in groups}
        core = make_core(
            self._settings,
            self._shape.chunk_bytes,
            windowed_groups=windowed,
            track_kv_events=self.kv_events_config.enable_kv_cache_events,
        )
        tiers = make_tiers(self._settings)
        slot_checksums = self._slot_checksums(region)
        status_table = self._status_table(region)
        identity = self._identity(tiers, status_table)
        if self._settings.keep_host_memory_s:
            core.table.adopt(region.trailers, adopted_slots(region.trailers, identity))
        executor = start_executor(self._settings, tiers, identity, region, slot_checksums)
        _populate(region, executor.events, _numa_parts(self._shape, status_table))
        manager = KVTierManager(
            core,
            executor,
            self._published(core, executor, tiers, status_table),
            EngineFacts(
                steps_ahead=self._engine.steps_ahead,
                names_resumed=self._engine.vllm_config.use_v2_model_runner,
                is_blind=self._is_blind,
                has_blocks=self._engine.has_blocks,
                why_not_stored=self._engine.why_not_stored,
            ),
            sources=[
                CacheHitSource.DISK if it.tier.medium == "disk" else CacheHitSource.EXTERNAL_UNSPECIFIED
                for it in tiers
            ],
            addresses={
                index: address for index, it in enumerate(tiers) if (address := it.tier.config.peer_address())
            },
            peers={address for tier in tiers for address in tier.tier.config.peer_addresses()},
            slot_checksums=slot_checksums,
            steps=self._step_meter(core, chunk_tokens, windowed),
            explainer=Explainer(self._settings.tier_names, chunk_tokens, self._settings.explain_rate),
            drain_s=self._settings.drain_on_shutdown_s,
            on_reset=end_copies,
            on_shutdown=partial(
                _shut_down, executor, region, status_table, self._settings.drain_on_shutdown_s
            ),
        )
        watch_weights(manager.on_new_weights)
        return manager

    def _status_table(self, region: Region) -> StatusTable:
        """Return the reports of the workers, which vLLM makes first; ConfigError if one has other memory."""
        table = StatusTable(self._reports(region), region.slots, self.config.parallel.world_size)
        if table.missing:
            region.close()
            raise ConfigError(
                f"workers {table.missing} of the engine do not share its memory, as on another node of a Ray "
                "cluster: kvtier needs all workers of an engine on one node"
            )
        return table

    def _warn_of_plain_connector(self) -> None:
        if self._is_blind:
            logger.warning(
                "nothing is stored: OffloadingConnector does not know the blocks that other connectors write "
                "to; use KVTierConnector in its place"
            )
        if self._settings.self_describing_kv_events and not self._engine.sees_blocks:
            logger.warning(
                "self_describing_kv_events has no effect: events of OffloadingConnector announce parts of "
                "chunks, which cannot be loaded, and omit salts; use KVTierConnector in its place"
            )

    def _published(
        self, core: Tiering, executor: AnyExecutor, tiers: Sequence[NamedTier], status_table: StatusTable
    ) -> Published:
        return Published(
            core,
            executor.activity,
            status_table,
            locations=[location_of(tier.tier) for tier in tiers],
            chunk_bytes=self._shape.chunk_bytes,
            self_describing=self.kv_events_config.self_describing_kv_events,
            info={
                "kvtier_version": metadata.version("kvtier"),
                "eviction_policy": self._settings.eviction_policy,
                "secondary_tiers": ",".join(self._settings.tier_names),
            },
        )

    def _step_meter(
        self, core: Tiering, chunk_tokens: dict[int, int], windowed: frozenset[int]
    ) -> StepMeter | None:
        """Return the meter of computing for ``load_gate``, in chunks of the group that vLLM asks for first.

        None if nothing has to be measured, so that everything is loaded.
        """
        if self._settings.load_gate == "off":
            return None
        front = next((group for group in chunk_tokens if group not in windowed), None)
        if front is None:
            logger.warning(
                "load_gate %r has no effect: it compares chunks of full attention, and the model has none",
                self._settings.load_gate,
            )
            return None
        core.shared.gate.window_chunks = sum(
            -(-self._engine.window_tokens(group) // chunk_tokens[group]) for group in windowed
        )
        return StepMeter(
            core,
            time.monotonic,
            chunk_tokens[front],
            group=front,
            stores_decodes=not self._settings.offload_prompt_only,
            ends_last=SCHEDULE_ENDS_LAST,
        )

    def _make_worker(self, kv_caches: CanonicalKVCaches) -> KVTierWorker:
        from kvtier._device.auto import open_transfer_engine

        prepare_scales(self._engine)
        groups = [group.group_id for group in self.config.groups]
        states = frozenset(at for at, group in enumerate(groups) if self._engine.keeps_states(group))
        caches = as_kv_caches(kv_caches, self._shape.is_canonical, states)
        parallel = self.config.parallel
        stages = self._engine.vllm_config.parallel_config.pipeline_parallel_size
        layout = slot_layout(self._shape, caches.page_bytes, parallel.rank, stages)
        region = self._open_region(is_first=parallel.rank == 0)
        if parallel.rank == 0:  # vLLM makes the scheduler, which claims the region, only after its warm-up
            region.start_guard(until_claimed=True)
        engine = open_transfer_engine(caches, layout, region, deadline_s=self._settings.copy_deadline_s)
        if (slot_checksums := self._slot_checksums(region)) is not None:
            engine.begin_audits(slot_checksums)
        row = WorkerStatus(self._reports(region), region.slots, parallel.rank)
        row[StatusField.NODE] = 0 if engine.node is None else engine.node + 1
        row[StatusField.PAGES] = page_format(self.config, self._engine)
        row[StatusField.OPENED] = 1
        blocks_per_chunk, flushes_late = self.config.cache.blocks_per_chunk, self._engine.flushes_late
        return KVTierWorker(
            engine, region, row, blocks_per_chunk, groups, flushes_late=flushes_late, state_groups=states
        )

    def _owner(self) -> str:
        """Return a word and a space for this engine among others on the machine, the same after a restart."""
        # vLLM numbers the replicas of a dense model by this index alone: each has the rank 0.
        rank, model = self.config.parallel.data_parallel_index, self.config.model.name
        digest = hashlib.sha256(f"{model}\0{self._settings.namespace}\0{rank}".encode()).hexdigest()[:16]
        shown = re.sub(r"[^A-Za-z0-9._-]", "-", model.rsplit("/", 1)[-1])[:40]
        return f"{shown}.{rank}.{digest} "

    def _reports(self, region: Region) -> memoryview:
        """Return the metadata from the table of workers' reports on."""
        return region.metadata[
            slot_trailers_bytes(region.slots) if self._settings.keep_host_memory_s else 0 :
        ]

    def _open_region(self, *, is_first: bool) -> Region:
        """Open the region. ``is_first``: this is the engine's first worker."""
        slots, keep_s = slots_for(self._settings, self._shape.chunk_bytes), self._settings.keep_host_memory_s
        metadata_bytes = status_table_bytes(slots, self.config.parallel.world_size)
        metadata_bytes += slot_trailers_bytes(slots) if keep_s else 0
        if self._settings.audit_rate:
            metadata_bytes += slot_checksums_bytes(slots, self._shape.areas)
        # A worker that outlives its engine keeps the region of its own start.
        return Region.open(
            f"{self.config.engine_id}.{self._engine.vllm_config.instance_id}",
            slots,
            self._shape.chunk_bytes,
            metadata_bytes=metadata_bytes,
            contents=f"{self._owner() if keep_s else ''}{slots} slots: {self._shape}",
            keep_s=keep_s,
            is_first=is_first,
        )

    def _slot_checksums(self, region: Region) -> SlotChecksums | None:
        """Return the expected checksums of slots, shared behind the status table; None without audits."""
        if not self._settings.audit_rate:
            return None
        workers, shape = self.config.parallel.world_size, self._shape
        return SlotChecksums.shared(
            region, self._settings.audit_rate, shape.areas, shape.area_bytes, is_shared=workers > shape.areas
        )

    def _identity(self, tiers: list[NamedTier], status_table: StatusTable) -> Identity:
        if not tiers:  # no chunk leaves this process
            return Identity.make(self.config.model.name, {})
        formats = [row[StatusField.PAGES] for row in status_table.rows]
        return engine_identity(
            self.config, self._engine, self._shape, self._settings, formats, received=self._received
        )


def _log_like_vllm() -> None:
    """Write kvtier's lines as vLLM's, with time and process, unless the user has configured a handler."""
    ours, theirs = GuardedLogger("kvtier").logger, GuardedLogger("vllm").logger
    if not ours.hasHandlers():
        ours.handlers = list(theirs.handlers)
        ours.setLevel(ours.level or theirs.level)


def _neighbours() -> Sequence[Mapping[str, Any]]:
    """Return the configurations of the engine's other connectors; ConfigError if one of them is kvtier's."""
    if (outer := outer_connector()) is None:
        return ()
    children = outer.kv_connector_extra_config.get("connectors") or [{"kv_connector": outer.kv_connector}]
    ours = KVTierOffloadingSpec.__name__
    others = [it for it in children if (it.get("kv_connector_extra_config") or {}).get("spec_name") != ours]
    if len(children) - len(others) > 1:
        raise ConfigError(
            f"{outer.kv_connector} has two connectors with kvtier's spec, which would use the same memory: "
            "keep one, and list all tiers in its secondary_tiers"
        )
    return others


def _numa_parts(shape: SlotShape, status_table: StatusTable) -> list[SlotPart]:
    """Return the NUMA node of each part of a slot, as far as workers, which vLLM makes first, reported it."""
    if len(numa.online()) < 2:
        return []
    nodes = [row[StatusField.NODE] - 1 if row[StatusField.NODE] else None for row in status_table.rows]
    if shape.areas < len(nodes) or len(set(nodes)) == 1:
        return [SlotPart(0, shape.chunk_bytes, nodes[0] if len(set(nodes)) == 1 else None)]
    size = shape.area_bytes
    return [SlotPart(rank * size, size, node) for rank, node in enumerate(nodes)]


def _populate(region: Region, events: deque[Event], parts: Sequence[SlotPart]) -> None:
    """Start allocating the slots; return when the first are usable, or after two seconds.

    The engine is ready when this returns, and its first requests should find slots. The rest follows in the
    background.
    """
    enough = threading.Event()
    first = min(region.slots, max(1, _FIRST_BYTES // region.chunk_bytes))
    ready = 0

    def on_ready(slots: range) -> None:
        nonlocal ready
        events.append(SlotsReady(slots, is_last=not slots))
        with lock:
            ready += len(slots)
            if ready >= first or not slots:
                enough.set()

    lock = threading.Lock()
    region.populate(on_ready, parts)
    if not enough.wait(_FIRST_SLOTS_S):
        logger.warning(
            "primary tier: %d of %d slots are ready after %g s; until the rest is allocated, misses and "
            "refused stores are counted with the reason 'starting'",
            ready,
            region.slots,
            _FIRST_SLOTS_S,
        )


def _shut_down(executor: AnyExecutor, region: Region, status_table: StatusTable, drain_s: float) -> None:
    """Drain and close, in the time that is left of ``drain_s`` after the workers, which vLLM awaits first."""
    now_s = time.monotonic()
    drain_s, close_s = time_left(drain_s, now_s - (status_table.stopped_s or now_s))
    end_by_s = now_s + drain_s + close_s
    if executor.close(drain_s, close_s):
        region.close(max(0.0, end_by_s - time.monotonic()))
    else:
        logger.error(
            "a tier did not close in time and may still use the primary tier's memory: the memory stays "
            "allocated until this process ends"
        )
