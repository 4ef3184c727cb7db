"""vLLM's CUDA build with kvtier over the fake GPU: the tokens are those of an engine without a connector."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier._device.backends import _cuda_runtime
from kvtier._device.base import CopyQueue
from kvtier_bench.engine import process
from kvtier_bench.engine.compared import engine_arguments, environment, make_model, make_prompt, over_files
from tests.fakegpu.test_orders import Plant, order, reported_at_once, without_wait

__all__ = ["order"]  # a fixture
pytest.importorskip("vllm")
pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif("KVTIER_FAKE_ORDER" not in os.environ, reason="not on the fake GPU: nox -s fakegpu"),
    pytest.mark.timeout(1800),  # of a test that hangs: on a busy machine an engine starts in a minute
]
CHUNK_TOKENS, OUTPUT_TOKENS, LONG_S = 32, 24, 600.0
SHARED = make_prompt("shared", 96)
PROMPTS = [make_prompt(f"own {number}", 130 + 40 * number, SHARED) for number in range(4)]
FOR_FOUR = {  # the blocks of the device hold two of these requests at their ends
    "dtype": "bfloat16",  # for FlashAttention
    "block_size": 16,
    "max_model_len": 512,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 34,
    "gpu_memory_utilization": 0.05,
}

Answers = list[list[int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for name, value in environment().items():
        os.environ[name] = value
    return make_model(tmp_path_factory.mktemp("model"), "tiny")


@contextmanager
def engine(model: Path, settings: Mapping[str, Any] | None) -> Iterator[process.Engine]:
    """Start an engine in this process."""
    it = process.Engine()
    it.load({})
    gc.freeze()  # vLLM collects garbage many times in a start, which takes most of the start
    it.start({"arguments": engine_arguments(model, settings, FOR_FOUR)})
    try:
        yield it
    finally:
        torch.cuda.synchronize()  # a planted fault leaves copies behind
        it.stop({})


def answer(it: process.Engine, prompts: Sequence[Sequence[int]] = PROMPTS) -> Answers:
    found: Answers = it.generate({"prompts": prompts, "output_tokens": OUTPUT_TOKENS})["answers"]
    return found


def count(it: process.Engine, name: str) -> float:
    return float(sum(value for found, _, value in it.metrics({})["samples"] if found == name))


@pytest.fixture(scope="module")
def expected(model: Path) -> Answers:
    with engine(model, None) as it:
        return answer(it)


def settings(folder: Path) -> dict[str, Any]:
    """Return settings with deadlines that late copies on a busy machine keep."""
    found = {**over_files(32 << 20, folder), "block_size": CHUNK_TOKENS, "request_deadline_s": LONG_S}
    return {**found, "secondary_tiers": [{**tier, "deadline_s": LONG_S} for tier in found["secondary_tiers"]]}


@dataclass
class Story:
    """Answers of engines with kvtier, and events on the way."""

    answers: list[Answers] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)


def tell_story(model: Path, folder: Path) -> Story:
    """Preempt and evict, load what was evicted, and load everything in a second engine on the same files."""
    story = Story()
    with engine(model, settings(folder)) as it:
        story.answers += [answer(it), answer(it, PROMPTS[::-1])[::-1]]
        story.counts["preempted"] = count(it, "vllm:num_preemptions_total")
        story.counts["loaded"] = count(it, "kvtier_loaded_chunks_total")
        it.settle({})
    with engine(model, settings(folder)) as it:
        story.answers.append(answer(it))
        story.counts["loaded again"] = count(it, "kvtier_loaded_chunks_total")
    return story


@pytest.fixture(autouse=True)
def copies_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load small pages by copies too: kvtier's kernel is never late."""
    monkeypatch.setattr(_cuda_runtime, "_open_kernel", lambda device: None)


@pytest.mark.parametrize("order", ["late", "early"], indirect=True)
def test_tokens_survive_everything(order: str, model: Path, expected: Answers, tmp_path: Path) -> None:
    story = tell_story(model, tmp_path)
    assert story.answers == [expected] * 3
    assert all(story.counts.values()), story.counts


@pytest.mark.parametrize(
    ("order", "plant"),
    [
        pytest.param("early", without_wait(CopyQueue.STORE), id="store-without-wait"),
        pytest.param("late", reported_at_once, id="end-without-wait"),
    ],
    indirect=["order"],
)
def test_missing_wait_changes_tokens(
    order: str, plant: Plant, model: Path, expected: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert tell_story(model, tmp_path).answers != [expected] * 3
