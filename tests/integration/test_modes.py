"""Ways to run the engine: speculation, asynchronous scheduling, prompts in pieces, no prefix caching."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtier_bench.engine.compared import BLOCK_TOKENS
from tests.integration.conftest import Ask, in_full
from tests.integration.harness import Launcher, prompt
from tests.integration.test_models import OTHERS
from tests.integration.test_models import PROMPTS as ALL

pytestmark = pytest.mark.releases

PROMPTS = [prompt(1), *ALL[1:]]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
PIECES = 3 * BLOCK_TOKENS  # no length of a prompt or chunk is a multiple of it


@pytest.mark.parametrize(
    ("arguments", "more_settings"),
    [
        in_full({"speculative_config": NGRAM}, {"block_size": 64}),
        in_full({"async_scheduling": True}, {}),
        in_full({"async_scheduling": False}, {}),
        ({"max_num_batched_tokens": PIECES, "async_scheduling": True}, {"block_size": 64}),
        in_full({"max_num_batched_tokens": PIECES}, {}),
        in_full({"enable_prefix_caching": False}, {}),
    ],
    ids=["ngram", "async", "sync", "pieces, async", "pieces", "no prefix caching"],
)
def test_every_tier_gives_same_tokens(
    launcher: Launcher,
    llama: Path,
    reference: Ask,
    settings: dict[str, Any],
    arguments: dict[str, Any],
    more_settings: dict[str, Any],
) -> None:
    settings |= more_settings
    with launcher.start(llama, settings, **arguments) as engine:
        cold = engine.generate(*PROMPTS)
        engine.generate(*OTHERS, together=True)
        again, loaded_again = engine.served(*PROMPTS)
        engine.generate(*OTHERS)
        at_once, loaded_at_once = engine.served(*PROMPTS, *OTHERS, together=True)
        drafted = engine.metrics().value("vllm:spec_decode_num_draft_tokens")
    with launcher.start(llama, settings, **arguments) as engine:
        restarted, loaded_restarted = engine.served(*PROMPTS, together=True)

    assert cold == again == restarted == reference(*PROMPTS)
    assert at_once == reference(*PROMPTS, *OTHERS)
    chunks = _whole_chunks(more_settings.get("block_size", BLOCK_TOKENS))
    assert loaded_restarted["fs"] == chunks
    if arguments.get("enable_prefix_caching", True):
        assert loaded_again == {"cpu": chunks}
    else:  # each prompt loads its shared prefix
        assert loaded_again["cpu"] > chunks
    assert loaded_at_once["cpu"] > chunks
    assert bool(drafted) is ("speculative_config" in arguments)


def _whole_chunks(chunk_tokens: int) -> int:
    """Count the distinct chunks of the prompts."""
    ends = range(chunk_tokens, 1000, chunk_tokens)
    return len({tuple(one[:end]) for one in PROMPTS for end in ends if end <= len(one)})


@pytest.mark.parametrize("prompt_only", [in_full(True), False])
def test_answers_stored_on_request(
    launcher: Launcher, llama: Path, reference: Ask, settings: dict[str, Any], prompt_only: bool
) -> None:
    settings["offload_prompt_only"] = prompt_only
    first = prompt(1)
    with launcher.start(llama, settings) as engine:
        (answer,) = engine.generate(first, output_tokens=100)
        further = [*first, *answer, *prompt(2, 50)]
        engine.settled()
        engine.reset(connector=False)
        said, loaded = engine.served(further)

    assert [answer] == reference(first, output_tokens=100)
    assert said == reference(further)
    # The last token of an answer has no keys and values yet when vLLM returns it.
    tokens = len(first) if prompt_only else len(first) + len(answer) - 1
    assert loaded == {"cpu": tokens // BLOCK_TOKENS}


def test_chunks_have_several_blocks(
    launcher: Launcher, llama: Path, reference: Ask, settings: dict[str, Any]
) -> None:
    prompts = PROMPTS[:3]
    settings["blocks_per_chunk"] = None
    with launcher.start(llama, settings) as engine:
        cold, _ = engine.served(*prompts)
        engine.reset(connector=False)
        again, loaded = engine.served(*prompts)

    assert cold == again == reference(*prompts)
    chunk_tokens = 4 * BLOCK_TOKENS  # a block of this model has 128 KiB
    assert loaded == {"cpu": sum(len(one) // chunk_tokens for one in prompts)}
