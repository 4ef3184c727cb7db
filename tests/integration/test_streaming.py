"""Requests with streamed input: their stored chunks are right for every later prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Ask, in_full
from tests.integration.harness import Engine, Launcher, Tokens, prompt

pytestmark = pytest.mark.releases

SIZES = [(100, 28), (90, 16), (75, 8)]
"""Tokens of each input and of the answer to it: the session continues within a block each time."""

INTERRUPTED: list[dict[str, int]] = [{}, {}, {}, {"preempt_after": 5}, {"abort_after": 4}]


def converse(engine: Engine, number: int, **how: int) -> Tokens:
    """Run a session; return its text and the beginning of another prompt after it."""
    inputs = [prompt(10 * number + place, tokens) for place, (tokens, _) in enumerate(SIZES)]
    answers = [count for _, count in SIZES]
    told = engine.call("converse", module="tests.integration.sessions", inputs=inputs, answers=answers, **how)
    return [*told["text"], *prompt(1000 + number, 30)]


@pytest.mark.parametrize("blocks_per_chunk", [1, in_full(2)])
def test_continued_prompts_are_right(
    launcher: Launcher, llama: Path, reference: Ask, settings: dict[str, Any], blocks_per_chunk: int
) -> None:
    settings["blocks_per_chunk"] = blocks_per_chunk
    with launcher.start(llama, settings) as engine:
        texts = [converse(engine, number, **how) for number, how in enumerate(INTERRUPTED)]
        engine.settled()
        engine.reset(connector=False)
        answers, loaded = engine.served(*texts)
    assert answers == reference(*texts)
    chunks = (sum(SIZES[0]) - 1) // (32 * blocks_per_chunk)
    assert loaded["cpu"] >= len(texts) * chunks, "what came before the first pause is there"
