"""kvtier under wrong block tables: the scheduler's side of vLLM's connector. The test allocates blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.request import Request, RequestStatus

from kvtier.adapters.vllm.connector import KVTierConnector, may_hold
from tests.integration.test_layouts import BLOCK_TOKENS, FULL, RING, WINDOW, Cache, Case

pytestmark = pytest.mark.integration

Tables = Sequence[Sequence[int]]

BLOCKS = 4
TOKENS = BLOCKS * BLOCK_TOKENS + 5


def a_request(name: str, tokens: int = TOKENS) -> Request:
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
    return Request(name, list(range(tokens)), SamplingParams(max_tokens=999), None, block_hasher=hasher)


def say(request: Request, count: int) -> None:
    """Append ``count`` tokens to the request, all of them storable."""
    for token in range(count):
        request.append_output_token_ids(token)
    request.num_prompt_tokens = request.num_tokens


def output_of(new: Mapping[str, Tables], cached: Mapping[str, Tables], tokens: int = 0, **told: Any) -> Any:
    """Make the scheduler's output for a step that names blocks of requests, by group."""
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=name, block_ids=it) for name, it in new.items()],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), new_block_ids=list(cached.values()), resumed_req_ids=told.get("resumed", ())
        ),
        num_scheduled_tokens={"a": tokens} if tokens else {},
        finished_req_ids=told.get("finished", set()),
        preempted_req_ids=told.get("preempted", set()),
        kv_cache_block_copies=None,
        kv_connector_block_state=None,
    )


class Engine:
    """Reports one request to vLLM's connector, and records the blocks that its stores name."""

    def __init__(self, case: Case, blocks_per_chunk: int) -> None:
        self.cache = Cache(case, blocks_per_chunk)
        self.cache.register()
        init_none_hash(sha256)
        config, cache = self.cache.vllm_config, self.cache
        config.speculative_config = None
        self.scheduler = OffloadingConnectorScheduler(cache.spec, config, cache.config)
        self.request = a_request("a")
        self.scheduler.on_new_request(self.request)
        self.scheduler.get_num_new_matched_tokens(self.request, 0)

    def step(self, blocks: Sequence[int] = (), tokens: int = 0, **told: Any) -> int:
        """Schedule a step that names all blocks of the request, if any; return how many blocks are stored."""
        groups = len(self.cache.config.kv_cache_groups)
        tables, resumed = [list(blocks)] * groups, told.get("resumed", set())
        named = {"a": tables} if blocks else {}
        output = output_of({} if resumed else named, named if resumed else {}, tokens, **told)
        meta: Any = self.scheduler.build_connector_meta(output)
        self.request.num_computed_tokens += tokens
        return sum(len(job.src_spec.block_ids) for job in meta.store_jobs.values())

    def refused(self) -> dict[str, int]:
        manager: Any = self.scheduler.manager
        return {name[1]: n for name, n in manager.core.shared.counts.items() if name[0] == "store_refused"}


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
    say(engine.request, 3 * BLOCK_TOKENS)
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
    say(engine.request, 2 * BLOCK_TOKENS)  # the tokens in flight at the preemption
    engine.request.status = RequestStatus.FINISHED_STOPPED
    engine.scheduler.request_finished(engine.request)
    stored = engine.step(finished={"a"})
    assert bool(stored) is resumes
    assert bool(engine.refused().get("preempted")) is not resumes


@pytest.fixture(params=[([(FULL, 2), (RING, 2)], 1)], ids=[""])
def connector(request: pytest.FixtureRequest) -> Iterator[KVTierConnector]:
    """The connector of a model with a group that vLLM does not offload."""
    groups, blocks_per_chunk = request.param
    cache = Cache(Case(groups), blocks_per_chunk)
    cache.register()
    init_none_hash(sha256)
    config, transfer = cache.vllm_config, cache.vllm_config.kv_transfer_config
    config.speculative_config, transfer.kv_load_failure_policy = None, "recompute"
    transfer.kv_connector_extra_config["spec_name"] = "KVTierOffloadingSpec"
    connector = KVTierConnector(config, KVConnectorRole.SCHEDULER, cache.config)
    yield connector
    connector.shutdown()
    cache.connector.shutdown()


@pytest.mark.parametrize("place", ["new", "cached"])
def test_store_ends_before_any_group_gets_its_blocks(connector: KVTierConnector, place: str) -> None:
    """Groups share a pool, and vLLM records only the blocks of groups that it offloads."""
    first, second = a_request("a"), a_request("b")
    table = ([1, 2, 3, 4, 5], [6])
    for request in (first, second):
        connector.on_new_request(request)
    connector.get_num_new_matched_tokens(first, 0)
    connector._last_tables["a"] = table
    assert connector.build_connector_meta(output_of({"a": table}, {}, TOKENS)).store_jobs
    first.status = RequestStatus.FINISHED_STOPPED
    connector.request_finished_all_groups(first, table)
    connector.build_connector_meta(output_of({}, {}, finished={"a"}))
    named: dict[str, Tables] = {"b": ([], [3])}
    output = output_of(named, {}) if place == "new" else output_of({}, named)
    assert connector.build_connector_meta(output).jobs_to_flush


def test_request_resumed_without_lookup_stores_again(connector: KVTierConnector) -> None:
    """The device still has all its blocks, so no chunk is looked up."""
    request, table = a_request("a"), ([1, 2, 3, 4, 5, 7], [6])
    connector.on_new_request(request)

    def stored(output: Any) -> bool:
        connector._last_tables["a"] = table
        return bool(connector.build_connector_meta(output).store_jobs)

    connector.get_num_new_matched_tokens(request, 0)
    assert stored(output_of({"a": table}, {}, BLOCKS * BLOCK_TOKENS))
    stored(output_of({}, {}, preempted={"a"}))
    connector.scheduler._jobs.clear()
    connector.scheduler._req_status["a"].transfer_jobs.clear()
    connector.get_num_new_matched_tokens(request, BLOCKS * BLOCK_TOKENS)
    say(request, BLOCK_TOKENS)
    assert stored(output_of({}, {"a": table}, request.num_tokens, resumed={"a"}))


@pytest.mark.parametrize("tokens", [TOKENS, BLOCKS * BLOCK_TOKENS + 1, BLOCKS * BLOCK_TOKENS, BLOCK_TOKENS])
@pytest.mark.parametrize(
    "connector",
    [([(FULL, 2), (RING, 2)], 1), ([(FULL, 2), (RING, 2)], 2), ([(FULL, 2), (WINDOW, 2), (RING, 2)], 1)],
    indirect=True,
    ids=["block", "chunk of two", "two groups"],
)
def test_loads_end_where_ring_is_empty(
    connector: KVTierConnector, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """A ring holds the keys of an unfinished block, and no load restores them."""
    monkeypatch.setattr(connector._manager, "lookup", lambda *_: LookupResult.HIT)
    request = a_request("a", tokens)
    connector.on_new_request(request)
    found, _ = connector.get_num_new_matched_tokens(request, 0)
    assert found == (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize(
    ("table", "named", "may"),
    [
        ([], [], True),
        ([7, 8, 9], [7, 8, 9], True),
        ([7, 8, 9], [7, 9], True),  # the chunk between them was already there
        ([7, 8, 9], [8, 9], False),  # shifted
        ([7, 8, 9], [7, 9, 8], False),
        ([7, 8, 9], [7, 5], False),  # another's
        ([7], [7, 8], False),  # given back
        ([], [7], False),
        ([0, 0, 9], [7, 8, 9], True),  # two blocks have left the window
        ([0, 8, 9], [7, 9, 8], False),
    ],
)
def test_named_blocks_match_table(table: list[int], named: list[int], may: bool) -> None:
    assert may_hold(table, named) is may
