"""vLLM's own tiering, for benchmarks. On a GPU it uses its own copies, on the CPU kvtier's.

vLLM's tiering spec refuses to make a worker on the CPU platform, although its scheduler side, its region and
its tiers work there. The worker in this module copies with kvtier's CPU engine. So both sides of a comparison
copy in the same way, and differ only in their rules, tiers and threads.
"""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvtier._device.auto import open_transfer_engine
from kvtier._memory.layout import SlotLayout
from kvtier._memory.worker_status import WorkerStatus, status_table_bytes
from kvtier.adapters.vllm._manager import Slots
from kvtier.adapters.vllm._worker import KVTierWorker, as_blocks, as_kv_caches


class NativeTieringSpec(TieringOffloadingSpec):
    """vLLM's tiering spec, with a different worker on the CPU."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return the worker. vLLM calls this once."""
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        caches = as_kv_caches(kv_caches)
        parallel = self.config.parallel
        layout = SlotLayout.make(caches.page_bytes, self.blocks_per_chunk, parallel.rank, parallel.world_size)
        region: Any = _NativeRegion(
            SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            ),
            self.num_chunks,
            self.kv_bytes_per_chunk,
        )
        table = memoryview(bytearray(status_table_bytes(self.num_chunks, 1)))
        row = WorkerStatus(table, self.num_chunks, 0)  # never read
        engine = open_transfer_engine(caches, layout, region)
        return _NativeWorker(engine, region, row, self.blocks_per_chunk)


class _NativeRegion:
    """Adapts vLLM's region to kvtier's copy engine."""

    def __init__(self, region: SharedOffloadRegion, slots: int, chunk_bytes: int) -> None:
        self.slots = slots
        self.chunk_bytes = chunk_bytes
        self.address = int(region.base_tensor.data_ptr())
        self._region = region

    def view(self, slot: int) -> object:
        return self._region.base_tensor[slot * self.chunk_bytes : (slot + 1) * self.chunk_bytes]

    def close(self) -> None:
        self._region.cleanup()


class _NativeWorker(KVTierWorker):
    """Copies between the blocks and slots that vLLM's manager chose."""

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        chunks = as_blocks(src_spec).slots_needed(self._blocks_per_chunk)
        return super().submit_store(job_id, src_spec, Slots(_ids(dst_spec), chunks=chunks))

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        return super().submit_load(job_id, Slots(_ids(src_spec)), dst_spec, expedited)


def _ids(spec: LoadStoreSpec) -> list[int]:
    assert isinstance(spec, CPULoadStoreSpec)
    ids: list[int] = spec.chunk_ids.tolist()
    return ids
