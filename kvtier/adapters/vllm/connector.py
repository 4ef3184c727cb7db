"""``KVTierConnector``: vLLM's ``OffloadingConnector``, which reports failed loads and checks its stores.

The plain connector asserts that every copy succeeds. vLLM can recompute a request whose load failed if the
connector names it in ``failed_recving``. It would load the same chunks again in the next step, so the manager
answers every further lookup of the request with a miss. Each store is compared with the KV cache's own block
tables; chunks with other blocks are dropped. KV events describe whole chunks. Responses explain a prefix,
and tell a decode engine how long and where to wait for chunks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

# First: it refuses a vLLM that is too old and may lack the next imports.
from kvtier.adapters.vllm._compat import TRACKS_BLOCKS, EngineContext, outer_connector, providing_engine

# isort: split
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import yield_req_data
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    TransferJob,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvtier._config import TieringConfig
from kvtier.adapters.vllm._manager import KVTierManager
from kvtier.adapters.vllm._plugin import register
from kvtier.adapters.vllm._telemetry.events import ChunkEvents
from kvtier.adapters.vllm._worker import KVTierWorker
from kvtier.adapters.vllm.spec import KVTierOffloadingSpec
from kvtier.errors import ConfigError

_State = tuple[int, int, int]
"""A state that vLLM hands over to be stored: its group, its block, and the tokens before it."""


class KVTierConnector(OffloadingConnector):
    """Offloads as ``OffloadingConnector`` does; a request whose load fails is computed.

    Set ``"kv_connector": "KVTierConnector"``, ``"kv_load_failure_policy": "recompute"``. ConfigError if the
    policy is another one, or the spec is not kvtier's.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        self._outer = outer_connector()
        policy = (self._outer or vllm_config.kv_transfer_config).kv_load_failure_policy
        if policy != "recompute":
            raise ConfigError(
                f'KVTierConnector: kv_load_failure_policy is "{policy}", so requests would end with an error '
                'where a load fails: set it to "recompute", or use the OffloadingConnector'
            )
        self._engine = EngineContext(vllm_config, kv_cache_config, self, sees_blocks=True)
        with providing_engine(self._engine):
            super().__init__(vllm_config, role, kv_cache_config)
        self._last_tables: dict[str, Sequence[Sequence[int]]] = {}  # requests that ended since the last step
        self._unnoted_groups: list[int] = []  # vLLM does not offload them, and does not note their blocks
        self._manager: KVTierManager | None = None
        self._worker: KVTierWorker | None = None
        if self.connector_scheduler is not None:
            self._manager = _require(self.connector_scheduler.manager, KVTierManager)
            offloaded = [config.group_idx for config in self.connector_scheduler.config.kv_group_configs]
            groups = range(len(kv_cache_config.kv_cache_groups))
            self._unnoted_groups = [group for group in groups if group not in offloaded]
            if (tracker := self.connector_scheduler._events_tracker).self_describing_enabled:
                self.connector_scheduler._events_tracker = ChunkEvents(tracker)
        if self.connector_worker is not None:
            _require(self.connector_worker.spec, KVTierOffloadingSpec)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """See vLLM. It asks before it loads the model, if it has CUDA graphs.

        ConfigError for wrong settings, which would otherwise end the engine after it has loaded the model.
        """
        TieringConfig.from_extra_config(extra_config)
        return super().requires_piecewise_for_cudagraph(extra_config)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See vLLM: called in each worker, before its first step."""
        super().register_kv_caches(kv_caches)
        assert self.connector_worker is not None
        self._worker = _require(self.connector_worker.worker, KVTierWorker)
        self._worker.report_failed_loads()

    def unregister_kv_caches(self) -> None:
        """See vLLM 0.33: called in each worker before its KV cache is unmapped. No copy runs afterwards."""
        if self._worker is not None and self.connector_worker is not None:
            self.connector_worker.start_kv_transfers(OffloadingConnectorMetadata({}, {}))  # the last step's
            self._worker.suspend()

    def restore_kv_caches(self) -> None:
        """See vLLM 0.33: called in each worker after its KV cache was mapped again."""
        if self._worker is not None:
            self._worker.resume()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """See vLLM: called in each worker and step. Failed requests count as finished."""
        results = super().get_transfer_results(finished_req_ids)
        if self._worker is not None:
            results.failed_recving |= self._worker.take_failed_requests()
        return results

    def on_new_request(self, request: Request) -> None:
        """See vLLM: the scheduler's process. A request whose KV comes from another connector asks no tier."""
        params = request.kv_transfer_params
        if self._outer is not None and params and params.get("do_remote_prefill"):
            params.setdefault("kv_load_tiers", [])
        if self._manager is not None:
            self._manager.session = getattr(request, "session_id", None) or ""  # vLLM 0.33
        super().on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See vLLM: the scheduler's process. vLLM's connector forgets blocks from before a preemption.

        A load within the step cannot be reported as failed (0.33), so one that is audited takes its own time.
        """
        tokens, waits = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if self._manager is None:
            return tokens, waits
        self._manager.restart(request.request_id)
        if tokens and not waits and self._manager.is_audited(request.request_id):
            self.scheduler._current_batch_sync_loads.discard(request.request_id)
            waits = True
        return tokens, waits

    def _max_loadable_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """See vLLM, which calls it before a lookup.

        A ring buffer can hold the keys of an unfinished block, and no load fills it. So loads end with a
        block if the model has one. The engine always computes the prompt's last token.
        """
        bound: int | None = super()._max_loadable_tokens(request, num_computed_tokens)
        if not self._unnoted_groups:
            return bound
        block = math.lcm(*(group.tokens_per_block for group in self.scheduler.config.kv_group_configs))
        end = (request.num_tokens - 1) // block * block
        if self.scheduler._sliding_window_groups:  # vLLM's lookup takes one from the bound
            end += 1
        return max(0, end - num_computed_tokens if bound is None else min(bound, end - num_computed_tokens))

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """See vLLM: the scheduler's process. Before 0.33 it does not note the blocks of other connectors."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if not TRACKS_BLOCKS:
            for group in blocks.get_block_ids():
                self.scheduler._current_batch_allocated_block_ids.update(filter(None, group))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """See vLLM: called in the scheduler's process in each step. Stores of wrong blocks copy nothing.

        All KV cache groups share a pool of blocks. vLLM does not note blocks of groups that it does not
        offload, so their new owners would not wait for a store that still reads them.
        """
        if self._unnoted_groups:
            noted = self.scheduler._current_batch_allocated_block_ids
            for _, groups, _ in yield_req_data(scheduler_output):
                for group in self._unnoted_groups if groups else ():
                    noted.update(filter(None, groups[group]))
        state = scheduler_output.kv_connector_block_state
        handed_over = {}
        if state is not None and state.boundary_state_offloads:
            handed_over = self._storable(state.boundary_state_offloads)
            state = replace(state, boundary_state_offloads=handed_over)
            scheduler_output = replace(scheduler_output, kv_connector_block_state=state)
        self._engine.note_step(scheduler_output)
        preempted = scheduler_output.preempted_req_ids
        begun = self._begun_loads(preempted) if preempted else ()
        for jobs, job_id in begun:  # hidden: before 0.33 vLLM asserts that all their jobs are stores
            jobs.discard(job_id)
        metadata: Any = super().build_connector_meta(scheduler_output)
        for jobs, job_id in begun:
            jobs.add(job_id)
        for job in metadata.store_jobs.values():
            if not self._names_right_blocks(job, {block for _, block, _ in handed_over.get(job.req_id, ())}):
                nothing = [0] * len(job.src_spec.group_sizes)
                job.src_spec = GPULoadStoreSpec([], group_sizes=nothing, block_indices=nothing)
        if self._last_tables:
            self._last_tables.clear()
        return metadata

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See vLLM: called in the scheduler's process; models with one KV cache group."""
        self._last_tables[request.request_id] = [block_ids]
        return self._with_params(request, super().request_finished(request, block_ids))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See vLLM: called in the scheduler's process."""
        self._last_tables[request.request_id] = block_ids
        return self._with_params(request, super().request_finished_all_groups(request, block_ids))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """See vLLM: called in the scheduler's process with the reports of a step's workers."""
        if self._manager is not None and connector_output.failed_recving:
            self._manager.fail_loads(connector_output.failed_recving)
        if self._manager is not None and connector_output.invalid_block_ids:
            self._manager.fail_stores()
        if connector_output.kv_connector_worker_meta is not None:  # else no copy has ended
            super().update_connector_output(connector_output)

    def reset_cache(self) -> bool | None:
        """See vLLM: the scheduler's process. vLLM's own fails after a reset without a later step."""
        scheduler = self.scheduler
        flushed, scheduler._current_batch_jobs_to_flush = scheduler._current_batch_jobs_to_flush, set()
        done = super().reset_cache()
        scheduler._current_batch_jobs_to_flush |= flushed
        return done

    def _begun_loads(self, preempted: Collection[str]) -> list[tuple[set[int], int]]:
        """Return the loads that this step begins for preempted requests, each with its request's jobs.

        A reset preempts requests between two steps, so the next step can load them.
        """
        scheduler = self.scheduler
        return [
            (scheduler._req_status[job.req_id].transfer_jobs, job_id)
            for job_id, job in scheduler._current_batch_load_jobs.items()
            if job.req_id in preempted
        ]

    def _storable(self, states: Mapping[str, Sequence[_State]]) -> dict[str, list[_State]]:
        """Return the states that requests allow to be stored.

        vLLM's connector ends the engine if a part of a block lies behind a client's ``max_offload_tokens``.
        """
        found = {}
        for req_id, entries in states.items():
            status = self.scheduler._req_status.get(req_id)
            bound = None if status is None else status.max_offload_tokens
            found[req_id] = [entry for entry in entries if bound is None or entry[2] <= bound]
        return found

    def _names_right_blocks(self, job: TransferJob, handed_over: set[int]) -> bool:
        """Return whether a store names blocks of its request, or states that vLLM handed over."""
        named, begin = job.src_spec, 0
        groups = [config.group_idx for config in self.scheduler.config.kv_group_configs]
        for group, size, place in zip(groups, named.group_sizes, named.block_indices, strict=True):
            blocks = named.block_ids[begin : begin + size].tolist()
            begin += size
            if handed_over.issuperset(blocks):
                continue
            if (table := self._last_tables.get(job.req_id)) is not None:
                held = table[group][place:]
            else:
                cache = self._kv_cache_manager.get_blocks(job.req_id)
                held = [block.block_id for block in cache.blocks[group][place:]]
            if held[:size] != blocks and not may_hold(held, blocks):
                return False
        return True

    def _with_params(
        self, request: Request, result: tuple[bool, dict[str, Any] | None]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return the result of vLLM's connector, with kvtier's parameters of the response."""
        delays_free, params = result
        if self._manager is None or request.status is RequestStatus.FINISHED_ABORTED:
            return result
        asked = request.kv_transfer_params if self._outer is None else None  # else another one brings it
        ours = self._manager.response_params(request.request_id, asked)
        return delays_free, params or ours


def may_hold(table: Sequence[int], named: Sequence[int]) -> bool:
    """Return whether ``named`` are blocks of ``table``, in order, starting at its front.

    A block that has left a window is 0 in the table; vLLM forgets it when another request gets it.
    """
    if not named:
        return True
    if not table or table[0] not in (named[0], 0):
        return False
    known, places = set(table), iter(table)
    return all(block in places for block in named if block in known or 0 not in known)


def _require(part: object, kind: type[Any]) -> Any:
    if not isinstance(part, kind):
        raise ConfigError(
            f"KVTierConnector works with kvtier's spec only, not with {type(part).__module__}: set spec_name "
            "in kv_connector_extra_config to KVTierOffloadingSpec"
        )
    return part


register()  # vLLM looks up the class by name for the statistics of MultiConnector's children
