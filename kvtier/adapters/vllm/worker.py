"""The worker's side: vLLM's copy jobs given to kvtier's transfer engine."""

from __future__ import annotations

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from kvtier.adapters.vllm.manager import Slots
from kvtier.device.base import Blocks, KVCaches, PageRef, TransferEngine
from kvtier.errors import TransferError
from kvtier.memory.region import Region


def as_kv_caches(caches: CanonicalKVCaches) -> KVCaches:
    """See vLLM's canonical KV caches as kvtier's: tensors of int8 pages, and each group's references."""
    tensors = tuple(_as_pages(tensor.tensor, tensor.page_size_bytes) for tensor in caches.tensors)
    groups = tuple(
        tuple(PageRef(ref.tensor_idx, ref.page_size_bytes) for ref in refs) for refs in caches.group_data_refs
    )
    return KVCaches(tensors, groups)


def _as_pages(tensor: torch.Tensor, page_bytes: int) -> torch.Tensor:
    if tensor.dtype == torch.int8 and tensor.ndim == 2 and tensor.shape[1] == page_bytes:
        return tensor
    return tensor.view(torch.int8).view(-1, page_bytes)


class KVTierWorker(OffloadingWorker):
    """Copies between the KV cache of one worker and its area of the shared slots."""

    def __init__(self, engine: TransferEngine, region: Region) -> None:
        self._engine = engine
        self._region = region

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """See vLLM."""
        self._engine.submit_store(job_id, _blocks(src_spec), _slots(dst_spec))
        return True

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """See vLLM."""
        self._engine.submit_load(job_id, _slots(src_spec), _blocks(dst_spec), expedited=expedited)
        return True

    def get_finished(self) -> list[TransferResult]:
        """See vLLM.

        Raises:
            TransferError: a copy failed twice. vLLM cannot be told in another way here, and going on
                would serve bytes that are not the prompt's.
        """
        results = []
        for finished in self._engine.finished():
            if finished.error is not None:
                raise TransferError(f"copy job {finished.transfer_id} failed twice: {finished.error}") from (
                    finished.error
                )
            results.append(TransferResult(finished.transfer_id, True, finished.nbytes, finished.seconds))
        return results

    def wait(self, job_ids: set[int]) -> None:
        """See vLLM: called before blocks of running copies are given on."""
        self._engine.wait(job_ids)

    def shutdown(self) -> None:
        """See vLLM."""
        self._engine.close()
        self._region.close()


def _slots(spec: LoadStoreSpec) -> list[int]:
    if not isinstance(spec, Slots):
        raise TypeError(f"a copy job of kvtier names slots, not {type(spec).__name__}")
    return spec.slots


def _blocks(spec: GPULoadStoreSpec) -> Blocks:
    return Blocks(spec.block_ids.astype("int64"), tuple(spec.group_sizes), tuple(spec.block_indices))
