"""A request's own settings: the part to store, the tiers to load from, and the owner.

Requests that end early leave no pin and no slot behind.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Ask, from_vllm
from tests.integration.harness import PROMPT_CHUNKS, Engine, Launcher, Metrics, prompt

pytestmark = pytest.mark.releases

MAKER = "tests.differential.models"
Adapted = tuple[Callable[..., Engine], str, str]

STORED = [prompt(seed) for seed in range(6)]
NEW = [prompt(seed) for seed in range(50, 56)]


def test_aborts_leave_nothing(launcher: Launcher, llama: Path, reference: Ask, tmp_path: Path) -> None:
    files = {"type": "fs", "root_dir": str(tmp_path)}
    settings: dict[str, Any] = {"cpu_bytes_to_use": "64MiB", "secondary_tiers": [files]}
    with launcher.start(llama, settings) as engine:
        engine.served(*STORED)
    with launcher.start(llama, settings) as engine:
        aborted = 0
        for steps in (0, 1, 2, 3, 4, 40):
            prompts = [*STORED[::2], *NEW[::2]]
            aborts = {str(number): steps for number in range(len(prompts))}
            answer = engine.call("requests", prompts=prompts, output_tokens=16, aborts=aborts)
            aborted += answer["ends"].count(None)
        metrics = engine.settled()
        engine.until(_nothing_is_under_way, "no tier works for requests that were aborted")
        answers, _ = engine.served(*STORED, *NEW)
        at_end = engine.settled()

    assert aborted > 0
    assert metrics.is_idle
    assert at_end.is_idle
    assert answers == reference(*STORED, *NEW)
    everything = (len(STORED) + len(NEW)) * PROMPT_CHUNKS
    assert at_end.value("kvtier_slots") - at_end.value("kvtier_free_slots") == everything


def _nothing_is_under_way(metrics: Metrics) -> bool:
    gauges = ("kvtier_in_flight_transfers", "kvtier_queued_transfers")
    return metrics.is_idle and not any(metrics.value(name) for name in gauges)


@pytest.mark.parametrize("connector", ["OffloadingConnector", "KVTierConnector"])
def test_errors_amid_prompts_store_no_rest(
    launcher: Launcher, llama: Path, reference: Ask, settings: dict[str, Any], connector: str
) -> None:
    settings["blocks_per_chunk"] = 1
    transfer = {"kv_connector": connector, "kv_load_failure_policy": "recompute"}
    asked = prompt(1, 300)
    with launcher.start(llama, settings, max_num_batched_tokens=80, kv_transfer_config=transfer) as engine:
        assert engine.call("fail_amid", prompt=asked, tokens=80) == {"computed": 80}, "amid the third block"
        metrics = engine.settled()
        engine.reset(connector=False)
        served = engine.served(asked)
    assert served == (reference(asked), {"cpu": 2})
    assert metrics.value("kvtier_store_refused_chunks", reason="ended_early") == 1


@pytest.mark.parametrize("connector", ["OffloadingConnector", "KVTierConnector"])
def test_blocks_withdrawn_within_step_are_forgotten(
    launcher: Launcher, llama: Path, reference: Ask, settings: dict[str, Any], connector: str
) -> None:
    """vLLM preempts a request after it has cached the blocks that the step was to compute."""
    low, high = prompt(1, 400), prompt(2, 30)
    transfer = {"kv_connector": connector, "kv_load_failure_policy": "recompute"}
    sizes: dict[str, Any] = {
        "max_model_len": 416,
        "num_gpu_blocks_override": 1 + 416 // 32,
        "max_num_batched_tokens": 128,
    }
    with launcher.start(
        llama,
        {**settings, "blocks_per_chunk": 1},
        scheduling_policy="priority",
        long_prefill_token_threshold=64,
        kv_transfer_config=transfer,
        **sizes,
    ) as engine:
        overtaken = engine.call("overtake", low=low, high=high, tokens=128)
        engine.settled()
        engine.reset(connector=False)
        served = engine.served(low)
    assert overtaken == {"answer": reference(low)[0], "preemptions": 1}
    assert served == (reference(low), {"cpu": 400 // 32})


@pytest.fixture
def adapted(launcher: Launcher, llama: Path, tmp_path: Path) -> Adapted:
    """A model with two adapters."""
    model = shutil.copytree(llama, tmp_path / "model")
    paths = [str(tmp_path / f"adapter-{number}") for number in (1, 2)]
    with launcher.fork() as maker:
        for path in paths:
            maker.call("make_adapter", module=MAKER, directory=path, model=str(model))
    settings = {
        "cpu_bytes_to_use": "64MiB",
        "secondary_tiers": [{"type": "fs", "root_dir": str(tmp_path / "root")}],
        "immutable_adapters": True,
        "offload_prompt_only": False,
        "blocks_per_chunk": 1,
    }

    def start(*, stores: bool = True) -> Engine:
        more: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "num_gpu_blocks_override": 200}
        return launcher.start(model, settings if stores else None, **more)

    return start, paths[0], paths[1]


@pytest.mark.parametrize("returns", [False, True])
def test_replaced_adapter_ends_stores(adapted: Adapted, returns: bool) -> None:
    """In vLLM, blocks that a request computes with the new adapter have the old one's key."""
    start, old, new = adapted
    first = prompt(1, 100)
    replacements = [(64, new), (84, old)] if returns else [(60, new)]
    with start() as engine:
        answer = engine.call("replace_adapter", prompt=first, folder=old, replacements=replacements)
        metrics = engine.settled()
    asked = [*first, *answer["answer"], 5]
    with start(stores=False) as engine:
        expected = engine.call("ask_adapter", prompt=asked, folder=old)
    with start() as engine:
        found = engine.call("ask_adapter", prompt=asked, folder=old)

    assert found["answer"] == expected["answer"]
    assert 0 < found["cached"] <= 160 < len(asked), "before the replacement"
    assert metrics.value("kvtier_store_refused_chunks", reason="adapter") > 0


def test_adapter_of_used_id_is_not_stored(adapted: Adapted) -> None:
    """vLLM keeps using the adapter that it has loaded under the id."""
    start, old, new = adapted
    asked = prompt(1, 100)
    with start() as engine:
        engine.call("ask_adapter", prompt=prompt(2, 20), folder=old)
        engine.call("ask_adapter", prompt=asked, folder=new)
        metrics = engine.settled()
    with start(stores=False) as engine:
        expected = engine.call("ask_adapter", prompt=asked, folder=new)
    with start() as engine:
        found = engine.call("ask_adapter", prompt=asked, folder=new)

    assert found == expected
    assert metrics.value("kvtier_store_refused_chunks", reason="adapter") > 0


# --- how much of a request is stored and loaded ---------------------------------------------------


@pytest.fixture(scope="module")
def shared_settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    tiers = [{"type": "fs", "root_dir": str(tmp_path_factory.mktemp("shared"))}]
    return {"cpu_bytes_to_use": "256MiB", "secondary_tiers": tiers}


@pytest.fixture(scope="module")
def engine(launcher: Launcher, llama: Path, shared_settings: dict[str, Any]) -> Iterator[Engine]:
    """An engine that several tests use one after the other, each with its own prompts."""
    with launcher.start(llama, shared_settings) as engine:
        yield engine


@pytest.mark.parametrize(
    ("seed", "bound", "chunks"),
    [(100, 0, 0), (101, 31, 0), (102, 100, 3), (103, 10**6, PROMPT_CHUNKS), (104, None, PROMPT_CHUNKS)],
)
def test_stores_are_bounded_per_tier(
    engine: Engine, reference: Ask, seed: int, bound: int | None, chunks: int
) -> None:
    before = engine.settled()
    asked = prompt(seed)
    answers = engine.generate(asked, kv_transfer_params={"max_offload_tokens": bound})
    after = engine.settled()

    assert answers == reference(asked)
    assert after.value("kvtier_stored_chunks") - before.value("kvtier_stored_chunks") == chunks
    assert after.value("kvtier_put_chunks") - before.value("kvtier_put_chunks") == chunks
    engine.reset(connector=False)
    assert engine.served(asked) == (answers, {"cpu": chunks} if chunks else {})


@pytest.mark.parametrize(("bound", "chunks"), [(0, 0), (100, 3), (None, PROMPT_CHUNKS)])
def test_loads_are_bounded(engine: Engine, reference: Ask, bound: int | None, chunks: int) -> None:
    asked = prompt(120)
    engine.served(asked)
    engine.reset(connector=False)
    answers, loaded = engine.served(asked, kv_transfer_params={"max_load_tokens": bound})
    assert answers == reference(asked)
    assert loaded == ({"cpu": chunks} if chunks else {})


@from_vllm((0, 33), "loads nothing within a step")
def test_budgeted_loads_take_a_step(launcher: Launcher, llama: Path, reference: Ask) -> None:
    asked = prompt(1)
    settings = {"cpu_bytes_to_use": "64MiB", "sync_load_budget_bytes": PROMPT_CHUNKS * 2**17}
    transfer = {"kv_connector": "KVTierConnector", "kv_load_failure_policy": "recompute"}
    with launcher.start(llama, settings, faulty_copies=True, kv_transfer_config=transfer) as engine:
        engine.served(asked)
        engine.reset(connector=False)
        loaded = engine.served(asked)
        engine.reset(connector=False)
        engine.fail_copies(loads=2)  # the request already runs, so it cannot be recomputed
        staged = engine.served(asked)
        metrics = engine.metrics()

    assert loaded == staged == (reference(asked), {"cpu": PROMPT_CHUNKS})
    assert metrics.value("kvtier_copy_failed", verb="load", outcome="staged") == 1
    assert metrics.value("kvtier_copy_failed") == 1


# --- where a request is loaded from ---------------------------------------------------------------

NEAR, FAR = {"near": PROMPT_CHUNKS}, {"far": PROMPT_CHUNKS}
FILTERS: list[tuple[Any, dict[str, int]]] = [
    ([], {}),
    ([{"locality": "REMOTE"}], FAR),
    ([{"medium": "storage", "locality": "local"}], NEAR),
    ([{"medium": "CPU"}], {}),
    ([{"medium": "CPU"}, {"locality": "REMOTE"}], FAR),
    ([{}], NEAR),
    ([{"medium": "tape"}], NEAR),  # vLLM warns and drops it; if none is left, it loads from all tiers
    ("near", NEAR),
]


@pytest.mark.full
def test_only_allowed_tiers_load(launcher: Launcher, llama: Path, reference: Ask, tmp_path: Path) -> None:
    tiers = [
        {"type": "fs", "name": "near", "root_dir": str(tmp_path / "near"), "locality": "LOCAL"},
        {"type": "fs", "name": "far", "root_dir": str(tmp_path / "far"), "locality": "REMOTE"},
    ]
    settings = {"cpu_bytes_to_use": "64MiB", "secondary_tiers": tiers}
    prompts = [prompt(seed) for seed in range(len(FILTERS))]
    with launcher.start(llama, settings) as engine:
        engine.served(*prompts)
    with launcher.start(llama, settings) as engine:
        served = [
            engine.served(each, kv_transfer_params={"kv_load_tiers": wanted})
            for each, (wanted, _) in zip(prompts, FILTERS, strict=True)
        ]
        skipped = engine.metrics()
        engine.reset(connector=False)
        again = [engine.served(each, kv_transfer_params={"kv_load_tiers": []}) for each in prompts]

    expected = reference(*prompts)
    assert [answers for answers, _ in served] == [[answer] for answer in expected]
    assert [loaded for _, loaded in served] == [loaded for _, loaded in FILTERS]
    assert skipped.value("kvtier_skipped_chunks", tier="near", reason="filter") >= 2 * PROMPT_CHUNKS
    assert skipped.value("kvtier_misses", reason="filter") > 0
    # The primary tier is not filtered: every request sees all its chunks.
    assert again == [([answer], {"cpu": PROMPT_CHUNKS}) for answer in expected]


# --- the owner of a request -----------------------------------------------------------------------


def test_salt_separates_tenants(
    engine: Engine, launcher: Launcher, llama: Path, reference: Ask, shared_settings: dict[str, Any]
) -> None:
    asked = prompt(130)
    in_memory = _of_tenants(engine, asked)
    with launcher.start(llama, shared_settings) as another:
        in_files = _of_tenants(another, asked, "third")

    assert {tuple(answer) for (answer,), _ in in_memory + in_files} == {tuple(reference(asked)[0])}
    assert [loaded for _, loaded in in_memory] == [{}, {}, {"cpu": PROMPT_CHUNKS}]
    assert [loaded for _, loaded in in_files] == [{}, {"fs": PROMPT_CHUNKS}, {"cpu": PROMPT_CHUNKS}]


def _of_tenants(engine: Engine, asked: list[int], other: str = "second") -> list[Any]:
    """Send prompts as one tenant, as another one, and as the first again: nothing is left on the device."""
    served = []
    for salt in (other, "first", "first"):
        engine.reset(connector=False)
        served.append(engine.served(asked, salt=salt))
    return served
