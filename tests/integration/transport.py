"""A connector in ``MultiConnector`` with kvtier that receives KV, like a prefill/decode transport.

It receives noise, so a test notices if kvtier stores it. See ``Engine.call`` in ``harness`` for the function.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvtier_bench.engine.process import sampling

_NUMBERS = itertools.count()


@dataclass
class Received(KVConnectorMetadata):
    """The blocks that receive noise in a step."""

    blocks: dict[str, list[int]] = field(default_factory=dict)
    invalid: set[int] = field(default_factory=set)


class Transport(KVConnectorBase_V1, SupportsHMA):
    """Receives the KV of prompts with ``{"transport": "async"}``, or fails to, with ``"sync"``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._caches: list[torch.Tensor] = []
        self._step = Received()
        self._asked: set[str] = set()
        self._invalid: set[int] = set()

    # --- in the scheduler's process ---

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        how = (request.kv_transfer_params or {}).get("transport")
        if how is None or request.request_id in self._asked:
            return 0, False
        return (request.num_tokens - 1) // 32 * 32 - num_computed_tokens, how == "async"

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        self._asked.add(request.request_id)
        (ids,) = blocks.get_block_ids()
        if request.kv_transfer_params["transport"] == "async":
            self._step.blocks[request.request_id] = ids
        else:
            self._step.invalid.update(ids[: num_external_tokens // 32])

    def build_connector_meta(self, scheduler_output: Any) -> Received:
        step, self._step = self._step, Received()
        return step

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    # --- in the worker ---

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._get_connector_metadata()
        for blocks in [*step.blocks.values(), sorted(step.invalid)]:
            for cache in self._caches:
                cache[torch.tensor(blocks, dtype=torch.long)] = 7.0
        self._invalid = step.invalid

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, set(self._get_connector_metadata().blocks)

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


def serve(llm: Any, prompts: list[list[int]], output_tokens: int, how: list[str | None]) -> dict[str, Any]:
    """Answer prompts, all sent at once; return ``answers``. ``how`` sets the way each is received, if any."""
    engine, number = llm.llm_engine, next(_NUMBERS)
    names = [f"transport-{number}-{place}" for place in range(len(prompts))]
    for name, prompt, received in zip(names, prompts, how, strict=True):
        params = {"transport": received} if received else None
        engine.add_request(name, {"prompt_token_ids": prompt}, sampling(output_tokens, params))
    said = {}
    while engine.has_unfinished_requests():
        said.update({output.request_id: list(output.outputs[0].token_ids) for output in engine.step()})
    return {"answers": [said[name] for name in names]}
