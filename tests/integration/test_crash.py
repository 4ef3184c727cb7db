"""Engines killed at work leave nothing that harms the next engine."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvtier_bench.engine.compared import EngineError
from tests.common import wait_until
from tests.integration.conftest import Ask
from tests.integration.harness import (
    PROMPT_CHUNKS,
    Launcher,
    chunks_in,
    prompt,
    wait_until_removed,
)

ROUNDS = [[prompt(seed) for seed in range(first, first + 15)] for first in (200, 300)]


def test_killed_during_cascades(launcher: Launcher, llama: Path, reference: Ask, tmp_path: Path) -> None:
    settings = {"cpu_bytes_to_use": "128MiB", "secondary_tiers": [{"type": "fs", "root_dir": str(tmp_path)}]}
    generator = random.Random(7)
    left: list[Path] = []
    for round_, prompts in enumerate(ROUNDS):
        there = len(chunks_in(tmp_path))
        engine = launcher.start(llama, settings)
        left += engine.regions
        chunks = there + generator.randrange(5, 100)
        with pytest.raises(EngineError, match="the engine died"):
            engine.call("die_at", root=str(tmp_path), chunks=chunks, prompts=prompts)
        engine.kill()
        new = len(chunks_in(tmp_path)) - there
        assert 0 < new < len(prompts) * PROMPT_CHUNKS, f"round_ {round_}: killed too late"
        wait_until_removed(left)  # the guard, which outlives the engine, removes it

    there = len(chunks_in(tmp_path))
    with launcher.start(llama, settings) as engine:
        (region,) = engine.regions
        prompts = [prompt for prompts in ROUNDS for prompt in prompts]
        answers, loaded = engine.served(*prompts)
        _wait_until_swept(tmp_path)
        metrics = engine.metrics()

    assert answers == reference(*prompts)
    assert 0 < loaded["fs"] <= there
    assert metrics.value("kvtier_get_failed_chunks") == 0
    assert list(tmp_path.glob("*/quarantine/*")) == []
    assert len(chunks_in(tmp_path)) == len(prompts) * PROMPT_CHUNKS
    assert not region.exists()


def _wait_until_swept(root: Path) -> None:
    """Wait until only the live writer has a directory for unfinished files."""
    wait_until(lambda: sum(path.is_dir() for path in root.glob("*/.tmp/*")) == 1)
