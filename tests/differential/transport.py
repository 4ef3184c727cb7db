"""A second connector for ``MultiConnector``: provides requests with the KV cache of earlier ones, like P/D.

Scheduler and worker are in one process here, so a dictionary holds the KV in transit. For models of one
group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

STEPS = 3
"""Number of steps that a receipt takes; it writes in the last of them."""

Pages = list[torch.Tensor]

_kept: dict[tuple[Any, ...], Pages] = {}
_caches: Pages = []


@dataclass
class Receipts(KVConnectorMetadata):
    """The blocks of requests that start to receive in a step, and their new bytes."""

    of: dict[str, tuple[list[int], Pages]] = field(default_factory=dict)


class Transport(KVConnectorBase_V1, SupportsHMA):
    """Keeps the blocks of prompts, and provides them to requests with ``{"transport": "receive"}``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._block_tokens: int = self._vllm_config.cache_config.block_size
        self._found: dict[str, tuple[int, Pages]] = {}
        self._step = Receipts()
        self._going_on: dict[str, tuple[int, list[int], Pages]] = {}

    # --- in the scheduler ---

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        first, size = num_computed_tokens // self._block_tokens, self._block_tokens
        if not (request.kv_transfer_params or {}).get("transport") or request.request_id in self._found:
            return 0, False
        for blocks in range((request.num_prompt_tokens - 1) // size, first, -1):
            if (pages := _kept.get(_key(request, blocks * size))) is not None:
                self._found[request.request_id] = first, pages
                return blocks * size - num_computed_tokens, True
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens and request.request_id in self._found:
            first, pages = self._found[request.request_id]
            last = first + num_external_tokens // self._block_tokens
            (ids,) = blocks.get_block_ids()
            self._step.of[request.request_id] = ids[first:last], [page[first:last] for page in pages]

    def build_connector_meta(self, scheduler_output: Any) -> Receipts:
        step, self._step = self._step, Receipts()
        return step

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        self._found.pop(request.request_id, None)
        if request.status.name == "FINISHED_LENGTH_CAPPED":
            whole = request.num_prompt_tokens // self._block_tokens
            pages = [cache[block_ids[0][:whole]].clone() for cache in _caches]
            for blocks in range(1, whole + 1):
                _kept[_key(request, blocks * self._block_tokens)] = [page[:blocks] for page in pages]
        return False, None

    def reset_cache(self) -> bool:
        _kept.clear()  # of old weights
        return True

    # --- in the worker ---

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        _caches[:] = kv_caches.values()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for request, (blocks, pages) in self._get_connector_metadata().of.items():
            self._going_on[request] = STEPS, blocks, pages

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str]]:
        ended = set()
        for request, (steps, blocks, pages) in [*self._going_on.items()]:
            if steps > 1:
                self._going_on[request] = steps - 1, blocks, pages
                continue
            del self._going_on[request]
            ended.add(request)
            for cache, page in zip(_caches, pages, strict=True):
                cache[blocks] = page
        return None, ended

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


def _key(request: Any, tokens: int) -> tuple[Any, ...]:
    return request.lora_request and request.lora_request.name, *request.prompt_token_ids[:tokens]
