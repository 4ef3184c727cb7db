"""vLLM's queue of waiting requests: what is loaded is never stranded behind what gets no blocks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from kvtier.core.requests import Request
from tests.integration.conftest import Ask
from tests.integration.harness import BLOCK_TOKENS, OUTPUT_TOKENS, Forge, prompt, vllm_release

FIRST = prompt(1, 1000)
BEHIND = [prompt(2, 900), prompt(3, 900)]
BLOCKS = 80  # for the two, or for the first, but not for all at once
_PATIENCE_S = 50.0


def test_what_was_loaded_goes_on_though_the_first_gets_no_blocks(
    forge: Forge, llama: Path, reference: Ask, tmp_path: Path
) -> None:
    settings = {
        "cpu_bytes_to_use": "64MiB",
        "secondary_tiers": [{"type": "fs", "root_dir": str(tmp_path / "root")}],
    }
    arguments: dict[str, Any] = {"enable_prefix_caching": False, "num_gpu_blocks_override": BLOCKS}
    with forge.start(llama, settings, **arguments) as engine:
        engine.generate(FIRST, *BEHIND)
        engine.settled()
    with forge.start(llama, settings, **arguments) as engine:
        engine.generate(*BEHIND)  # the primary tier has them from now on, and the first has to be fetched
        engine.settled()
        order = {"prompts": [FIRST, *BEHIND], "output_tokens": OUTPUT_TOKENS}
        told = engine.ask("call", module=__name__, function="queue_up", arguments=order)
        loaded = engine.settled().loaded()

    assert told["answers"] == reference(FIRST, *BEHIND)
    assert told["was_first_in_the_way"] is (vllm_release() < (0, 31)), "later ones see to it themselves"
    assert loaded["cpu"] == sum(len(one) // BLOCK_TOKENS for one in BEHIND)


def test_the_rest_of_the_queue_is_put_off_ever_more_rarely_for_one_that_is_never_seen_to_run() -> None:
    """Of one that was preempted nobody is told that it runs again: the first must not be passed for ever."""
    pytest.importorskip("vllm")
    from kvtier.adapters.vllm.queue import Queue

    queue = Queue(strands=True)
    first, preempted = Request("first"), Request("preempted")
    queue.loads(preempted)

    def put_off_in(steps: int) -> int:
        count = 0
        for _ in range(steps):
            queue.last = first  # is asked, and gets no blocks
            queue.end_step([])
            count += queue.passes
        return count

    assert put_off_in(1) == 1
    assert put_off_in(1) == 0, "the first itself is tried again"
    assert 0 < put_off_in(1000) < 20
    queue.ends_load()
    assert put_off_in(1) == 1, "now it can go on, and may be behind the first"
    queue.ends(preempted)
    assert put_off_in(10) == 0


def queue_up(llm: Any, prompts: list[list[int]], output_tokens: int) -> dict[str, Any]:
    """In the engine: have the first prompt fetched while the others are loaded already, and end them all."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    manager = scheduler.connector.connector_scheduler.manager
    sampling = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    for number, one in enumerate(prompts):
        engine.add_request(f"queued-{number}", {"prompt_token_ids": one}, sampling)
    engine.step()
    deadline = time.monotonic() + _PATIENCE_S
    while not manager._executor.events and time.monotonic() < deadline:
        time.sleep(0.01)
    deadline = time.monotonic() + _PATIENCE_S
    ended: dict[str, list[int]] = {}
    was_first_in_the_way = False
    while engine.has_unfinished_requests() and time.monotonic() < deadline:
        ended |= {done.request_id: list(done.outputs[0].token_ids) for done in engine.step() if done.finished}
        was_first_in_the_way |= manager._queue.passes
    answers = [ended.get(f"queued-{number}") for number in range(len(prompts))]
    return {"answers": answers, "was_first_in_the_way": was_first_in_the_way}
