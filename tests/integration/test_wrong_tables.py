"""Wrong block tables of vLLM's connector: its scheduler's side over kvtier. The test is the allocator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request, RequestStatus

from kvtier.adapters.vllm.connector import may_hold
from tests.integration.test_layouts import BLOCK_TOKENS, FULL, WINDOW, Cache, Case

pytestmark = pytest.mark.integration

BLOCKS = 4
TOKENS = BLOCKS * BLOCK_TOKENS + 5


class Engine:
    """Tells vLLM's connector of one request, and keeps which blocks are named in its stores."""

    def __init__(self, case: Case, blocks_per_chunk: int) -> None:
        self.cache = Cache(case, blocks_per_chunk)
        self.cache.register()
        init_none_hash(sha256)
        config, cache = self.cache.vllm_config, self.cache
        config.speculative_config = None
        self.scheduler = OffloadingConnectorScheduler(cache.spec, config, cache.config)
        hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        prompt = list(range(TOKENS))
        self.request = Request("a", prompt, SamplingParams(max_tokens=999), None, block_hasher=hasher)
        self.scheduler.on_new_request(self.request)
        self.scheduler.get_num_new_matched_tokens(self.request, 0)

    def step(self, blocks: Sequence[int] = (), tokens: int = 0, **told: Any) -> int:
        """Schedule a step that names all blocks of the request, if any; return how many blocks are stored."""
        groups = len(self.cache.config.kv_cache_groups)
        tables, resumed = [list(blocks)] * groups, told.get("resumed", set())
        new = [SimpleNamespace(req_id="a", block_ids=tables)] if blocks and not resumed else []
        output: Any = SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=list(resumed), new_block_ids=[tables] * len(resumed), resumed_req_ids=resumed
            ),
            num_scheduled_tokens={"a": tokens} if tokens else {},
            finished_req_ids=told.get("finished", set()),
            preempted_req_ids=told.get("preempted", set()),
            kv_cache_block_copies=None,
            kv_connector_block_state=None,
        )
        meta: Any = self.scheduler.build_connector_meta(output)
        self.request.num_computed_tokens += tokens
        return sum(len(job.src_spec.block_ids) for job in meta.store_jobs.values())

    def say(self, count: int) -> None:
        """Append ``count`` tokens to the request, all of them storable."""
        for token in range(count):
            self.request.append_output_token_ids(token)
        self.request.num_prompt_tokens = self.request.num_tokens

    def refused(self) -> dict[str, int]:
        manager: Any = self.scheduler.manager
        return {name[1]: n for name, n in manager._core.shared.counts.items() if name[0] == "store_refused"}


@pytest.fixture(
    params=[([(FULL, 2)], 1), ([(FULL, 2)], 2), ([(FULL, 2), (WINDOW, 2)], 1)],
    ids=["block", "chunk of two", "two groups"],
)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    groups, blocks_per_chunk = request.param
    engine = Engine(Case(groups), blocks_per_chunk)
    yield engine
    engine.cache.connector.shutdown()
    engine.scheduler.shutdown()


def test_continuation_replaces_table(engine: Engine) -> None:
    assert engine.step([1, 2, 3, 4, 5], TOKENS) > 0
    engine.say(3 * BLOCK_TOKENS)
    stored = engine.step([1, 2, 3, 4, 5, 6, 7, 8], 3 * BLOCK_TOKENS)
    assert bool(stored) is not bool(engine.refused().get("session"))


@pytest.mark.parametrize("resumes", [False, True])
def test_preempted_end_stores_nothing(engine: Engine, resumes: bool) -> None:
    assert engine.step([1, 2, 3, 4, 5, 6, 7], TOKENS) > 0
    engine.step(preempted={"a"})
    engine.request.num_computed_tokens = 0
    if resumes:
        for job in list(engine.scheduler._jobs):
            del engine.scheduler._jobs[job]
        engine.scheduler._req_status["a"].transfer_jobs.clear()
        engine.scheduler.get_num_new_matched_tokens(engine.request, 0)
        engine.step([9, 10, 11, 12, 13, 14, 15], TOKENS, resumed={"a"})
    engine.say(2 * BLOCK_TOKENS)  # the tokens in flight at the preemption
    engine.request.status = RequestStatus.FINISHED_STOPPED
    engine.scheduler.request_finished(engine.request)
    stored = engine.step(finished={"a"})
    assert bool(stored) is resumes
    assert bool(engine.refused().get("preempted")) is not resumes


@pytest.mark.parametrize(
    ("table", "named", "may"),
    [
        ([], [], True),
        ([7, 8, 9], [7, 8, 9], True),
        ([7, 8, 9], [7, 9], True),  # the chunk between was there already
        ([7, 8, 9], [8, 9], False),  # shifted
        ([7, 8, 9], [7, 9, 8], False),
        ([7, 8, 9], [7, 5], False),  # another's
        ([7], [7, 8], False),  # given back
        ([], [7], False),
        ([0, 0, 9], [7, 8, 9], True),  # two have left the window
        ([0, 8, 9], [7, 9, 8], False),
    ],
)
def test_named_blocks_match_table(table: list[int], named: list[int], may: bool) -> None:
    assert may_hold(table, named) is may
