"""vLLM's CUDA build with kvtier over the fake GPU: the tokens are those of an engine without a connector."""

from __future__ import annotations

import gc
import itertools
import json
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest

from kvtier._device.backends import _cuda_runtime
from kvtier._device.backends._cuda_runtime import TorchStream
from kvtier._device.base import CopyQueue
from kvtier._device.plan import CopyPlan
from kvtier.errors import TransferError
from kvtier_bench.engine import process
from kvtier_bench.engine.compared import engine_arguments, environment, make_model, make_prompt, over_files
from tests.fakegpu.test_orders import choose, order, reported_at_once

__all__ = ["order"]  # a fixture
cumem = pytest.importorskip("vllm.device_allocator.cumem")
pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif("KVTIER_FAKE_ORDER" not in os.environ, reason="not on the fake GPU: nox -s fakegpu"),
    pytest.mark.timeout(1800),  # for a hanging test: on a busy machine an engine starts in a minute
]
LOADED_WITHIN_STEPS = {"sync_load_budget_bytes": 4 << 16}  # four chunks; other requests wait
CHUNK_TOKENS, OUTPUT_TOKENS, WINDOW_TOKENS, LONG_S = 32, 12, 64, 600.0
SHARED = make_prompt("shared", 96)
PROMPTS = [make_prompt(f"own {number}", 130 + 40 * number, SHARED) for number in range(4)]
FOR_FOUR = {  # the device's blocks hold only two of these requests at full length
    "dtype": "bfloat16",  # for FlashAttention
    "block_size": 16,
    "max_model_len": 512,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 34,
    "gpu_memory_utilization": 0.05,
}
GRAPH_SIZES = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [2, 4]}
IN_GRAPHS = {"enforce_eager": False, "compilation_config": GRAPH_SIZES}
LOOKED_UP = {"prompt_lookup_min": 1, "prompt_lookup_max": 2}
DRAFTED = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, **LOOKED_UP}}
WITH_WINDOWS = {"max_model_len": 384, "num_gpu_blocks_override": 76}
STEP_BY_STEP = {"async_scheduling": False}  # vLLM 0.33 refuses a reset before the current step has ended
WHOLE = {
    **STEP_BY_STEP,
    "enable_sleep_mode": True,
    "kv_transfer_config": {"kv_connector": "KVTierConnector", "kv_load_failure_policy": "recompute"},
}
COUNTERS = {
    "preempted": "vllm:num_preemptions_total",
    "loaded": "kvtier_loaded_chunks_total",
    "stored": "kvtier_stored_chunks_total",
    "refused": "kvtier_copy_failed_total",
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
}

Answers = list[list[int] | None]
Event = Callable[["Engine"], object]


@dataclass(frozen=True)
class Chapter:
    """Events during the answers to all prompts.

    Attributes:
        moves: counters that must grow.
        before: called before the prompts are sent.
        events: called before the steps of these numbers, and before later ones while they return False.
        aborted: places of the prompts that get no answer.
    """

    moves: Collection[str]
    before: Event = id
    events: Mapping[int, Event] = field(default_factory=dict)
    aborted: Collection[int] = ()


FORGET = methodcaller("forget")
RESET_DEVICE = methodcaller("reset", running=True)
RESET_ALL = methodcaller("reset", running=True, connector=True)
SLEEP, SLEEP_DEEPLY = methodcaller("sleep", 1), methodcaller("sleep", 2)
FIRST = {"first": Chapter({"stored"})}
HOST_MEMORY = {"host memory": Chapter({"loaded"}, FORGET)}
REFUSED = {"a load is refused": Chapter({"refused", "loaded"}, methodcaller("refuse"))}
ABORTED = {"loads are aborted": Chapter({"loaded"}, FORGET, {1: methodcaller("abort", 0, 2)}, (0, 2))}
CHAPTERS = {
    "files": Chapter({"loaded"}),
    "the device is reset beside requests": Chapter({"preempted"}, events={4: RESET_DEVICE, 9: RESET_DEVICE}),
    **HOST_MEMORY,
    "all is reset beside requests": Chapter({"stored"}, events={4: RESET_ALL, 5: RESET_ALL}),
    **ABORTED,
    **REFUSED,
    "all is reset": Chapter({"stored"}, RESET_ALL),
    "sleep": Chapter((), RESET_ALL, {1: SLEEP}, range(4)),
    "awake": Chapter({"stored"}),
    "sleep without weights": Chapter((), RESET_ALL, {1: SLEEP_DEEPLY}, range(4)),
    "awake with new weights": Chapter({"stored"}),
}


class Engine(process.Engine):
    """An engine in this process, with events between its steps."""

    def __init__(self, model: Path, settings: Mapping[str, Any] | None, more: Mapping[str, Any]) -> None:
        super().__init__()
        self.load({})
        gc.freeze()  # vLLM collects garbage many times during a start, which takes most of its time
        self.start({"arguments": engine_arguments(model, settings, {**FOR_FOUR, **more})})
        self._numbers = itertools.count()
        self._names: list[str] = []
        self.idle_aborts = 0  # aborts while no copy was in flight

    def serve(self, events: Mapping[int, Event]) -> Answers:
        """Return the answers to all prompts, sent at once; None for an aborted one. See ``Chapter``."""
        engine, number = self._llm.llm_engine, next(self._numbers)
        self._names = [f"{number}-{place}" for place in range(len(PROMPTS))]
        for name, prompt in zip(self._names, PROMPTS, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, process.sampling(OUTPUT_TOKENS))
        due, answers = dict(events), dict[str, list[int]]()
        for step in itertools.count():
            for at in [at for at in due if at <= step]:
                if due[at](self) is not False:
                    del due[at]
            if not engine.has_unfinished_requests():
                break
            ended = [one for one in engine.step() if one.finished and one.outputs[0].finish_reason != "abort"]
            answers.update((one.request_id, list(one.outputs[0].token_ids)) for one in ended)
        assert not due, "all prompts were answered before"
        return [answers.get(name) for name in self._names]

    def reset(self, *, running: bool, connector: bool = False) -> bool:
        """Reset the prefix cache; return False while a waiting request has blocks: vLLM would refuse."""
        scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        waiting = [name for name, one in scheduler.requests.items() if one not in scheduler.running]
        if any(any(scheduler.kv_cache_manager.get_block_ids(name)) for name in waiting):
            return False
        assert self._llm.reset_prefix_cache(reset_running_requests=running, reset_connector=connector)
        return True

    def forget(self) -> None:
        """Reset only the device's cache, while nothing runs."""
        process.forget(self._llm)

    def refuse(self) -> None:
        """Reset the device's cache, and make the next load fail in both usual ways."""
        self.forget()
        refused_loads.extend([TransferError("refused")] * 2)

    def abort(self, *places: int) -> None:
        """Abort requests; copies are in flight if the order makes them late."""
        self.idle_aborts += self._is_idle()
        self._llm.llm_engine.abort_request([self._names[place] for place in places])

    def sleep(self, level: int) -> None:
        """Abort all requests during copies, sleep and wake up; after level 2 reload the weights."""
        self.abort(*range(len(PROMPTS)))
        self._llm.sleep(level)
        self._llm.wake_up()
        if level == 2:
            self._llm.collective_rpc("reload_weights")

    def counts(self) -> dict[str, float]:
        samples = self.metrics({})["samples"]
        return {
            word: sum(value for found, _, value in samples if found == name)
            for word, name in COUNTERS.items()
        }

    def tell(self, chapters: Mapping[str, Chapter], expected: Answers) -> None:
        """Run all chapters; raise AssertionError at the first wrong token."""
        for name, chapter in chapters.items():
            chapter.before(self)
            counts = self.counts()
            answers = self.serve(chapter.events)
            right = [None if place in chapter.aborted else one for place, one in enumerate(expected)]
            assert answers == right, f"other tokens: {name}"
            moved = {word for word, value in self.counts().items() if value > counts[word]}
            assert moved.issuperset(chapter.moves), f"{name}: {moved}"


class Model:
    """A model and the right answers to ``PROMPTS``."""

    def __init__(self, folder: Path, size: str) -> None:
        self.path = make_model(folder, size)
        if size == "windows":
            config = json.loads((self.path / "config.json").read_text())
            (self.path / "config.json").write_text(json.dumps({**config, "sliding_window": WINDOW_TOKENS}))
        with engine("late", self.path, None, {"num_gpu_blocks_override": 200}) as it:
            self.answers = it.serve({})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    for name, value in environment().items():
        os.environ[name] = value
    return cache(partial(Model, tmp_path_factory.mktemp("models")))


@pytest.fixture
def model(models: Callable[[str], Model], request: pytest.FixtureRequest) -> Model:
    return models(getattr(request, "param", "tiny"))


# vLLM needs an empty one for each engine that can sleep, and they are never empty.
_allocators: list[object] = []


@contextmanager
def engine(
    order: str, model: Path, settings: Mapping[str, Any] | None, more: Mapping[str, Any] | None = None
) -> Iterator[Engine]:
    """Start an engine in this process."""
    it = Engine(model, settings, more or {})
    try:
        yield it
    finally:
        choose(order)  # a planted fault leaves copies behind
        it.stop({})
        _allocators.append(cumem.CuMemAllocator.instance)
        cumem.CuMemAllocator.instance = None


def settings(folder: Path) -> dict[str, Any]:
    """Return settings with deadlines that late copies meet even on a busy machine."""
    found = {**over_files(32 << 20, folder), "block_size": CHUNK_TOKENS, "request_deadline_s": LONG_S}
    return {**found, "secondary_tiers": [{**tier, "deadline_s": LONG_S} for tier in found["secondary_tiers"]]}


refused_loads: list[TransferError] = []
"""Errors of the next attempts to load."""


@pytest.fixture(autouse=True)
def copies_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load small pages by copies too, because kvtier's kernel is never late; raise ``refused_loads``."""
    monkeypatch.setattr(_cuda_runtime, "_open_kernel", lambda device: None)
    start = TorchStream.start_transfer

    def start_transfer(self: TorchStream, after: Any, plan: CopyPlan) -> Any:
        if refused_loads and not self._is_store:
            raise refused_loads.pop()
        return start(self, after, plan)

    monkeypatch.setattr(TorchStream, "start_transfer", start_transfer)


# BLHNC: the layers of a block are one range of bytes, so a chunk needs few copies.
@pytest.mark.parametrize(
    ("order", "layout", "model", "more"),
    [
        ("late", "LBHNC", "tiny", DRAFTED),
        ("early", "BLHNC", "tiny", IN_GRAPHS),
        ("random:1", "BLHNC", "tiny", IN_GRAPHS),
        ("late", "BLHNC", "windows", WITH_WINDOWS),
    ],
    indirect=["order", "model"],
)
def test_tokens_survive_everything(
    order: str,
    layout: str,
    model: Model,
    more: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    with engine(order, model.path, settings(tmp_path) | LOADED_WITHIN_STEPS, more) as it:
        assert it._llm.llm_engine.vllm_config.cache_config.kv_cache_layout == layout
        it.tell({**FIRST, **HOST_MEMORY, **ABORTED, **REFUSED}, model.answers)
        if more is not WITH_WINDOWS:  # a prompt needs more blocks than its answer; no load is expedited
            assert it.counts()["preempted"]
            assert CopyQueue.EXPEDITED in {thread.name for thread in threading.enumerate()}
        it.settle({})
    with engine(order, model.path, settings(tmp_path), {**WHOLE, **more}) as it:
        it.tell(CHAPTERS, model.answers)
        assert bool(it.counts()["drafted"]) == (more is DRAFTED)
        assert not it.idle_aborts or order != "late"


@pytest.mark.parametrize("order", ["late"], indirect=True)
def test_early_report_changes_tokens(
    order: str, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported_at_once(monkeypatch)
    found = pytest.raises(AssertionError, match=r"^other tokens")
    with engine(order, model.path, settings(tmp_path)) as it, found:
        it.tell({**FIRST, **HOST_MEMORY}, model.answers)
