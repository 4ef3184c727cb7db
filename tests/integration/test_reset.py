"""After a reset nothing that was stored before is given back, in no tier and after no restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Ask
from tests.integration.harness import PROMPT_CHUNKS, Launcher, prompt

pytestmark = pytest.mark.releases

PROMPTS = [prompt(seed) for seed in (1, 2)]
OTHERS = [prompt(seed) for seed in range(10, 16)]
CHUNKS = len(PROMPTS) * PROMPT_CHUNKS


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return {"cpu_bytes_to_use": "64MiB", "secondary_tiers": [{"type": "fs", "root_dir": str(tmp_path)}]}


def test_a_reset_hides_everything_for_ever_and_gives_every_slot_back(
    launcher: Launcher, llama: Path, reference: Ask, settings: dict[str, Any]
) -> None:
    with launcher.start(llama, settings) as engine:
        for _ in range(3):
            engine.generate(*PROMPTS, together=True)
            engine.reset()  # with stores and puts under way
        after_reset, loaded_after_reset = engine.served(*PROMPTS)
        metrics = engine.settled()
        engine.generate(*OTHERS)
        again, loaded_again = engine.served(*PROMPTS)
        engine.reset()
    with launcher.start(llama, settings) as engine:
        restarted, loaded_restarted = engine.served(*PROMPTS)
    with launcher.start(llama, settings) as engine:
        stored_after, loaded_stored_after = engine.served(*PROMPTS)

    assert after_reset == again == restarted == stored_after == reference(*PROMPTS)
    assert loaded_after_reset == {}
    assert metrics.value("kvtier_free_slots") == metrics.value("kvtier_slots") - CHUNKS
    assert loaded_again == {"cpu": CHUNKS}
    assert loaded_restarted == {}
    assert loaded_stored_after == {"fs": CHUNKS}
