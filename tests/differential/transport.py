"""A transport beside kvtier: it gives requests the KV cache of earlier ones, as a prefill engine would.

Scheduler and worker are in one process here, so what it sends is in a dictionary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_STEPS = 3
"""For which a receipt goes on; it writes in the first of them."""

Pages = list[torch.Tensor]

_sent: dict[tuple[Any, ...], Pages] = {}
_caches: Pages = []


@dataclass
class Receipts(KVConnectorMetadata):  # type: ignore[misc]
    """Pages to write, and the blocks that they go to, by request."""

    of: dict[str, tuple[list[int], Pages]] = field(default_factory=dict)


class Transport(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Keeps the blocks of prompts whose ``transport`` is ``keep``; gives them to those with ``receive``."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_tokens: int = vllm_config.cache_config.block_size
        self._found: dict[str, tuple[int, Pages]] = {}
        self._receipts = Receipts()
        self._going_on: dict[str, int] = {}

    # --- scheduler -------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """See vLLM: how many tokens more are received for a request."""
        if _wants(request) != "receive" or request.request_id in self._found:
            return 0, False
        size, prompt = self._block_tokens, list(request.prompt_token_ids or ())
        for blocks in range((len(prompt) - 1) // size, num_computed_tokens // size, -1):
            if (pages := _sent.get(_key(request, blocks * size))) is not None:
                self._found[request.request_id] = num_computed_tokens // size, pages
                return blocks * size - num_computed_tokens, True
        return 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """See vLLM: the blocks that a request receives into."""
        found = self._found.get(request.request_id)
        if found is None or not num_external_tokens:
            return
        first, pages = found
        (ids,) = blocks.get_block_ids()
        last = first + num_external_tokens // self._block_tokens
        self._receipts.of[request.request_id] = ids[first:last], [page[first:last] for page in pages]

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """See vLLM: what is received from this step on."""
        told, self._receipts = self._receipts, Receipts()
        return told

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See vLLM: keep the blocks of a prompt."""
        self._found.pop(request.request_id, None)
        prompt, size = list(request.prompt_token_ids or ()), self._block_tokens
        whole = min(len(prompt), request.num_computed_tokens) // size
        if _wants(request) == "keep" and request.status.name == "FINISHED_LENGTH_CAPPED":
            pages = [cache[block_ids[:whole]].clone() for cache in _caches]
            for blocks in range(1, whole + 1):
                _sent[_key(request, blocks * size)] = [page[:blocks] for page in pages]
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See vLLM: as above, for models of one group."""
        (ids,) = block_ids
        return self.request_finished(request, ids)

    # --- worker ----------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See vLLM: the device's cache."""
        _caches[:] = kv_caches.values()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See vLLM: write what is received."""
        told = self._get_connector_metadata()
        assert isinstance(told, Receipts)
        for request, (blocks, pages) in told.of.items():
            self._going_on[request] = _STEPS
            for cache, page in zip(_caches, pages, strict=True):
                cache[blocks] = page

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """See vLLM: the requests whose receipt has ended."""
        self._going_on = {request: steps - 1 for request, steps in self._going_on.items()}
        ended = {request for request, steps in self._going_on.items() if steps <= 0}
        for request in ended:
            del self._going_on[request]
        return None, ended or None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See vLLM: nothing is waited for here."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """See vLLM: nothing is saved here."""

    def wait_for_save(self) -> None:
        """See vLLM: nothing is saved here."""


def _wants(request: Request) -> str:
    return str((request.kv_transfer_params or {}).get("transport", ""))


def _key(request: Request, tokens: int) -> tuple[Any, ...]:
    return request.lora_request and request.lora_request.name, *(request.prompt_token_ids or ())[:tokens]
