"""The tiers in their own process, the default: any failure of it costs only misses."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.common import is_alive
from tests.integration.conftest import Ask
from tests.integration.harness import PROMPT_CHUNKS, Engine, Launcher, prompt

PROMPTS = [prompt(seed) for seed in (1, 2, 3)]
OTHERS = [prompt(seed) for seed in range(10, 20)]  # more than the device cache and the primary tier hold
CHUNKS = len(PROMPTS) * PROMPT_CHUNKS
DEADLINE_S = 4.0
MUCH_LATER_S = 60.0  # on a busy machine


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return {
        "cpu_bytes_to_use": "16MiB",
        "eviction_policy": "lru",  # other policies may keep often-used chunks
        "request_deadline_s": DEADLINE_S,
        "secondary_tiers": [{"type": "fs", "root_dir": str(tmp_path), "min_free_bytes": 0}],
    }


def test_dead_process_costs_misses(
    launcher: Launcher, llama: Path, reference: Ask, settings: dict[str, Any]
) -> None:
    with launcher.start(llama, settings) as engine:
        engine.until_open("fs")
        engine.served(*PROMPTS)
        for end, reason in ((signal.SIGKILL, "killed"), (signal.SIGSTOP, "silent")):
            engine.generate(*OTHERS)
            engine.settled()
            tiers = process_of_tiers(engine)
            if end is signal.SIGSTOP:  # the requests wait for it, until their deadline
                os.kill(tiers, end)
            begun_s = time.monotonic()
            engine.tell("generate", prompts=[*PROMPTS, *OTHERS], output_tokens=8, together=True)
            if end is signal.SIGKILL and is_alive(tiers):
                os.kill(tiers, end)
            answers = engine.hear("generate")["answers"]
            assert time.monotonic() - begun_s < MUCH_LATER_S
            assert answers == reference(*PROMPTS, *OTHERS)
            engine.until(
                lambda metrics, reason=reason: metrics.value("kvtier_tier_process_ended", reason=reason) == 1,  # type: ignore[misc]
                f"the end of a process that is {reason}",
            )
            engine.until(
                lambda _, tiers=tiers: engine.tiers_process not in (None, tiers),  # type: ignore[misc]
                "another process of the tiers",
            )
            engine.until_open("fs")
            assert not is_alive(tiers)
            engine.generate(*OTHERS)
            again, loaded = engine.served(*PROMPTS)
            assert again == reference(*PROMPTS)
            assert loaded == {"fs": CHUNKS}
        ended = engine.metrics().value("kvtier_tier_process_ended")
        tiers = process_of_tiers(engine)
        (region,) = engine.regions
    assert ended == 2
    assert not is_alive(tiers)
    assert not region.exists()


def process_of_tiers(engine: Engine) -> int:
    pid = engine.tiers_process
    assert pid is not None
    return pid
