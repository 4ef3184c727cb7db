"""The worker's side: passes vLLM's copy jobs to kvtier's transfer engine."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from weakref import WeakSet

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from kvtier._device._engine import TransferEngine
from kvtier._device.base import (
    Attempt,
    Audits,
    Blocks,
    Finished,
    KVCaches,
    PageMapping,
    PageRef,
    PieceRun,
    Pinning,
)
from kvtier._log import GuardedLogger
from kvtier._memory.region import Region
from kvtier._memory.worker_status import StatusField, Unfilled, WorkerStatus
from kvtier.adapters.vllm._manager import Slots
from kvtier.errors import (
    BlocksChangedError,
    ConfigError,
    DeviceLostError,
    DeviceStuckError,
    StateError,
    TransferError,
)

logger = GuardedLogger("kvtier.vllm")

_workers: WeakSet[KVTierWorker] = WeakSet()
os.register_at_fork(after_in_child=_workers.clear)  # the parent's: their copies do not end in the child


def as_kv_caches(
    caches: CanonicalKVCaches, canonical: bool = False, state_groups: frozenset[int] = frozenset()
) -> KVCaches:
    """Return vLLM's KV caches as kvtier's: tensors of int8 pages, and each group's references.

    ConfigError if slots hold canonical pages and the place of a page is unknown or differs by parallel
    layout.
    """
    tensors = tuple(
        tensor.tensor.view(torch.int8).view(-1, tensor.page_size_bytes) for tensor in caches.tensors
    )
    groups = tuple(
        tuple(
            PageRef(ref.tensor_idx, ref.page_size_bytes, _mapping(ref) if canonical else None) for ref in refs
        )
        for refs in caches.group_data_refs
    )
    return KVCaches(tensors, groups, state_groups)


def end_copies() -> None:
    """Wait until the workers of this process run no copy: the next call may unmap their KV cache."""
    for worker in tuple(_workers):
        worker._engine.drain()


def _mapping(ref: CanonicalKVCacheRef) -> PageMapping:
    mapping = ref.mapping
    if mapping is None or not mapping.parallelism_agnostic:
        raise ConfigError(
            "canonical_layout: vLLM does not tell where heads are in this KV cache layout; remove "
            "canonical_layout"
        )
    runs = tuple(
        PieceRun(
            run.local_offset,
            run.canonical_offset,
            run.fragment_size,
            run.num_fragments,
            run.local_stride,
            run.canonical_stride,
        )
        for run in mapping.runs
    )
    return PageMapping(mapping.canonical_page_size_bytes, runs, mapping.num_writers, mapping.writer_index)


@dataclass(frozen=True, slots=True)
class _Job:
    slots: Slots
    is_store: bool
    is_expedited: bool = False


class KVTierWorker(OffloadingWorker):
    """Copies between the KV cache of one worker and its area of the shared slots.

    vLLM asserts that copies succeed, so none is ever reported as failed. Chunks that a store did not fill are
    marked in the worker's row of the status table, and the scheduler's side drops them. A load that failed
    for good is reported to ``KVTierConnector`` if that is in use. ``shutdown`` closes engine and region.

    Args:
        groups: ids of the offloaded KV cache groups, as keys name them. Jobs have these groups in this order.
        flushes_late: see ``EngineContext``. The chunks of a store whose blocks were reassigned are dropped.
    """

    def __init__(
        self,
        engine: TransferEngine,
        region: Region,
        row: WorkerStatus,
        blocks_per_chunk: int = 1,
        groups: Sequence[int] = (0,),
        *,
        flushes_late: bool = False,
        state_groups: frozenset[int] = frozenset(),
    ) -> None:
        self._engine = engine
        self._region = region
        self._row = row
        self._blocks_per_chunk = blocks_per_chunk
        self._groups = groups
        self._flushes_late = flushes_late
        self._state_groups = state_groups
        self._ended: list[Finished] = []
        self._jobs: dict[int, _Job] = {}
        self._published: tuple[Pinning, Audits] = (Pinning(), Audits())
        self._failed_requests: set[str] | None = None
        self._is_suspended = False
        _workers.add(self)

    def report_failed_loads(self) -> None:
        """Report failed loads through ``take_failed_requests``, instead of staging them or raising."""
        self._failed_requests = set()
        self._engine.stages_loads = False

    def take_failed_requests(self) -> set[str]:
        """Return and clear the ids of requests whose loads were reported as finished but brought no bytes."""
        if not self._failed_requests:
            return set()
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def suspend(self) -> None:
        """Wait until no copy runs; fail all jobs until ``resume``, because the KV cache has no memory."""
        self._is_suspended = True
        self._engine.drain()

    def resume(self) -> None:
        self._is_suspended = False

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        slots = _slots(dst_spec)
        if self._is_suspended:
            return self._refuse(job_id, _Job(slots, is_store=True))
        # vLLM offers chunks of sliding windows although some of their blocks are gone, and omits those.
        width, states = self._blocks_per_chunk, self._state_groups
        if sum(slots.chunks) != len(slots.slots):
            raise ValueError(f"{len(slots.slots)} slots for {sum(slots.chunks)} chunks")
        counts = dict(enumerate(slots.chunks))
        chunks = [counts.get(group, 0) for group in self._groups]
        blocks, whole = as_blocks(src_spec).whole_chunks(chunks, width, states)
        filled = list(compress(slots.slots, whole))
        if len(filled) < len(slots.slots):
            self._row.mark(set(slots.slots).difference(filled), Unfilled.INCOMPLETE)
        self._jobs[job_id] = _Job(Slots(filled), is_store=True)
        self._engine.submit_store(job_id, blocks, filled)
        return True

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """See vLLM. The request of an expedited load runs already, so a failure cannot be reported."""
        slots = _slots(src_spec)
        job = _Job(slots, is_store=False, is_expedited=expedited)
        if self._is_suspended:
            return self._refuse(job_id, job)
        self._jobs[job_id] = job
        self._engine.submit_load(job_id, slots.slots, as_blocks(dst_spec), expedited=expedited)
        self._engine.hand_over()
        return True

    def get_finished(self) -> list[TransferResult]:
        """See vLLM. TransferError if a load failed in every way: the blocks would serve wrong bytes.

        Also if a load missed its deadline, and may still write when its blocks are another request's.
        """
        self._engine.hand_over()
        self._ended += self._engine.finished()
        self._publish()
        ended, self._ended = self._ended, []
        return [self._result(finished) for finished in ended]

    def wait(self, job_ids: set[int]) -> None:
        """See vLLM: called before blocks of running copies are reassigned. Raises as ``get_finished``."""
        self._engine.wait(job_ids)
        self._ended += self._engine.finished()
        for finished in self._ended:
            if finished.transfer_id in job_ids and isinstance(finished.error, DeviceStuckError):
                self._require_end(self._jobs[finished.transfer_id], finished.error)
        if self._flushes_late:
            for job in filter(None, map(self._jobs.get, job_ids)):
                if job.is_store:
                    self._row.mark(job.slots.slots, Unfilled.CHANGED)

    def shutdown(self) -> None:
        self._row[StatusField.STOPPED_MS] = int(time.monotonic() * 1000)
        self._engine.close()
        self._region.close()

    def _refuse(self, job_id: int, job: _Job) -> bool:
        self._jobs[job_id] = job
        error = StateError("the engine sleeps, its KV cache is unmapped")
        self._ended.append(Finished(job_id, 0, 0.0, error))
        return True

    def _require_end(self, job: _Job, error: BaseException) -> None:
        """Raise if a load was given up: its bytes may arrive when another request has its blocks."""
        if not job.is_store and isinstance(error, DeviceStuckError):
            raise TransferError(f"a load of {len(job.slots.slots)} chunks does not end: {error}") from error

    def _result(self, finished: Finished) -> TransferResult:
        job = self._jobs.pop(finished.transfer_id)
        if finished.error is not None:
            self._fail(job, finished.error)
            return TransferResult(job_id=finished.transfer_id, success=True)
        if finished.attempt is Attempt.RETRY:
            self._row.count(StatusField.STORES_REPEATED if job.is_store else StatusField.LOADS_REPEATED)
        elif finished.attempt is Attempt.STAGED:
            self._row.count(StatusField.LOADS_STAGED)
        return TransferResult(
            job_id=finished.transfer_id,
            success=True,
            transfer_size=finished.nbytes,
            transfer_time=finished.seconds,
        )

    def _fail(self, job: _Job, error: BaseException) -> None:
        if isinstance(error, DeviceLostError):
            self._row[StatusField.LOST] = 1
        self._require_end(job, error)
        if isinstance(error, BlocksChangedError):
            self._row.mark(job.slots.slots, Unfilled.CHANGED)
        elif job.is_store:
            logger.error("a store failed, its %d chunks are dropped: %s", len(job.slots.slots), error)
            self._row.mark(job.slots.slots)
            self._row.count(StatusField.STORES_DROPPED)
        elif not job.is_expedited and self._failed_requests is not None:
            logger.error(
                "a load of request %r failed, the engine computes it instead: %s", job.slots.request, error
            )
            self._failed_requests.add(job.slots.request)
            self._row.count(StatusField.LOADS_RECOMPUTED)
        else:
            raise TransferError(
                f"a copy of {len(job.slots.slots)} chunks failed in every way: {error}. With the connector "
                "KVTierConnector the engine would compute them instead"
            ) from error

    def _publish(self) -> None:
        """Write changed counts of pinned memory and audits to the status table."""
        pinning, audits = self._engine.pinning, self._engine.audits
        if (pinning, audits) != self._published:
            self._published = pinning, audits
            self._row[StatusField.PINNED_BYTES] = pinning.nbytes
            self._row[StatusField.PINNING_FAILED] = int(pinning.failed)
            self._row[StatusField.AUDITED] = audits.chunks
            self._row[StatusField.AUDITS_FAILED] = audits.failed


def _slots(spec: LoadStoreSpec) -> Slots:
    if not isinstance(spec, Slots):
        raise TypeError(f"a copy job of kvtier names slots, not {type(spec).__name__}")
    return spec


def as_blocks(spec: GPULoadStoreSpec) -> Blocks:
    return Blocks(spec.block_ids.astype("int64"), tuple(spec.group_sizes), tuple(spec.block_indices))
