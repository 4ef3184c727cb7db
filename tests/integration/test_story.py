"""The main job: what was computed is served from the primary tier, and after a restart from files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.integration.harness import PROMPT_CHUNKS, Forge, prompt

STORY = [prompt(seed) for seed in (1, 2, 3)]
OTHERS = [prompt(seed) for seed in range(10, 16)]
CHUNKS = len(STORY) * PROMPT_CHUNKS


def test_served_from_memory_and_after_a_restart_from_files(
    forge: Forge, llama: Path, reference: Callable, tmp_path: Path
) -> None:
    settings = {"cpu_bytes_to_use": "64MiB", "secondary_tiers": [{"type": "fs", "root_dir": str(tmp_path)}]}
    with forge.start(llama, settings) as engine:
        cold, loaded_cold = engine.served(*STORY)
        engine.generate(*OTHERS)
        again, loaded_again = engine.served(*STORY)
        print(engine.metrics())
    with forge.start(llama, settings) as engine:
        restarted, loaded_restarted = engine.served(*STORY)
        print(engine.metrics())

    assert cold == again == restarted == reference(*STORY)
    assert loaded_cold == {}
    assert loaded_again == {"cpu": CHUNKS}
    assert loaded_restarted == {"fs": CHUNKS}
