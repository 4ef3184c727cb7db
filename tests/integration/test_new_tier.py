"""A tier made with ``kvtier new-tier`` serves a real engine over a restart, as it is."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import new_tier
from tests.integration.conftest import ENVIRONMENT, LLAMA
from tests.integration.harness import PROMPT_CHUNKS, Launcher, prompt

pytestmark = pytest.mark.full

PROMPTS = [prompt(seed) for seed in (1, 2, 3)]
CHUNKS = len(PROMPTS) * PROMPT_CHUNKS


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder into which a new tier was installed."""
    pytest.importorskip("hatchling", reason="the build backend of the new distribution is not installed")
    made = new_tier.create("tape-robot", tmp_path)
    target = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(made)], check=True)
    return target


def test_a_new_tier_serves_an_engine_after_a_restart(installed: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed; nox -s integration installs it")
    tier = {"type": "tape-robot", "path": str(tmp_path / "chunks.db")}
    settings: dict[str, Any] = {"cpu_bytes_to_use": "64MiB", "secondary_tiers": [tier]}
    # A launcher of its own: its processes find the new distribution as if it were installed beside kvtier.
    with Launcher(tmp_path, {**ENVIRONMENT, "PYTHONPATH": str(installed)}) as launcher:
        model = launcher.make_model(tmp_path / "model", "LlamaConfig", "LlamaForCausalLM", LLAMA)
        with launcher.start(model, enable_prefix_caching=False) as engine:
            reference = engine.generate(*PROMPTS)
        with launcher.start(model, settings) as engine:
            cold, loaded_cold = engine.served(*PROMPTS)
        with launcher.start(model, settings) as engine:
            restarted, loaded_restarted = engine.served(*PROMPTS)
            engine.reset()
            after_reset, loaded_after_reset = engine.served(*PROMPTS)
            metrics = engine.metrics()

    assert cold == restarted == after_reset == reference
    assert (loaded_cold, loaded_restarted, loaded_after_reset) == ({}, {"tape-robot": CHUNKS}, {})
    assert metrics.value("kvtier_tier_up", tier="tape-robot") == 1
