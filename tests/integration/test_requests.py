"""Requests that end early leave no pin and no slot behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.conftest import Ask
from tests.integration.harness import PROMPT_CHUNKS, Forge, prompt

STORED = [prompt(seed) for seed in range(6)]
NEW = [prompt(seed) for seed in range(50, 56)]


@pytest.mark.parametrize("kept_in", ["memory", "files"])
def test_aborted_requests_leave_nothing_behind(
    forge: Forge, llama: Path, reference: Ask, tmp_path: Path, kept_in: str
) -> None:
    settings = {"cpu_bytes_to_use": "64MiB", "secondary_tiers": [{"type": "fs", "root_dir": str(tmp_path)}]}
    if kept_in == "files":
        with forge.start(llama, settings) as engine:
            engine.served(*STORED)
    with forge.start(llama, settings) as engine:
        if kept_in == "memory":
            engine.served(*STORED)
        aborted = 0
        for steps in range(5):
            prompts = [*STORED[::2], *NEW[::2]]
            answer = engine.ask("abort", prompts=prompts, output_tokens=16, steps=steps, name=f"cut-{steps}")
            aborted += answer["aborted"]
        metrics = engine.settled()
        answers, _ = engine.served(*STORED, *NEW)
        at_end = engine.settled()

    assert aborted > 0
    assert metrics.is_idle
    assert answers == reference(*STORED, *NEW)
    everything = (len(STORED) + len(NEW)) * PROMPT_CHUNKS
    assert at_end.value("kvtier_slots") - at_end.value("kvtier_free_slots") == everything
