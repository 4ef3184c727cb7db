"""Groups of a drafter's layers, as EAGLE and MTP have them: vLLM's scheduler and worker sides over kvtier.

For models that no engine on the CPU runs. There is no engine: the test allocates the blocks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from tests.common import PATIENCE_S
from tests.integration.test_layouts import BLOCK_TOKENS, FULL, LATENT, STATE, WINDOW, Cache, Case

PROMPT_BLOCKS = 6
TOKENS = PROMPT_BLOCKS * BLOCK_TOKENS + 5
LOOKAHEAD_BLOCKS = 1
ALLOCATED = PROMPT_BLOCKS + 1 + LOOKAHEAD_BLOCKS


class Engine:
    """Runs requests over a KV cache whose last group belongs to the drafter."""

    def __init__(self, case: Case, blocks_per_chunk: int) -> None:
        self.cache = Cache(case, blocks_per_chunk)
        self.cache.config.kv_cache_groups[-1].is_eagle_group = True
        self.cache.vllm_config.speculative_config = SimpleNamespace(use_eagle_block_drop=lambda: True)
        self.worker = self.cache.register()
        init_none_hash(sha256)
        self.scheduler = OffloadingConnectorScheduler(
            self.cache.spec, self.cache.vllm_config, self.cache.config
        )
        self.groups = len(self.cache.config.kv_cache_groups)

    def request(self, name: str) -> Request:
        hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        request = Request(name, list(range(TOKENS)), SamplingParams(max_tokens=4), None, block_hasher=hasher)
        self.scheduler.on_new_request(request)
        return request

    def hit(self, request: Request) -> int:
        """Return how many tokens can be loaded, after the tiers have answered."""
        end = time.monotonic() + PATIENCE_S
        while (tokens := self.scheduler.get_num_new_matched_tokens(request, 0)[0]) is None:
            assert time.monotonic() < end
            self.step()
        return tokens

    def step(self, new: Request | None = None, blocks: Any = None, ended: Request | None = None) -> None:
        """Schedule a step, let the worker copy, and report the ended copies to the scheduler."""
        nobody = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set())
        output: Any = SimpleNamespace(
            scheduled_new_reqs=[]
            if new is None
            else [SimpleNamespace(req_id=new.request_id, block_ids=blocks)],
            scheduled_cached_reqs=nobody,
            num_scheduled_tokens={} if new is None else {new.request_id: TOKENS - new.num_computed_tokens},
            finished_req_ids=set() if ended is None else {ended.request_id},
            preempted_req_ids=set(),
            kv_cache_block_copies=None,
            kv_connector_block_state=None if new is None else self._states(new, blocks),
        )
        meta: Any = self.scheduler.build_connector_meta(output)
        for number, job in meta.load_jobs.items():
            self.worker.submit_load(number, job.src_spec, job.dst_spec)
        for number, job in meta.store_jobs.items():
            self.worker.submit_store(number, job.src_spec, job.dst_spec)
        if jobs := {*meta.load_jobs, *meta.store_jobs}:
            self.worker.wait(jobs)
            assert {result.job_id for result in self.worker.get_finished()} == jobs
            done = OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(jobs, 1))
            self.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=done))

    def _states(self, request: Request, blocks: list[list[int]]) -> Any:
        """Return the blocks with the states at each block's end, which vLLM passes separately."""
        specs = [group.kv_cache_spec for group in self.cache.config.kv_cache_groups]
        first = request.num_computed_tokens // BLOCK_TOKENS
        offloads = [
            (group, blocks[group][number], (number + 1) * BLOCK_TOKENS)
            for group, spec in enumerate(specs)
            if isinstance(spec, MambaSpec)
            for number in range(first, PROMPT_BLOCKS)
        ]
        return SimpleNamespace(boundary_state_offloads={request.request_id: offloads} if offloads else {})

    def end(self, request: Request) -> None:
        request.num_computed_tokens = TOKENS
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        self.scheduler.request_finished(request)
        self.step(ended=request)
        self.step()

    def close(self) -> None:
        self.cache.connector.shutdown()
        self.scheduler.shutdown()


@pytest.fixture(params=[1, 2], ids=["block", "chunk of two"])
def blocks_per_chunk(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(
    params={
        "EAGLE beside full attention": Case([(FULL, 2), (FULL, 2)]),
        "MTP beside sliding windows": Case([(WINDOW, 2), (FULL, 2)]),
        "MTP in its own windows": Case([(FULL, 2), (WINDOW, 2)]),
        "MTP beside latent attention": Case([(LATENT, 2), (LATENT, 2)]),
        "MTP beside states": Case([(replace(STATE, page_size_padded=FULL.page_size_bytes), 4), (FULL, 2)]),
    }.items(),
    ids=lambda named: named[0],
)
def engine(request: pytest.FixtureRequest, blocks_per_chunk: int) -> Iterator[Engine]:
    engine = Engine(request.param[1], blocks_per_chunk)
    yield engine
    engine.close()


def test_all_but_drafters_last_chunk(engine: Engine, blocks_per_chunk: int) -> None:
    first = engine.request("first")
    assert engine.hit(first) == 0
    theirs = [
        [1 + group * ALLOCATED + number for number in range(ALLOCATED)] for group in range(engine.groups)
    ]
    engine.step(first, theirs)
    engine.end(first)
    before = [[engine.cache.read(group, block) for block in theirs[group]] for group in range(engine.groups)]

    second = engine.request("second")
    tokens = engine.hit(second)
    # vLLM accepts no hit of a drafter's group if it would have to trust the last chunk.
    assert tokens == (PROMPT_BLOCKS // blocks_per_chunk - 1) * blocks_per_chunk * BLOCK_TOKENS
    engine.cache.memory.random_(-128, 128)
    own = [list(reversed(blocks)) for blocks in theirs]
    allocated: Any = SimpleNamespace(
        blocks=[
            [SimpleNamespace(block_id=block, is_null=False, block_hash=None) for block in blocks]
            for blocks in own
        ]
    )
    for group, spec in enumerate(engine.scheduler.config.kv_group_configs):
        window = spec.load_window_size_in_chunks(tokens)
        kept = 1 if isinstance(spec.kv_cache_spec, MambaSpec) else 4  # a state; a window of 64 tokens
        for block in allocated.blocks[group][: 0 if window is None else tokens // BLOCK_TOKENS - kept]:
            block.is_null = True
    engine.scheduler.update_state_after_alloc(second, allocated, tokens)
    second.num_computed_tokens = tokens
    engine.step(second, own)
    for group in range(engine.groups):
        for number in range(tokens // BLOCK_TOKENS):
            if not allocated.blocks[group][number].is_null:
                after = engine.cache.read(group, own[group][number])
                assert all(map(torch.equal, after, before[group][number])), (group, number)
    engine.end(second)
    assert not engine.scheduler.has_pending_push_work()
