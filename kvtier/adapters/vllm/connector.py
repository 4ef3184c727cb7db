"""``KVTierConnector``: vLLM's ``OffloadingConnector``, which also reports failed loads to the engine, and
returns in responses what explains a prefix, and how long and where a decode engine is to wait for its chunks.

The plain connector asserts that every copy succeeds. vLLM can recompute a request whose load failed if the
connector names it in ``failed_recving``. It would load the same chunks again in the next step; to prevent
that, the manager answers every further lookup of the request with a miss.
"""

from __future__ import annotations

from typing import Any

# First: it refuses a vLLM that is too old, which might lack what is imported next.
from kvtier.adapters.vllm._compat import EngineContext, providing_engine

# isort: split
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvtier.adapters.vllm._manager import KVTierManager
from kvtier.adapters.vllm._worker import KVTierWorker
from kvtier.adapters.vllm.spec import KVTierOffloadingSpec
from kvtier.errors import ConfigError


class KVTierConnector(OffloadingConnector):
    """Offloads as ``OffloadingConnector`` does; a request whose load fails is computed.

    ``"kv_connector": "KVTierConnector"``, ``"kv_load_failure_policy": "recompute"``.

    Raises:
        ConfigError: the policy is another one, or the spec is not kvtier's.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        policy = vllm_config.kv_transfer_config.kv_load_failure_policy
        if policy != "recompute":
            raise ConfigError(
                f'KVTierConnector: kv_load_failure_policy is "{policy}", so requests would end with an error '
                'where a load fails: set it to "recompute", or use the OffloadingConnector'
            )
        with providing_engine(EngineContext(vllm_config, kv_cache_config)):
            super().__init__(vllm_config, role, kv_cache_config)
        self._manager: KVTierManager | None = None
        self._worker: KVTierWorker | None = None
        if self.connector_scheduler is not None:
            self._manager = _require(self.connector_scheduler.manager, KVTierManager)
        if self.connector_worker is not None:
            _require(self.connector_worker.spec, KVTierOffloadingSpec)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See vLLM: called in each worker, before its first step."""
        super().register_kv_caches(kv_caches)
        assert self.connector_worker is not None
        self._worker = _require(self.connector_worker.worker, KVTierWorker)
        self._worker.report_failed_loads()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """See vLLM: called in each worker and step. What has failed has also finished."""
        results = super().get_transfer_results(finished_req_ids)
        if self._worker is not None:
            results.failed_recving |= self._worker.take_failed_requests()
        return results

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See vLLM: called in the scheduler's process; models with one KV cache group."""
        return self._with_params(request, super().request_finished(request, block_ids))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See vLLM: called in the scheduler's process."""
        return self._with_params(request, super().request_finished_all_groups(request, block_ids))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """See vLLM: called in the scheduler's process with what the workers of a step have told."""
        if self._manager is not None and connector_output.failed_recving:
            self._manager.fail_loads(connector_output.failed_recving)
        super().update_connector_output(connector_output)

    def _with_params(
        self, request: Request, result: tuple[bool, dict[str, Any] | None]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return what vLLM's connector returned, with kvtier's parameters of the response."""
        delays_free, params = result
        if self._manager is None or request.status is RequestStatus.FINISHED_ABORTED:
            return result
        ours = self._manager.response_params(request.request_id, request.kv_transfer_params)
        return delays_free, params or ours


def _require(part: object, kind: type[Any]) -> Any:
    if not isinstance(part, kind):
        raise ConfigError(
            f"KVTierConnector works with kvtier's spec only, not with {type(part).__module__}: set spec_name "
            "in kv_connector_extra_config to KVTierOffloadingSpec"
        )
    return part
